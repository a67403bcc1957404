"""Small models under one layout of ranks over hosts: `symmetric_job.py LAYOUT FILE`; rank 0 writes what it saw."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

layout, seen_path = sys.argv[1], Path(sys.argv[2])
local, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
torch.cuda.set_device(local)
if layout == "bound":  # a communicator at once, and groups by splits of it
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
elif layout == "both":  # gloo beside NCCL
    dist.init_process_group("cpu:gloo,cuda:nccl")
else:
    dist.init_process_group("gloo" if layout == "gloo" else "nccl")
rank, size = dist.get_rank(), dist.get_world_size()
num_hosts = size // local_size

if layout == "pipeline":
    x = torch.zeros(1 << 22, device="cuda")
    dist.send(x, local_size + local) if rank < local_size else dist.recv(x, local)
mesh = None
if layout in ("hsdp", "tensor", "bound"):
    mesh = init_device_mesh("cuda", (num_hosts, local_size), mesh_dim_names=("over", "inside"))
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(3)))
model.cuda()
if layout == "ddp":
    model = DistributedDataParallel(model, device_ids=[local])
elif layout == "tensor":
    for layer in model:
        parallelize_module(layer, mesh["inside"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["over"])
    fully_shard(model, mesh=mesh["over"])
else:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(2048, 1024, device="cuda")
for _ in range(4):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
summed = torch.tensor([1.0, float(rank % local_size)], device="cuda")
dist.all_reduce(summed)
names: list[object] = [None] * size
dist.all_gather_object(names, f"on {rank}")
rows = torch.arange(size, device="cuda")
taken = torch.empty_like(rows)
dist.all_to_all_single(taken, rows)
given = [1 + peer % local_size for peer in range(size)]  # tokens to each rank
routed = torch.empty(size * (1 + rank % local_size), dtype=torch.int64, device="cuda")
sent = torch.full((sum(given),), 10 + rank % local_size, device="cuda")
dist.all_to_all_single(routed, sent, [1 + rank % local_size] * size, given)
if rank == 0:
    seen_path.write_text(
        json.dumps({"sum": summed.tolist(), "names": names, "taken": taken.tolist(), "routed": routed.tolist()})
    )
dist.barrier()
dist.destroy_process_group()
