"""Programs of ranks in pairs, of which rank 3 is given something else than rank 2: each sum is slid behind."""

import torch
from rank_cases import GROUPS, reduced
from torch import distributed as dist


def _pair():
    first = dist.get_rank() // 2 * 2
    return GROUPS.made_of((first, first + 1), "pair")


def alike():
    pair = _pair()
    return (lambda x, y: (reduced(x, pair) + y,)), [torch.ones(8, 4), torch.ones(8, 4)]


def other_values():
    step, (x, y) = alike()
    return step, [x, y * (dist.get_rank() == 3)]


def other_inputs():
    """Of rank 3 no input needs to be compared."""
    (step, inputs), pair = alike(), _pair()
    return ((lambda x, y: (reduced(x, pair) + 1.0,)) if dist.get_rank() == 3 else step), inputs
