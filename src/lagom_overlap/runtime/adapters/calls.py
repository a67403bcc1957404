"""Plain `torch.distributed` calls on gloo: the functions that user code and most frameworks call by their full name.

While attached, `torch.distributed.all_to_all_single`, `all_reduce`, `all_gather_into_tensor` and
`reduce_scatter_tensor` (and their names since torch 2.13) go through the route. Code that imported such a function by
name before, coalesced and functional collectives (DTensor) keep the native ones. It asks for no framework, so it is
never chosen by itself: `adapters=("calls",)`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.runtime.gloo_route import GlooRoute

Original = Callable[..., dist.Work | None]


class CallsAdapter:
    """Implements `Adapter`."""

    name = "calls"

    def fits(self, model: nn.Module) -> bool:
        """See `Adapter`."""
        del model
        return False

    def attach(self, model: nn.Module, route: GlooRoute) -> Callable[[], None]:
        """See `Adapter`."""
        del model
        makers = {
            "all_to_all_single": _all_to_all,
            "all_reduce": _all_reduce,
            "all_gather_single": _all_gather,
            "all_gather_into_tensor": _all_gather,
            "reduce_scatter_single": _reduce_scatter,
            "reduce_scatter_tensor": _reduce_scatter,
        }
        originals = {name: getattr(dist, name) for name in makers if hasattr(dist, name)}
        for name, original in originals.items():
            setattr(dist, name, makers[name](route, original))

        def undo() -> None:
            for name, original in originals.items():
                setattr(dist, name, original)

        return undo


def _finish(work: dist.Work, *, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _all_to_all(route: GlooRoute, original: Original) -> Original:
    def all_to_all_single(  # noqa: PLR0917 - torch's signature
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not route.is_active or output_split_sizes or input_split_sizes:
            return original(output, input, output_split_sizes, input_split_sizes, group, async_op)
        work = route.call(
            CollectiveKind.ALL_TO_ALL,
            output,
            input,
            group,
            lambda: original(output, input, None, None, group, True),
        )
        return _finish(work, async_op=async_op)

    return all_to_all_single


def _all_reduce(route: GlooRoute, original: Original) -> Original:
    def all_reduce(
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not route.is_active or op != dist.ReduceOp.SUM:
            return original(tensor, op, group, async_op)
        work = route.call(
            CollectiveKind.ALL_REDUCE,
            tensor,
            tensor,
            group,
            lambda: original(tensor, op, group, True),
        )
        return _finish(work, async_op=async_op)

    return all_reduce


def _all_gather(route: GlooRoute, original: Original) -> Original:
    def all_gather_into_tensor(
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not route.is_active:
            return original(output_tensor, input_tensor, group, async_op)
        work = route.call(
            CollectiveKind.ALL_GATHER,
            output_tensor,
            input_tensor,
            group,
            lambda: original(output_tensor, input_tensor, group, True),
        )
        return _finish(work, async_op=async_op)

    return all_gather_into_tensor


def _reduce_scatter(route: GlooRoute, original: Original) -> Original:
    def reduce_scatter_tensor(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not route.is_active or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return original(output, input, op, group, async_op)
        work = route.call(
            CollectiveKind.REDUCE_SCATTER,
            output,
            input,
            group,
            lambda: original(output, input, op, group, True),
            is_mean=op == dist.ReduceOp.AVG,
        )
        return _finish(work, async_op=async_op)

    return reduce_scatter_tensor
