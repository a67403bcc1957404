"""How frameworks let the sibling route choose: FSDP2, DDP, and plain all-to-alls.

Nothing is made asynchronous or reordered here: each call goes where the route says, as the framework made it. A model
whose communication the user replaced is left alone.
"""

import functools
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not marked as re-exported
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.online.adapters.ddp import first_result, hook_of
from lagom_overlap.online.adapters.fsdp2 import in_place_of, replace_calls, stock_group
from lagom_overlap.online.routes.group_route import is_plain
from lagom_overlap.online.routes.sibling import SiblingRoute


class SiblingAllGather:
    """FSDP2's all-gather on the group that the route names."""

    def __init__(self, stock: Any, route: SiblingRoute) -> None:
        self._stock = stock
        self._route = route

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Starts it."""
        chosen = self._route.group_for(CollectiveKind.ALL_GATHER, _num_bytes(output_tensor), group)
        work: dist.Work | None = self._stock(output_tensor, input_tensor, chosen, async_op=async_op)
        return work


class SiblingReduceScatter:
    """FSDP2's reduce-scatter on the group that the route names."""

    def __init__(self, stock: Any, route: SiblingRoute) -> None:
        self._stock = stock
        self._route = route

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Starts it."""
        chosen = self._route.group_for(CollectiveKind.REDUCE_SCATTER, _num_bytes(input_tensor), group)
        work: dist.Work | None = self._stock(output_tensor, input_tensor, chosen, op, async_op=async_op)
        return work


def attach(model: nn.Module, route: SiblingRoute) -> int:
    """Lets the route choose for every FSDP2 module and for DDP; returns how many it took. Undone by `route.close`."""
    num_attached = 0
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = stock_group(module)
            if group is not None:
                undo = replace_calls(
                    group,
                    lambda stock: in_place_of(stock, SiblingAllGather, route),
                    lambda stock: in_place_of(stock, SiblingReduceScatter, route),
                )
                route.on_close(undo)
                num_attached += 1
    if isinstance(model, DistributedDataParallel):
        num_attached += _attach_ddp(model, route)
    return num_attached


def attach_all_to_all(route: SiblingRoute) -> None:
    """Lets the route choose for `torch.distributed.all_to_all_single`, called by that name. Undone by `route.close`.

    Calls with split sizes stay where they are: each rank may send another number of bytes, by which the ranks would
    choose different communicators, and wait for each other for ever.
    """
    original = dist.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(  # noqa: PLR0917 - torch's signature
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_even = all(sizes is None or len(sizes) == 0 for sizes in (output_split_sizes, input_split_sizes))
        if is_even and not torch.compiler.is_compiling() and isinstance(input, torch.Tensor) and is_plain(input):
            group = route.group_for(CollectiveKind.ALL_TO_ALL, _num_bytes(input), group)
        work: dist.Work | None = original(output, input, output_split_sizes, input_split_sizes, group, async_op)
        return work

    dist.all_to_all_single = all_to_all_single

    def undo() -> None:
        if dist.all_to_all_single is all_to_all_single:  # else somebody wrapped it since
            dist.all_to_all_single = original

    route.on_close(undo)


def _attach_ddp(model: DistributedDataParallel, route: SiblingRoute) -> int:
    hook = hook_of(model)
    if hook is None:
        return 0

    def reduce(bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        chosen = route.group_for(CollectiveKind.ALL_REDUCE, _num_bytes(buffer), hook.group)
        return first_result(chosen.allreduce([buffer]), buffer)

    def undo() -> None:
        if hook.reduce is reduce:
            hook.reduce = None

    hook.reduce = reduce
    route.on_close(undo)
    return 1


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
