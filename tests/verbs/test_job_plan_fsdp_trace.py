"""A step under FSDP2, captured without running it, and a trace of the same step as it ran: every operator is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lagom_overlap.cli import main

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow]

SCRIPT = """
import os
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

H = 64

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H)) for _ in "abc"]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x * 1.0

def made():
    mesh, model = init_device_mesh("cpu", (2,)), Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.zeros(8, H), torch.optim.AdamW(model.parameters(), foreach=True)

def loss(out):
    return out.square().mean()

def step():
    from lagom_overlap.capturing.fake_tensor import TrainingStep
    model, x, optimizer = made()
    return TrainingStep(model=model, inputs=(x,), loss=loss, optimizers=(optimizer,))

if __name__ == "__main__":
    from torch.profiler import ProfilerActivity, profile, schedule
    dist.init_process_group("gloo")
    model, x, optimizer = made()
    write = lambda held: dist.get_rank() or held.export_chrome_trace("trace.json")
    plan = schedule(wait=0, warmup=2, active=2, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan, on_trace_ready=write
    ) as profiler:
        for _ in range(4):
            loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    dist.barrier()
    os._exit(0)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)
"""


def test_a_trace_of_fsdp2_holds_every_operator_of_its_capture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "mine.py"]
    subprocess.run(launch, check=True, capture_output=True)
    assert main(["capture", "mine.py:step", "--ranks", "2", "--out", "step.json.gz"]) == 0
    capsys.readouterr()
    plan = ["plan", "step.json.gz", "--cluster", "a40_nvlink", "--planner", "program_order", "--times", "trace.json"]
    assert main([*plan, "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["times"]
    assert (times["source"], times["num_steps"], times["is_gpu"]) == ("trace", 2, False)
    for held in (times["computations"], times["collectives"]):
        assert held["num"] == held["num_measured"] > 0
        assert held["share_of_time"] == 1
    assert times["num_in_order"] >= 0.8 * (times["computations"]["num"] + times["collectives"]["num"])
