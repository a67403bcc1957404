"""`DistributedDataParallel` in a fake world: its reducer is C++ and wants data, so its hooks are run here instead.

As `nn/parallel/distributed.py` and `csrc/distributed/c10d/reducer.cpp` do (PyTorch 2.13): parameters that need a
gradient are put into buckets in reverse order, the first of 1 MiB, the others of `bucket_cap_mb` (25 MiB), by type. A
gradient that is ready is divided by the number of ranks into its bucket; a full bucket is reduced while backward goes
on; at the end of backward gradients are copied out of the buckets, unless they are views of them. Buffers are broadcast
from rank 0 before forward.

Departures: buckets are not rebuilt in the order in which gradients came in the first step; parameters without a
gradient in a step (`find_unused_parameters`) are an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lagom_overlap.errors import JobError
from lagom_overlap.units import MIB

FIRST_BUCKET_BYTES: Final = MIB
BUCKET_MIB: Final = 25
"""DDP's first bucket and the others, where the job says no other (torch 2.13, `bucket_cap_mb`)."""


@dataclass(slots=True)
class _Bucket:
    """Parameters that are reduced together, each with its place in `flat`."""

    parameters: list[nn.Parameter]
    flat: torch.Tensor
    views: list[torch.Tensor]
    missing: int = 0


@dataclass(slots=True)
class _State:
    """What the reducer holds of one module."""

    group: dist.ProcessGroup
    buckets: list[_Bucket]
    gradients_are_views: bool
    broadcasts: bool
    syncs: bool = True
    is_armed: bool = False
    place: dict[nn.Parameter, tuple[_Bucket, int]] = field(default_factory=dict)


def bucket_sizes(parameters: list[nn.Parameter], first_bytes: int, cap_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters of each bucket: one is full when it holds its limit or more."""
    open_of: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    full: list[list[nn.Parameter]] = []
    limits: dict[torch.dtype, int] = {}
    for parameter in parameters:
        bucket, num_bytes = open_of.pop(parameter.dtype, ([], 0))
        bucket.append(parameter)
        num_bytes += parameter.numel() * parameter.element_size()
        if num_bytes >= limits.get(parameter.dtype, first_bytes):
            full.append(bucket)
            limits[parameter.dtype] = cap_bytes
        else:
            open_of[parameter.dtype] = (bucket, num_bytes)
    return [*full, *(bucket for bucket, _ in open_of.values())]


def _split(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The parts of a buffer, one per tensor."""
    parts: tuple[torch.Tensor, ...] = flat.split([one.numel() for one in tensors])  # type: ignore[no-untyped-call]  # torch's
    return parts


def _init(self: Any, module: nn.Module, *_: Any, **options: Any) -> None:
    nn.Module.__init__(self)
    self.module = module
    group = options.get("process_group") or dist.group.WORLD
    assert group is not None, "a fake world has a default group"
    parameters = [one for one in module.parameters() if one.requires_grad]
    if not parameters:
        raise JobError("DistributedDataParallel: no parameter of the module needs a gradient")
    cap = options.get("bucket_cap_mb") or BUCKET_MIB
    buckets = []
    for tensors in bucket_sizes(list(reversed(parameters)), min(FIRST_BUCKET_BYTES, int(cap * MIB)), int(cap * MIB)):
        flat = torch.zeros(sum(one.numel() for one in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
        parts = _split(flat, tensors)
        buckets.append(_Bucket(tensors, flat, [part.view_as(one) for part, one in zip(parts, tensors, strict=True)]))
    state = _State(
        group=group,
        buckets=buckets,
        gradients_are_views=bool(options.get("gradient_as_bucket_view", False)),
        broadcasts=bool(options.get("broadcast_buffers", True)),
    )
    for bucket in buckets:
        for number, parameter in enumerate(bucket.parameters):
            state.place[parameter] = (bucket, number)
            hook = parameter.register_post_accumulate_grad_hook
            hook(lambda ready, state=state: _ready(state, ready))  # type: ignore[no-untyped-call]  # torch's own
    object.__setattr__(self, "_lagom_state", state)


def _ready(state: _State, parameter: nn.Parameter) -> None:
    """A gradient is there: into its bucket; the last one of a bucket sends it off."""
    if not state.syncs:
        return
    if not state.is_armed:
        state.is_armed = True
        for bucket in state.buckets:
            bucket.missing = len(bucket.parameters)
        Variable._execution_engine.queue_callback(lambda: _finish(state))
    bucket, number = state.place[parameter]
    assert parameter.grad is not None
    torch.mul(parameter.grad, 1.0 / state.group.size(), out=bucket.views[number])
    bucket.missing -= 1
    if not bucket.missing:
        dist.all_reduce(bucket.flat, group=state.group, async_op=True)


def _finish(state: _State) -> None:
    """The end of backward: every bucket is awaited and copied out."""
    state.is_armed = False
    for bucket in state.buckets:
        if bucket.missing:
            raise JobError(
                "DistributedDataParallel: a parameter got no gradient in this step; a capture needs one for each"
            )
        torch.ops._c10d_functional.wait_tensor.default(bucket.flat)  # `work.wait()`, which nothing would see
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if state.gradients_are_views:
                parameter.grad = view
            elif parameter.grad is not None:
                parameter.grad.copy_(view)


def _forward(self: Any, *inputs: Any, **keywords: Any) -> Any:
    state: _State = self._lagom_state
    buffers = list(self.module.buffers())
    if state.broadcasts and state.syncs and buffers:
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            alike = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in alike])
            dist.broadcast(flat, 0, group=state.group)
            for buffer, part in zip(alike, _split(flat, alike), strict=True):
                buffer.copy_(part.view_as(buffer))
    return self.module(*inputs, **keywords)


@contextmanager
def _no_sync(self: Any) -> Iterator[None]:
    state: _State = self._lagom_state
    before, state.syncs = state.syncs, False
    try:
        yield
    finally:
        state.syncs = before


def reducing_group(module: nn.Module) -> dist.ProcessGroup | None:
    """The group over which a module's buckets are reduced; None if it is no `DistributedDataParallel`."""
    state: _State | None = getattr(module, "_lagom_state", None)
    return None if state is None else state.group


STAND_INS: Final = {"__init__": _init, "forward": _forward, "no_sync": _no_sync}
"""Methods of `DistributedDataParallel` in a fake world."""


@contextmanager
def data_parallel_stand_in() -> Iterator[None]:
    """DDP's own methods are these for a while."""
    originals = {name: vars(DistributedDataParallel)[name] for name in STAND_INS}
    try:
        for name, method in STAND_INS.items():
            setattr(DistributedDataParallel, name, method)
        yield
    finally:
        for name, method in originals.items():
            setattr(DistributedDataParallel, name, method)
