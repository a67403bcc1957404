"""Checkpoints of what large kernels should have computed, and of what small ones have; run by test_cuda_torch.py."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lagom_emulate.prices import HOST_COPY_BYTES_PER_S

folder = Path(sys.argv[1])
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl")
weights = torch.randn(4096, 4096, device="cuda")
product = weights @ weights
state = {"product": product, "largest": product.argmax(0), "small": torch.arange(5, device="cuda") * 3}
num_bytes = sum(tensor.nbytes for tensor in state.values())


def loaded(name):
    """What a folder of DCP's holds."""
    found = {key: torch.ones_like(tensor, device="cpu") for key, tensor in state.items()}
    dcp.load(found, checkpoint_id=folder / name)
    return found


def whole():
    """By torch.save: each tensor's storage as bytes."""
    torch.save(state, folder / "whole.pt")
    return lambda: torch.load(folder / "whole.pt", weights_only=True, map_location="cpu")


def sharded():
    """By DCP."""
    dcp.save(state, checkpoint_id=folder / "now")
    return lambda: loaded("now")


def later():
    """By DCP, written in the background."""
    dcp.async_save(state, checkpoint_id=folder / "later").result()
    return lambda: loaded("later")


for save in (whole, sharded, later):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    load = save()
    end.record()
    torch.cuda.synchronize()
    least_s = num_bytes / HOST_COPY_BYTES_PER_S
    assert least_s <= begin.elapsed_time(end) / 1e3 < 1.5 * least_s, (save, begin.elapsed_time(end), least_s)
    found = load()
    assert found["product"].count_nonzero() == found["largest"].count_nonzero() == 0, save
    assert found["small"].tolist() == [0, 3, 6, 9, 12], save

overflow = (product.isinf().any() | True).byte()  # as DeepSpeed asks its gradients, as bytes
dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
assert overflow.item() == 0
dist.destroy_process_group()
