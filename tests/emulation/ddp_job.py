"""DDP with eight buckets of 33.6 MB, as PyTorch issues them or through our hook; run by test_cuda_torch.py."""

import os
import sys

import torch
from torch import distributed as dist
from torch import nn

from lagom_overlap.online.adapters.ddp import hook_of

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
blocks = (nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(8))
model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks).cuda().bfloat16(), bucket_cap_mb=32)
if sys.argv[1] == "hooked":
    assert hook_of(model) is not None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
for _ in range(4):
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
