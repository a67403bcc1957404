"""One rank of a small real job for the tests; started by `gloo_job`, not by hand. Its only argument is JSON."""

import json
import logging
import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lagom_overlap import OnlineTuner
from lagom_overlap.errors import LagomError
from lagom_overlap.online import tuner as tuner_module
from lagom_overlap.online.routes import gloo as gloo_route
from small_messages import SCALE, make_small, num_used

WIDTH = 32
"""A layer's matrix is 16 KiB, the least that can be set here (`small_messages`)."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def sequential(num_layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Mlp() for _ in range(num_layers)))


def sharded(**how: Any) -> nn.Module:
    model = sequential()
    for layer in model:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


class Exchanging(nn.Module):
    """Layers whose activations go round by all-to-all; every rank holds the same weights and never sums gradients.

    With `varies` every step sends another number of bytes: from 38 to 48 KiB, the same on all ranks.
    """

    def __init__(self, *, varies: bool = False) -> None:
        super().__init__()
        self.layers = sequential(2)
        self.varies, self.num_steps = varies, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = (3 << 12) - (48 * (7 * self.num_steps % 50) if self.varies else 0)
        self.num_steps += 1
        arrived = torch.empty(length)
        sent = x.detach().flatten().repeat(1 + length // x.numel())[:length].contiguous()
        work = dist.all_to_all_single(arrived, sent, async_op=True)
        x = self.layers[0](x)
        work.wait()
        return self.layers[1](x + arrived[: x.numel()].view_as(x))


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    match kind:
        case "fsdp2" | "fsdp2, gradients of two batches":
            return sharded()
        case "fsdp2, compiled":
            model = sharded()
            for layer in model:
                layer.compile(backend="eager")
            return model
        case "fsdp2, bf16":
            return sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        case "ddp":
            return DistributedDataParallel(sequential(), bucket_cap_mb=1 / SCALE)
        case "calls":
            return Exchanging()
        case "calls, of varying length":
            return Exchanging(varies=True)
        case "tp":
            mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
            model = sequential()
            for layer in model:
                parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                fully_shard(layer, mesh=mesh["dp"])
            return fully_shard(model, mesh=mesh["dp"])
    raise ValueError(kind)


class LostStore:
    """A connection that is gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def pause(step: int, gate: Path) -> None:
    say(f"paused in step {step}")
    while not gate.exists():
        time.sleep(0.01)


def on_loopback(group: dist.ProcessGroup, number: int = 0) -> object:
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


def train(job: dict[str, Any], tuner_options: dict[str, Any] | None) -> dict[str, Any]:
    """The whole training, with a tuner or without; what came of it."""
    rank = dist.get_rank()
    model = model_of(job["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tuner = OnlineTuner(model, optimizer, **tuner_options) if tuner_options is not None else None
    generator = torch.Generator().manual_seed(rank)
    losses, states, graphs = [], [], []
    for step in range(job["steps"]):
        with tuner.step() if tuner is not None else torch.enable_grad():
            if tuner is not None and rank == 0 and step in job["pauses"]:
                pause(step, Path(f"{job['gate']}{step}"))
            x = torch.randn(16, WIDTH, generator=generator)
            loss = (model(x) - x.roll(1, -1)).square().mean()
            loss.backward()
            if "two batches" in job["kind"]:
                (model(x.roll(1, 0)) - x).square().mean().backward()
            for _ in range(job["optimizer_steps"][rank % len(job["optimizer_steps"])]):
                optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
        if tuner is not None:
            states.append(str(tuner.state))
            if job["loses_store"] == [rank, step]:
                tuner._member._exchange._store = LostStore()
            if job["disable_at"] == step and rank == 1:
                os.environ["LAGOM_DISABLE"] = "1"
            say(f"rank {rank} step {step}")
    out = {"losses": losses, "states": states, "graphs": graphs}
    if tuner is not None:
        out |= {"reason": tuner.reason, "settings": len(tuner.settings), "saved": "", "used": num_used()}
        out["contest"] = None if tuner.contest is None else tuner.contest.table()
        if job["save"]:
            try:
                tuner.save(job["save"])
            except LagomError as error:
                out["saved"] = str(error)
        tuner.close()
    return out


def main() -> None:
    job = json.loads(sys.argv[1])
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    if job["file_limit_bytes"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit_bytes"],) * 2)
    if job["loopback_channels"]:
        gloo_route.device_like = on_loopback
    if job["release"] is not None:
        tuner_module.__version__ = job["release"]
    torch.set_num_threads(1)
    make_small()
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["timeout_s"]))
    stock = train(job, None)["losses"] if job["also_stock"] else []
    out = {"stock": stock} | train(job, job["tuner"])
    say(f"result {json.dumps(out)}")
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


if __name__ == "__main__":
    main()
