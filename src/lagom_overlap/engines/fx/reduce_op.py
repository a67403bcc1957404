"""A reduce to one rank as a functional operator, which PyTorch's functional collectives do not have.

It is complete when it returns; a rank other than the root gets memory that holds nothing of meaning.
"""

import torch
from torch import distributed as dist

from lagom_overlap.engines.fx.groups import process_group

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@torch.library.custom_op("lagom_overlap::reduce", mutates_args=())
def reduce(source: torch.Tensor, reduce_op: str, root: int, group: str) -> torch.Tensor:
    """The sum over ranks, on the group's rank `root`."""
    result = source.clone()
    dist.reduce(result, group_dst=root, op=_OPS[reduce_op], group=process_group(group))
    return result


@reduce.register_fake
def _(source: torch.Tensor, reduce_op: str, root: int, group: str) -> torch.Tensor:
    return torch.empty_like(source)
