"""Plain `torch.distributed` calls on gloo: the functions that user code and most frameworks call by their full name.

While attached, `torch.distributed.all_to_all_single`, `all_reduce`, `all_gather_into_tensor` and
`reduce_scatter_tensor` (and their names since torch 2.13) go through the route. Calls that the engine does not run go
to PyTorch unchanged: other dtypes, reductions and splits, groups that this rank is not in, calls that torch coalesces
or compiles, wrong arguments. Code that imported such a function by name earlier, and functional collectives (DTensor),
keep the native ones. The adapter belongs to no framework, so it must be named: `adapters=("calls",)`.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.online.routes.gloo import GlooRoute

Original = Callable[..., dist.Work | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """How to read one function's arguments: which tensor is which, what must be unset, how it may reduce."""

    kind: CollectiveKind
    target: str
    source: str
    plain: tuple[str, ...] = ()
    reductions: tuple[Any, ...] = ()


_SUM: Final = (dist.ReduceOp.SUM,)
_ALL_TO_ALL: Final = _Function(
    kind=CollectiveKind.ALL_TO_ALL,
    target="output",
    source="input",
    plain=("output_split_sizes", "input_split_sizes"),
)
_ALL_REDUCE: Final = _Function(kind=CollectiveKind.ALL_REDUCE, target="tensor", source="tensor", reductions=_SUM)
_ALL_GATHER: Final = _Function(kind=CollectiveKind.ALL_GATHER, target="output_tensor", source="input_tensor")
_REDUCE_SCATTER: Final = _Function(
    kind=CollectiveKind.REDUCE_SCATTER,
    target="output",
    source="input",
    reductions=(*_SUM, dist.ReduceOp.AVG),
)
FUNCTIONS: Final = {
    "all_to_all_single": _ALL_TO_ALL,
    "all_reduce": _ALL_REDUCE,
    "all_gather_single": _ALL_GATHER,
    "all_gather_into_tensor": _ALL_GATHER,
    "reduce_scatter_single": _REDUCE_SCATTER,
    "reduce_scatter_tensor": _REDUCE_SCATTER,
}


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
        originals = {name: getattr(dist, name) for name in FUNCTIONS if hasattr(dist, name)}
        ours = {name: _routed(route, original, FUNCTIONS[name]) for name, original in originals.items()}
        for name, function in ours.items():
            setattr(dist, name, function)

        def undo() -> None:
            for name, function in ours.items():
                if getattr(dist, name) is function:  # else somebody wrapped it since; a closed route changes nothing
                    setattr(dist, name, originals[name])

        return undo


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that the route may make."""

    target: torch.Tensor
    source: torch.Tensor
    group: dist.ProcessGroup | None
    is_async: bool
    is_mean: bool


def _routed(route: GlooRoute, original: Original, function: _Function) -> Original:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> dist.Work | None:
        if torch.compiler.is_compiling() or route.is_off or route.is_in_native:
            return original(*args, **kwargs)
        call = _read(signature, function, args, kwargs)
        if call is None:
            return original(*args, **kwargs)
        if not route.takes(function.kind, call.target, call.source, call.group):
            with route.noted(function.kind, call.target, call.source, call.group):
                return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.arguments["async_op"] = True
        work = route.call(
            function.kind,
            call.target,
            call.source,
            call.group,
            lambda: original(*bound.args, **bound.kwargs),
            is_mean=call.is_mean,
        )
        if call.is_async:
            return work
        work.wait()
        return None

    return collective


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where this is the result of a functional collective, waited for as torch does at its use."""
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    arrived: torch.Tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]  # torch has no types there
    return arrived


def _read(
    signature: inspect.Signature, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call | None:
    """The call; None if the engine does not run it, or torch would refuse its arguments."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    arguments = bound.arguments
    target, source = arguments.get(function.target), arguments.get(function.source)
    if not (isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor)):
        return None
    is_one = target is source
    target = _arrived(target)
    source = target if is_one else _arrived(source)
    op = arguments.get("op")
    if any(arguments.get(name) for name in function.plain) or (function.reductions and op not in function.reductions):
        return None
    return _Call(target, source, arguments.get("group"), bool(arguments.get("async_op")), op == dist.ReduceOp.AVG)
