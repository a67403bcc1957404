"""MLP blocks by DeepSpeed, ZeRO stage 3 with overlapped communication.

torchrun --nproc-per-node 4 deepspeed_zero3.py STEPS
"""

import os
import sys

import deepspeed
import torch
from torch import distributed as dist
from torch import nn

WIDTH, SEQUENCE, BATCH = 2048, 2048, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 50_000_000,
    },
}


class Block(nn.Module):
    """Two products with a residual."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """(batch, sequence, width) to the same."""
        return x + self.down(nn.functional.gelu(self.up(x)))


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
deepspeed.init_distributed("nccl")
model = nn.Sequential(*(Block() for _ in range(6)))
engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())
for step in range(int(sys.argv[1])):
    inputs = torch.randn(BATCH, SEQUENCE, WIDTH, device="cuda", dtype=torch.bfloat16)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
dist.destroy_process_group()
