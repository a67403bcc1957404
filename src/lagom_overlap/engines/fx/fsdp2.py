"""A plan's advice applied to a model: FSDP2 with its units, prefetch lists, resharding and process groups."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lagom_overlap.engines.fx.fsdp2_advice import Fsdp2Advice

_log = logging.getLogger(__name__)


def shard_as_advised(model: nn.Module, blocks: Sequence[nn.Module], advice: Fsdp2Advice, **options: Any) -> FSDPModule:
    """Applies `fully_shard` to the blocks, in the order in which forward calls them, and to the model around them.

    `options` go to `fully_shard` (`mesh`, `mp_policy`, ...). The losses are those of FSDP2 without advice: only what is
    gathered and scattered together, and when, changes; sums over ranks keep their order of ranks.
    """
    size = advice.modules_per_unit
    units = [list(blocks[start : start + size]) for start in range(0, len(blocks), size)]
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=advice.reshard_after_forward, **options)
    fully_shard(model, **options)
    first = [_sharded(unit[0]) for unit in units]
    last = [_sharded(unit[-1]) for unit in units]
    for place, unit in enumerate(units):
        if advice.forward_prefetch:
            ahead = first[place + 1 : place + 1 + advice.forward_prefetch]
            _sharded(unit[0]).set_modules_to_forward_prefetch(ahead)
        if advice.backward_prefetch:
            behind = last[max(0, place - advice.backward_prefetch) : place][::-1]
            _sharded(unit[-1]).set_modules_to_backward_prefetch(behind)
    root = _sharded(model)
    if advice.separate_reduce_scatter_group:
        _separate_groups(root)
    return root


def _sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), "fully_shard makes it one"
    return module


def _separate_groups(root: FSDPModule) -> None:
    """Reduce-scatters get a process group of their own, where this PyTorch can (2.13 on)."""
    setting = getattr(root, "set_separate_reduce_scatter_group", None)
    if setting is None:
        _log.warning("this PyTorch has no set_separate_reduce_scatter_group: all-gathers and reduce-scatters share one")
        return
    setting(True)
