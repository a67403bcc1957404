"""Interleaved 1F1B whose receives are deferred (`defer_pp_recv`): run by test_cuda_torch.py.

`TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1` gives each pair of ranks and direction a communicator of its own.
"""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

WIDTH, CHUNKS = 1024, 2
RANK = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(RANK)
DEVICE = torch.device("cuda", RANK)
dist.init_process_group("nccl", device_id=DEVICE)
RANKS = dist.get_world_size()
given = torch.empty(512, WIDTH, device=DEVICE, requires_grad=True)
stages = [
    PipelineStage(nn.Linear(WIDTH, WIDTH).to(DEVICE), number, CHUNKS * RANKS, DEVICE, given, given)
    for number in range(RANK, CHUNKS * RANKS, RANKS)
]
schedule = ScheduleInterleaved1F1B(stages, RANKS, loss_fn=nn.functional.mse_loss, defer_pp_recv=True)
batch = torch.empty(512 * RANKS, WIDTH, device=DEVICE)
if RANK == 0:
    schedule.step(batch)
else:
    schedule.step(target=batch if RANK == RANKS - 1 else None)
torch.cuda.synchronize()
dist.destroy_process_group()
