"""Two emulated GPUs run a sharded step as written and on the executor's streams; rank 0 writes how long each took."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from lagom_overlap.engines.fx.apply import apply_rewrites
from lagom_overlap.engines.fx.cuda_streams import CudaStep
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.program import capture_step
from lagom_overlap.workload.rewrite.steps import Reorder

C10D = torch.ops._c10d_functional
LAYERS, WIDTH, TOKENS, RUNS = 6, 2048, 4096, 6


def step(x, *shards):
    for shard in shards:
        gathered = C10D.all_gather_into_tensor(shard, dist.get_world_size(), dist.group.WORLD.group_name)
        x = torch.relu(x @ C10D.wait_tensor(gathered))
    return (x,)


def timed(run):
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(RUNS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / RUNS


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
shapes = [(TOKENS, WIDTH), *[(WIDTH // dist.get_world_size(), WIDTH)] * LAYERS]
inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
captured = capture_step(step, tuple(inputs), name="step")
comms = [op.name for op in captured.iteration.comms]
computed = [op.name for op in captured.iteration.computations]
order = comms[:2]
for layer in range(LAYERS):
    order += [*computed[2 * layer : 2 * layer + 2], *comms[layer + 2 : layer + 3]]
groups = ProcessGroups()
planned = CudaStep(apply_rewrites(captured.graph_module, captured.iteration, (Reorder(tuple(order)),), groups), groups)
found = {"as_written": timed(lambda: step(*inputs)), "planned": timed(lambda: planned.run(inputs))}
if dist.get_rank() == 0:
    Path(os.environ["FOUND"]).write_text(json.dumps(found), encoding="utf-8")
dist.destroy_process_group()
