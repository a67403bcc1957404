"""FSDP2 (`fully_shard`) on gloo: its all-gathers and reduce-scatters handed to the route, some waited for later.

Stock FSDP2 overlaps nothing on the CPU: streams and events are empty there, so every collective is waited for where it
is issued. Here every collective is issued where stock FSDP2 issues it, with the same bytes, and

- an all-gather is waited for before it is copied out. Those that FSDP2 prefetches (in backward, and in forward where
  the user set prefetch lists) overlap with computation. None is issued that stock FSDP2 would not issue: a gathered
  result must never outlive what it was gathered from, and only FSDP2 knows when that changes.
- a reduce-scatter is waited for after two more have been issued, or at the end of the backward pass, also of one that
  raises. It is left synchronous where its result may be read before: gradients that are accumulated, cast or divided,
  hybrid sharding, offload, hooks that run in backward, releases of PyTorch that this was not tested with.

Not seen are hooks on activations and autograd functions of the job's own: one that reads other layers' gradients in the
middle of a backward pass may see some that are not reduced yet. After the pass they are.

The numbers are those of stock FSDP2. That it is asynchronous is the adapter's gain, not the tuning's: both sides of the
tuner's comparison have it.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.online.adapters.base import missing_names, say_once
from lagom_overlap.online.routes.gloo import GlooRoute

MAX_IN_FLIGHT: Final = 2
"""Reduce-scatters not waited for: each keeps a module's whole gradients in memory. FSDP2 on GPU keeps one."""
TESTED_UP_TO: Final = (2, 15)
"""The last release of PyTorch whose code between a reduce-scatter and the end of backward was read and tested."""
_NO_PASS: Final = -1
"""What `_current_graph_task_id` answers outside a backward pass."""
_STOCK: Final = frozenset({"DefaultAllGather", "DefaultReduceScatter"})
"""Communication objects that the user did not replace."""
_OF_GROUP: Final = (
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_is_hsdp",
    "_all_reduce_hook",
    "unshard_async_op",
    "fsdp_params",
    "device",
)
_OF_PARAM: Final = ("sharded_param", "offload_to_cpu")


class RoutedAllGather:
    """FSDP2's all-gather through the route."""

    def __init__(self, stock: Any, route: GlooRoute) -> None:
        self._stock = stock
        self._route = route

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Starts it; without `async_op` also waits."""
        work = self._route.call(
            CollectiveKind.ALL_GATHER,
            output_tensor,
            input_tensor,
            group,
            lambda: self._stock(output_tensor, input_tensor, group, async_op=True),
        )
        if async_op:
            return work
        work.wait()
        return None


class _PassEnd:
    """What autograd calls when a backward pass ends, and lets go of when the pass raises."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        self._finish()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the pass raised its own
            self._finish()


class InFlight:
    """The reduce-scatters of a backward pass that nobody has waited for yet, oldest first.

    `may_defer` is asked once per pass whether any may be left so. None outlives its pass, also where that raises.
    """

    def __init__(self, may_defer: Callable[[], bool]) -> None:
        self._may_defer = may_defer
        self._works: deque[dist.Work] = deque()
        self._pass = _NO_PASS
        self._defers = False

    def is_open(self) -> bool:
        """Whether a backward pass is under way that may leave some for later."""
        number = torch._C._current_graph_task_id()
        if number == _NO_PASS:
            return False
        if number != self._pass:
            self.drain()
            self._defers = self._may_defer()
            self._pass = number
            Variable._execution_engine.queue_callback(_PassEnd(self._finish))
        return self._defers

    def add(self, work: dist.Work) -> None:
        """Leaves one for later, and waits for the oldest if too many are in flight."""
        self._works.append(work)
        while len(self._works) > MAX_IN_FLIGHT:
            self._works.popleft().wait()

    def drain(self) -> None:
        """Waits for all."""
        while self._works:
            self._works.popleft().wait()

    def _finish(self) -> None:
        self._pass = _NO_PASS
        self.drain()


class RoutedReduceScatter:
    """FSDP2's reduce-scatter of one parameter group through the route."""

    def __init__(self, stock: Any, route: GlooRoute, param_group: Any, in_flight: InFlight | None) -> None:
        self._stock = stock
        self._route = route
        self._param_group = param_group
        self._in_flight = in_flight

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Starts it, and waits for it where its result may be read before the backward pass ends."""
        is_mean = op == dist.ReduceOp.AVG
        if not (is_mean or op == dist.ReduceOp.SUM):
            self._settle()
            work: dist.Work | None = self._stock(output_tensor, input_tensor, group, op, async_op=async_op)
            return work
        work = self._route.call(
            CollectiveKind.REDUCE_SCATTER,
            output_tensor,
            input_tensor,
            group,
            lambda: self._stock(output_tensor, input_tensor, group, op, async_op=True),
            is_mean=is_mean,
        )
        if is_mean and self._in_flight is not None and self._in_flight.is_open() and self._is_read_late(output_tensor):
            self._in_flight.add(work)
            return None
        self._settle()
        if async_op:
            return work
        work.wait()
        return None

    def _settle(self) -> None:
        """FSDP2 goes on to add to gradients: those of an earlier call of this pass must be there."""
        if self._in_flight is not None:
            self._in_flight.drain()

    def _is_read_late(self, output: torch.Tensor) -> bool:
        """Whether FSDP2 itself reads nothing of the result before the backward pass ends: it only makes views of it."""
        group = self._param_group
        if group._is_hsdp or group._all_reduce_hook is not None:
            return False
        return not any(
            param.sharded_param.grad is not None
            or param.offload_to_cpu
            # Since torch 2.15 each parameter has a dtype for its gradient; before, it was the parameter's.
            or getattr(param, "sharded_grad_dtype", param.sharded_param.dtype) not in {None, output.dtype}
            for param in group.fsdp_params
        )


def stock_group(module: FSDPModule) -> Any | None:
    """A module's parameter group as FSDP2 made it; None where there is none, several, or the user changed it.

    Where this release of PyTorch lacks a name that we read, that is said once, and the module is left alone.
    """
    if missing_names(module, ("_get_fsdp_state",)):
        say_once("FSDP2 is left alone: FSDPModule has no _get_fsdp_state")
        return None
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one at most
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    if len(groups) != 1:
        return None
    missing = missing_names(groups[0], _OF_GROUP)
    if not missing:
        missing = [name for param in groups[0].fsdp_params for name in missing_names(param, _OF_PARAM)]
    if missing:
        say_once(f"FSDP2 is left alone: its parameter groups have no {missing[0]}")
        return None
    comms = groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm
    return groups[0] if {type(comm).__name__ for comm in comms} == _STOCK else None


def replace_calls(
    group: Any, all_gather: Callable[[Any], Any], reduce_scatter: Callable[[Any], Any]
) -> Callable[[], None]:
    """Puts objects in the place of FSDP2's own, made from these; returns how to undo it.

    They are of FSDP2's own classes, too, which goes on doing with them what it does with its own. A model that the job
    drops is not kept alive by what undoes it.
    """
    before = {"_all_gather_comm": group._all_gather_comm, "_reduce_scatter_comm": group._reduce_scatter_comm}
    after = {
        "_all_gather_comm": all_gather(group._all_gather_comm),
        "_reduce_scatter_comm": reduce_scatter(group._reduce_scatter_comm),
    }
    for name, comm in after.items():
        setattr(group, name, comm)
    ours = {name: weakref.ref(comm) for name, comm in after.items()}
    living = weakref.ref(group)

    def undo() -> None:
        for name, comm in ours.items():
            if (group := living()) is not None and getattr(group, name) is comm():  # else the user replaced it since
                setattr(group, name, before[name])

    return undo


def in_place_of(stock: Any, routed: type, *more: Any) -> Any:
    """`routed(stock, *more)`, as an instance of the class of `stock` as well."""
    return type(routed.__name__, (routed, type(stock)), {})(stock, *more)


class Fsdp2Adapter:
    """Implements `Adapter`."""

    name = "fsdp2"

    def fits(self, model: nn.Module) -> bool:
        """See `Adapter`."""
        return any(isinstance(module, FSDPModule) for module in model.modules())

    def attach(self, model: nn.Module, route: GlooRoute) -> Callable[[], None]:
        """See `Adapter`; modules with several parameter groups or communication of the user's own are left alone."""
        stock = [stock_group(module) for module in model.modules() if isinstance(module, FSDPModule)]
        # `fully_shard([a, b])` gives both modules one group.
        unique = {id(group): group for group in stock if group is not None}
        groups = [group for group in unique.values() if group.device.type == "cpu"]
        may_defer = partial(_nobody_reads_gradients, weakref.ref(model), weakref.WeakSet(groups))
        in_flight = InFlight(may_defer) if _can_defer() else None
        undo = [_attach_one(group, route, in_flight) for group in groups]

        def undo_all() -> None:
            if in_flight is not None:
                in_flight.drain()
            for step in undo:
                step()

        return undo_all


def _attach_one(group: Any, route: GlooRoute, in_flight: InFlight | None) -> Callable[[], None]:
    undo = replace_calls(
        group,
        lambda stock: in_place_of(stock, RoutedAllGather, route),
        lambda stock: in_place_of(stock, RoutedReduceScatter, route, group, in_flight),
    )
    was_async = group.unshard_async_op
    group.unshard_async_op = True
    living = weakref.ref(group)

    def undo_both() -> None:
        undo()
        if (group := living()) is not None:
            group.unshard_async_op = was_async

    return undo_both


def _can_defer() -> bool:
    """Whether this release of PyTorch lets reduce-scatters be waited for later; says so where not."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) > TESTED_UP_TO:
        tested = ".".join(map(str, TESTED_UP_TO))
        say_once(f"FSDP2: reduce-scatters are waited for where they are issued, tested up to torch {tested}")
        return False
    if missing_names(torch._C, ("_current_graph_task_id",)) or missing_names(Variable, ("_execution_engine",)):
        say_once("FSDP2: reduce-scatters are waited for where they are issued, a backward pass has no number")
        return False
    return True


def _nobody_reads_gradients(living: Callable[[], nn.Module | None], groups: Iterable[Any]) -> bool:
    """Whether no hook runs in backward that could read a sharded gradient before the pass ends."""
    everywhere = nn.modules.module
    if (model := living()) is None:
        return False
    return not (
        getattr(everywhere, "_global_backward_hooks", None)
        or getattr(everywhere, "_global_backward_pre_hooks", None)
        or any(
            getattr(parameter, name, None)
            for parameter in chain(model.parameters(), (param.sharded_param for g in groups for param in g.fsdp_params))
            for name in ("_post_accumulate_grad_hooks", "_backward_hooks")
        )
        or any(
            getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None)
            for module in model.modules()
        )
    )
