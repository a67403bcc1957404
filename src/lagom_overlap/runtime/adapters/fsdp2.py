"""FSDP2 (`fully_shard`) on gloo: made asynchronous, its all-gathers and reduce-scatters handed to the route.

Stock FSDP2 overlaps nothing on the CPU: streams and events are empty there, so every collective is waited for where it
is issued. Here

- all-gathers are issued ahead (asynchronous unshard; in forward the next module's, in the order in which the modules
  were registered, unless prefetch lists are set already) and waited for before they are copied out;
- a reduce-scatter is waited for after two more have been issued, or at the end of the backward pass. It is left
  synchronous where FSDP2 itself reads its result at once: gradients that are accumulated, cast or divided, hybrid
  sharding, all-reduce or accumulation hooks, offload.

The numbers are those of stock FSDP2. That it is asynchronous is the adapter's gain, not the tuning's: both sides of the
tuner's comparison have it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.runtime.gloo_route import GlooRoute

MAX_IN_FLIGHT: Final = 2
"""Reduce-scatters not waited for: each keeps a module's whole gradients in memory. FSDP2 on GPU keeps one."""
_NO_PASS: Final = -1
"""What `_current_graph_task_id` answers outside a backward pass."""
STOCK: Final = frozenset({"DefaultAllGather", "DefaultReduceScatter"})
"""Communication objects that the user did not replace."""

# torch 2.13 renamed these two and deprecates the old names; 2.11 and 2.12 have only those.
_Call = Callable[..., dist.Work | None]
_ALL_GATHER: _Call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: _Call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Allocation:
    """As FSDP2's own: a fresh buffer for each call."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class RoutedAllGather(_Allocation, AllGather):  # type: ignore[misc]  # the base spells sizes with SymInt, too
    """FSDP2's all-gather through the route."""

    def __init__(self, route: GlooRoute) -> None:
        self._route = route

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Starts it; without `async_op` also waits."""
        work = self._route.call(
            CollectiveKind.ALL_GATHER,
            output_tensor,
            input_tensor,
            group,
            lambda: _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=True),
        )
        if async_op:
            return work
        work.wait()
        return None


class _InFlight:
    """The reduce-scatters of a backward pass that nobody has waited for yet, oldest first.

    A pass that raised never calls back; the next one, of another number, waits for what it left.
    """

    def __init__(self) -> None:
        self._works: deque[dist.Work] = deque()
        self._pass = _NO_PASS

    def add(self, work: dist.Work) -> None:
        """Waits for the oldest if too many are in flight, and for all when the backward pass ends."""
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self.drain()
            self._pass = number
            Variable._execution_engine.queue_callback(self.drain)
        self._works.append(work)
        while len(self._works) > MAX_IN_FLIGHT:
            self._works.popleft().wait()

    def drain(self) -> None:
        """Waits for all."""
        self._pass = _NO_PASS
        while self._works:
            self._works.popleft().wait()


class RoutedReduceScatter(_Allocation, ReduceScatter):  # type: ignore[misc]
    """FSDP2's reduce-scatter of one parameter group through the route."""

    def __init__(self, route: GlooRoute, param_group: Any, in_flight: _InFlight) -> None:
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
        """Starts it, and waits for it where its result is read before the backward pass ends."""
        is_mean = op == dist.ReduceOp.AVG

        def native() -> dist.Work | None:
            return _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=True)

        if is_mean or op == dist.ReduceOp.SUM:
            work = self._route.call(
                CollectiveKind.REDUCE_SCATTER, output_tensor, input_tensor, group, native, is_mean=is_mean
            )
        else:
            return _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if is_mean and self._may_wait_later(output_tensor):
            self._in_flight.add(work)
        elif async_op:
            return work
        else:
            work.wait()
        return None

    def _may_wait_later(self, output: torch.Tensor) -> bool:
        """Whether nothing reads the result before the backward pass ends."""
        group = self._param_group
        if torch._C._current_graph_task_id() == _NO_PASS or output.dtype != group._orig_dtype:
            return False
        if group._is_hsdp or group._all_reduce_hook is not None:
            return False
        return not any(
            param.sharded_param.grad is not None
            or param.offload_to_cpu
            or getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
            for param in group.fsdp_params
        )


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


class Fsdp2Adapter:
    """Implements `Adapter`."""

    name = "fsdp2"

    def fits(self, model: nn.Module) -> bool:
        """See `Adapter`."""
        return any(isinstance(module, FSDPModule) for module in model.modules())

    def attach(self, model: nn.Module, route: GlooRoute) -> Callable[[], None]:
        """See `Adapter`; modules with several parameter groups or communication of the user's own are left alone."""
        in_flight = _InFlight()
        undo: list[Callable[[], None]] = []
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            groups = _param_groups(module)
            if len(groups) == 1 and _is_stock(groups[0]):
                undo.append(_attach_one(module, groups[0], route, in_flight))
        undo.append(_prefetch_in_order(modules))

        def undo_all() -> None:
            in_flight.drain()
            for step in undo:
                step()

        return undo_all


def _is_stock(group: Any) -> bool:
    on_cpu = group.device.type == "cpu"
    return on_cpu and {type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__} == STOCK


def _attach_one(module: FSDPModule, group: Any, route: GlooRoute, in_flight: _InFlight) -> Callable[[], None]:
    before = group._all_gather_comm, group._reduce_scatter_comm, group.unshard_async_op
    module.set_custom_all_gather(RoutedAllGather(route))
    module.set_custom_reduce_scatter(RoutedReduceScatter(route, group, in_flight))
    group.unshard_async_op = True

    def undo() -> None:
        group._all_gather_comm, group._reduce_scatter_comm, group.unshard_async_op = before

    return undo


def _prefetch_in_order(modules: Sequence[FSDPModule]) -> Callable[[], None]:
    """Each module gathers the next one's parameters ahead, if the user set no list on any."""
    states = [module._get_fsdp_state() for module in modules]
    if any(state._states_to_forward_prefetch for state in states):
        return lambda: None
    for this, following in pairwise(modules):
        this.set_modules_to_forward_prefetch([following])

    def undo() -> None:
        for state in states:
            state._states_to_forward_prefetch = []

    return undo
