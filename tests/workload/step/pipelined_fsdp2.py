"""A rank of FSDP2 in a pipeline of PyTorch's: what it gathers and reduces in a step, in order, as JSON in a folder."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, LAYERS, STAGES, BATCHES = 8, 3, 2, 3


class Collectives(TorchDispatchMode):
    """Notes gathers, reductions and products as they are issued."""

    names: list[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for word, name in (("allgather", "gather"), ("reduce_scatter", "scatter"), ("mm.default", "product")):
            if word in str(func):
                self.names.append(name)
        return func(*args, **(kwargs or {}))


def main(folder: str, whole: str) -> None:
    """Runs one step and writes what it issued."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "dp"))
    stays = whole == "whole"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=not stays)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=not stays)
    stage_number = mesh.get_local_rank("pp")
    stage = PipelineStage(model, stage_number, STAGES, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, n_microbatches=BATCHES, loss_fn=lambda output, _: output.sum())
    inputs = [torch.ones(2 * BATCHES, WIDTH, dtype=torch.bfloat16)] if stage_number == 0 else []
    target = {} if stage_number == 0 else {"target": torch.ones(2 * BATCHES, WIDTH)}
    schedule.step(*inputs, **target)  # shapes are found out
    with Collectives() as seen:
        seen.names = []
        schedule.step(*inputs, **target)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(seen.names), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
