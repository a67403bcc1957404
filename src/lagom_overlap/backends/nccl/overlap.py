"""An overlap group on one rank's device: computations on the default stream, collectives in order on another.

The host queues a whole run while the device sleeps, so that host time is no part of it. Times are marks on the streams:
x_j from the mark before collective j on its stream to the one after it, Y to the end of the last computation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import torch
from torch import distributed as dist

from lagom_overlap.backends.nccl.cuda_device import Device
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.base import Buffers
from lagom_overlap.engines.buffers import allocate
from lagom_overlap.engines.overlap_run import RankRunTimes
from lagom_overlap.errors import BackendError
from lagom_overlap.workload import Attention, CommOp, Gemm, Kernel, MemoryBound, OverlapGroup, Work

KINDS: Final = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)
"""What can be run."""
MAX_HEAD_START: Final = 128
"""About a quarter of a second."""
Computation = Callable[[], object]
_ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Renamed in torch 2.13."""
_DTYPES: Final = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclOverlap:
    """A group made ready: what to call, in order; `releases[i]` are the collectives that may start at computation i."""

    group: OverlapGroup
    computations: tuple[Computation, ...]
    buffers: tuple[Buffers, ...]
    releases: tuple[tuple[int, ...], ...]


def make_ready(group: OverlapGroup, device: Device) -> NcclOverlap:
    """Allocates everything that the group needs.

    Raises:
        BackendError: for a kind or a computation that cannot be run.
    """
    reached, releases = 0, [list[int]() for _ in range(len(group.computations) + 1)]
    for index, start in enumerate(group.starts_after):
        reached = max(reached, start)
        releases[reached].append(index)
    return NcclOverlap(
        group=group,
        computations=tuple(_computation(op.work, device.torch_device) for op in group.computations),
        buffers=tuple(_on(device, allocate_of(op)) for op in group.comms),
        releases=tuple(map(tuple, releases)),
    )


class RankAgreement(Protocol):
    """What the ranks agree on while nothing is timed."""

    def barrier(self) -> None:
        """Returns when all ranks are here."""

    def gather(self, value: int) -> tuple[int, ...]:
        """Every rank's value."""


@dataclass(slots=True)
class HeadStart:
    """How long devices are held back while the hosts queue a run, in multiples of the shortest; it grows as needed."""

    factor: int = 1


def run_overlap(
    overlap: NcclOverlap,
    device: Device,
    issue: Callable[[int], None],
    *,
    ranks: RankAgreement,
    meet: Callable[[], None],
    head_start: HeadStart,
) -> RankRunTimes:
    """One run, started on all ranks together; `issue(j)` queues collective j on the stream in use.

    `meet` queues a collective of no size that no rank's device passes before all have come to it: hosts leave a barrier
    up to a millisecond apart. A run that some device began before its host had queued all of it is made again, on all
    ranks, with a longer head start.

    Raises:
        BackendError: if the longest head start does not do.
    """
    num_early = 0
    while True:
        times = _run_once(overlap, device, issue, ranks=ranks, meet=meet, head_start=head_start)
        if not any(ranks.gather(int(times is None))):
            assert times is not None, "no rank began early"
            return times
        num_early += 1
        if num_early == 1:  # perhaps a library was loaded: that comes once, and the head start is for every run
            continue
        if head_start.factor >= MAX_HEAD_START:
            raise BackendError(
                "a host cannot queue this group before its device begins: is another process busy there?"
            )
        head_start.factor *= 2


def _run_once(
    overlap: NcclOverlap,
    device: Device,
    issue: Callable[[int], None],
    *,
    ranks: RankAgreement,
    meet: Callable[[], None],
    head_start: HeadStart,
) -> RankRunTimes | None:
    """One run's times; None if the device began before all was queued."""
    stream = device.new_stream()
    ranks.barrier()
    device.head_start(head_start.factor)
    meet()
    origin = device.mark(None)
    device.wait(stream, origin)
    computed, begun, ended = [origin], [], []
    for index, released in enumerate(overlap.releases):
        for comm in released:
            device.wait(stream, computed[-1])
            begun.append(device.mark(stream))
            with device.use(stream):
                issue(comm)
            ended.append(device.mark(stream))
        if index < len(overlap.computations):
            overlap.computations[index]()
            computed.append(device.mark(None))
    began_early = device.is_passed(origin)
    device.finish()
    if began_early:
        return None
    num = len(computed)
    seconds = device.seconds([*computed, *begun, *ended])
    computed_s, begun_s, ended_s = seconds[:num], seconds[num : num + len(begun)], seconds[num + len(begun) :]
    return RankRunTimes(
        computations=tuple(pairwise(computed_s)),
        calls=tuple(zip(begun_s, ended_s, strict=True)),
        makespan_s=max(computed_s[-1], *ended_s),
    )


def issue_collective(collective: Collective, buffers: Buffers, group: dist.ProcessGroup) -> None:
    """Queues one collective on the stream in use."""
    source, target = buffers.source, buffers.target
    match collective.kind:
        case CollectiveKind.ALL_GATHER:
            _ALL_GATHER(target, source, group=group)
        case CollectiveKind.REDUCE_SCATTER:
            _REDUCE_SCATTER(target, source, group=group)
        case CollectiveKind.ALL_REDUCE:
            dist.all_reduce(target, group=group)
        case CollectiveKind.ALL_TO_ALL:
            dist.all_to_all_single(target, source, group=group)
        case _:
            raise BackendError(f"{collective.kind} cannot be run here; allowed: {', '.join(KINDS)}")


def allocate_of(op: CommOp) -> Buffers:
    """Buffers of one rank in the host's memory, zeroed.

    Raises:
        BackendError: for another kind.
    """
    if op.collective.kind not in KINDS:
        raise BackendError(f"{op.name}: {op.collective.kind} cannot be run here; allowed: {', '.join(KINDS)}")
    return allocate(op.collective)


def _on(device: Device, buffers: Buffers) -> Buffers:
    source = buffers.source.to(device.torch_device)
    target = source if buffers.target is buffers.source else buffers.target.to(device.torch_device)
    return Buffers(source, target)


def _computation(work: Work, device: torch.device) -> Computation:
    match work:
        case Gemm():
            dtype = _dtype(work.element_bytes)
            left = torch.randn(work.m, work.k, device=device, dtype=dtype)
            right = torch.randn(work.k, work.n, device=device, dtype=dtype)
            product = torch.empty(work.m, work.n, device=device, dtype=dtype)
            return lambda: torch.mm(left, right, out=product)
        case Attention():
            shape = (work.batch, work.num_heads, work.seq_len, work.head_dim)
            query, key, value = (torch.randn(shape, device=device, dtype=_dtype(work.element_bytes)) for _ in range(3))
            times = math.ceil(work.passes)
            return lambda: [
                torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=work.causal)
                for _ in range(times)
            ]
        case MemoryBound():
            num_elements = max(1, work.num_bytes // 8)  # a read and a write of four bytes each
            values, result = (torch.ones(num_elements, device=device) for _ in range(2))
            return lambda: torch.mul(values, 0.5, out=result)
        case Kernel():
            raise BackendError(
                "a computation given by blocks and wave time says how long it takes and not what to compute; "
                "give gemm, attention or memory_bound"
            )


def _dtype(element_bytes: int) -> torch.dtype:
    if element_bytes not in _DTYPES:
        raise BackendError(f"elements of {element_bytes} bytes cannot be run here; allowed: 2 (bf16), 4 (fp32)")
    return _DTYPES[element_bytes]
