"""An all-reduce of 16 MiB a step under `lagom run --config`; rank 1's machine may lack the table."""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
if rank == int(os.environ["LACKING_RANK"]):
    os.environ["LAGOM_TABLE"] = "/nowhere/table.bin"
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gradients = torch.ones(4 << 20, device="cuda")
for _ in range(3):
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    dist.all_reduce(gradients)
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
dist.destroy_process_group()
