"""FSDP2 on two gloo ranks: every operator of the capture is found in what the profiler recorded, and settings run."""

import json

import pytest
from forked_ranks import forked_ranks

from lagom_overlap.cli import main

__all__ = ["forked_ranks"]

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow]

SCRIPT = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lagom_overlap import TrainingStep

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

def step() -> TrainingStep:
    mesh, model = init_device_mesh("cpu", (2,)), Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    loss = lambda y: y.square().mean()
    return TrainingStep(model=model, inputs=(torch.ones(8, H),), loss=loss, optimizers=(optimizer,))
"""
JOB = """
[job]
name = "mlp-fsdp2"
backend = "gloo"
ranks = 2
link = "1 Gbit/s"

[program]
script = "mine.py"
function = "step"

[plan]
rounds = 3
"""


def test_settings_are_chosen_of_a_step_that_was_recorded_and_run_against_fsdp2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["plan", "job.toml", "--execute", "--json", "--out", "plan"]) == 0
    found = json.loads(capsys.readouterr().out)
    times, run = found["times"], found["execution"]
    assert (times["source"], times["num_steps"], times["is_gpu"]) == ("ranks", 7, False)
    for held in (times["computations"], times["collectives"]):
        assert held["num"] == held["num_measured"] > 0
        assert held["share_of_time"] == 1
    assert times["num_in_order"] >= 0.8 * (times["computations"]["num"] + times["collectives"]["num"])
    assert found["carrier"] == "fsdp2"
    # of a blocking step only parameters that are kept can gain: each gathering of a step is time of the host
    assert found["fsdp2"]["settings"]["kept"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert (run["is_bitwise_equal"], run["rounds"], run["exposed_comm_s"]) == (True, 3, {})
    assert main(["plan", "job.toml", "--apply", "plan/plan.toml", "--planner", "ours"]) == 2
    assert main(["plan", "job.toml", "--planner", "program_order", "--execute"]) == 2
    assert "takes settings, no rewrites" in capsys.readouterr().err
