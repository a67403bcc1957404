"""How frameworks let the sibling route choose: FSDP2, DDP, and plain all-to-alls.

Nothing is made asynchronous or reordered here: each call goes where the route says, as the framework made it. A model
whose communication the user replaced is left alone.
"""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not marked as re-exported
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.runtime.adapters.fsdp2 import _ALL_GATHER, _REDUCE_SCATTER, STOCK, _Allocation, _param_groups
from lagom_overlap.runtime.sibling_route import SiblingRoute


class SiblingAllGather(_Allocation, AllGather):  # type: ignore[misc]  # the base spells sizes with SymInt, too
    """FSDP2's all-gather on the group that the route names."""

    def __init__(self, route: SiblingRoute) -> None:
        self._route = route

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Starts it."""
        chosen = self._route.group_for(CollectiveKind.ALL_GATHER, _num_bytes(output_tensor), group)
        return _ALL_GATHER(output_tensor, input_tensor, group=chosen, async_op=async_op)


class SiblingReduceScatter(_Allocation, ReduceScatter):  # type: ignore[misc]
    """FSDP2's reduce-scatter on the group that the route names."""

    def __init__(self, route: SiblingRoute) -> None:
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
        return _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=chosen, async_op=async_op)


def attach(model: nn.Module, route: SiblingRoute) -> int:
    """Lets the route choose for every FSDP2 module and for DDP; returns how many it took. Undone by `route.close`."""
    taken = 0
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups = _param_groups(module)
            if len(groups) == 1 and _is_stock(groups[0]):
                _attach_fsdp2(module, groups[0], route)
                taken += 1
    if isinstance(model, DistributedDataParallel) and not model._comm_hooks:
        _attach_ddp(model, route)
        taken += 1
    return taken


def attach_all_to_all(route: SiblingRoute) -> None:
    """Lets the route choose for `torch.distributed.all_to_all_single`, called by that name. Undone by `route.close`."""
    original = dist.all_to_all_single

    def all_to_all_single(  # noqa: PLR0917 - torch's signature
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        chosen = route.group_for(CollectiveKind.ALL_TO_ALL, _num_bytes(input), group)
        found: dist.Work | None = original(output, input, output_split_sizes, input_split_sizes, chosen, async_op)
        return found

    dist.all_to_all_single = all_to_all_single

    def undo() -> None:
        dist.all_to_all_single = original

    route.on_close(undo)


def _attach_fsdp2(module: FSDPModule, group: Any, route: SiblingRoute) -> None:
    before = group._all_gather_comm, group._reduce_scatter_comm
    module.set_custom_all_gather(SiblingAllGather(route))
    module.set_custom_reduce_scatter(SiblingReduceScatter(route))

    def undo() -> None:
        group._all_gather_comm, group._reduce_scatter_comm = before

    route.on_close(undo)


def _attach_ddp(model: DistributedDataParallel, route: SiblingRoute) -> None:
    own, num_ranks = model.process_group, model.process_group.size()

    def hook(_state: None, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer().div_(num_ranks)
        chosen = route.group_for(CollectiveKind.ALL_REDUCE, _num_bytes(buffer), own)
        work = dist.all_reduce(buffer, group=chosen, async_op=True)
        assert work is not None, "an asynchronous call of a member returns its handle"
        future: Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    model.register_comm_hook(None, hook)  # which DDP keeps; a closed route names the job's own group


def _is_stock(group: Any) -> bool:
    return {type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__} == STOCK


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
