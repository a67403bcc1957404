"""Two processes, one GPU: all-reduces of several sizes through torch.distributed, checked and timed."""

import os
import time

import torch
from torch import distributed as dist

from lagom_overlap.nccl_plugin.loaded import loaded_nccl

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("nccl")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
for num_bytes in (4 << 10, 1 << 20, 64 << 20):
    data = torch.full((num_bytes // 4,), float(rank + 1), device="cuda")
    dist.all_reduce(data)
    assert bool((data == num_ranks * (num_ranks + 1) / 2).all()), f"wrong sum at {num_bytes} bytes"
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    if rank == 0:
        print(f"all_reduce {num_bytes}: {(time.perf_counter() - began) / 5 * 1e6:.0f} us")
if rank == 0:
    print("NCCL in use", loaded_nccl(), "torch says", torch.cuda.nccl.version())
dist.destroy_process_group()
