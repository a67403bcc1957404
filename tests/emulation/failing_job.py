"""Rank 1 fails by an error of its own while a collective is under way; run by test_cuda_torch.py."""

import os

import torch
from torch import distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.randn(4 << 20, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
for _ in range(3):
    dist.all_reduce(x)
    if rank == 1:
        raise ValueError("the job's own error")
dist.destroy_process_group()
