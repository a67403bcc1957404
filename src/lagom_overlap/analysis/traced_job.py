"""Groups found in a trace as groups that can be simulated: kernels with their time alone, collectives, gaps.

A kernel's time alone is, in this order: the median of its runs without a concurrent collective (three at least), its
time in the group where no collective overlaps it there, what the cost model estimates (`fill_in.py`). A gap between
kernels stays as a kernel of one block that nothing slows: the CPU's launches do not become faster by tuning.

A group with a collective whose kind, bytes or ranks the trace does not say cannot be simulated; it is named, never
guessed. A collective's time is without the wait for late peers where several ranks tell it.

How much more or less than by the model a class of kernels is slowed by collectives is a factor (`trace_fit.py`), which
comes in twice: a kernel is slowed by it, and where its time alone is an estimate, that is made with it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from types import MappingProxyType
from typing import Final

import numpy as np

from lagom_overlap.analysis.collectives import CollectiveKey
from lagom_overlap.analysis.concurrency_model import alone_ns, modelled_kernel, slowdown_during
from lagom_overlap.analysis.contention import MIN_ALONE, PLAUSIBLE
from lagom_overlap.analysis.equal_rows import equal_rows
from lagom_overlap.analysis.findings import Findings
from lagom_overlap.analysis.groups import KernelKey, TraceComm, TraceGroup, TraceKernel
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import ContentionModel
from lagom_overlap.trace.gpu_trace import NS_PER_S, EventRole, KnobReach
from lagom_overlap.units import format_seconds
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup

_LEAST_GAP_NS: Final = 1000
"""A shorter gap between kernels is what a launch itself leaves, not a wait."""
_DIGITS: Final = 3
"""Significant digits of a time: equal kernels stay equal, which the simulator is quick at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOp:
    """What a computation of a group was in the trace: its class, and how much of the group's time it is.

    `is_slowed` where a collective overlaps it there, `is_estimated` where its time alone is not known.
    """

    kernel_class: KernelClass
    measured_s: float
    is_slowed: bool
    is_estimated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGroup:
    """A group to simulate, and what was measured of it: all in seconds, `comm_s` without waiting where that is known.

    `ops` are its computations in the trace, None for a gap. `channels` are those of each collective there (0 unknown),
    `reaches` which knobs reach it.
    """

    group: OverlapGroup
    source: TraceGroup
    makespan_s: float
    comm_s: tuple[float, ...]
    ops: tuple[TracedOp | None, ...]
    channels: tuple[int, ...]
    reaches: tuple[KnobReach, ...]

    @property
    def num_estimated(self) -> int:
        """Kernels whose time alone is an estimate."""
        return sum(op is not None and op.is_estimated for op in self.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedJob:
    """The groups of a job, and sentences about those that cannot be simulated."""

    groups: tuple[TracedGroup, ...]
    left_out: tuple[str, ...]


def bases_alone(findings: Findings, half: int | None = None) -> dict[KernelKey, float]:
    """The median length (ns) of each kernel's runs without a concurrent collective, where there are enough.

    Of a `half` (0 or 1) the runs of every second step, of a rank's only step every second run; half as many suffice.
    """
    runs: dict[KernelKey, list[int]] = defaultdict(list)
    for rank in findings.ranks:
        events = rank.trace.events
        rows = events.rows(EventRole.COMPUTE)
        start, end = events.start_ns[rows], events.end_ns[rows]
        free = rows[rank.occupation.comm.within(start, end) == 0]
        by_step = half is not None and len(rank.steps) > 1
        if by_step:
            begins = np.array([step.start_ns for step in rank.steps], dtype=np.int64)
            number = np.searchsorted(begins, events.start_ns[free], side="right") - 1
            free = free[number % 2 == half]  # a trace of steps has no event before its first
        if not len(free):
            continue
        columns = np.column_stack((events.name[free], events.grid[free], events.block[free]))
        first, inverse = equal_rows(columns)
        lengths = events.end_ns[free] - events.start_ns[free]
        order = np.argsort(inverse, kind="stable")
        parts = np.split(lengths[order], np.cumsum(np.bincount(inverse))[:-1])
        for (name, gx, gy, gz, bx, by, bz), part in zip(columns[first].tolist(), parts, strict=True):
            mine = part if half is None or by_step else part[half::2]
            runs[KernelKey(events.names[name], (gx, gy, gz), (bx, by, bz))].extend(mine.tolist())
    enough = MIN_ALONE if half is None else -(-MIN_ALONE // 2)
    return {key: float(np.median(alone)) for key, alone in runs.items() if len(alone) >= enough}


def _rounded(value: float) -> float:
    """To `_DIGITS` significant digits."""
    return round(value, _DIGITS - 1 - floor(log10(value))) if value > 0 else value


@dataclass(frozen=True, slots=True)
class _Builder:
    bases: dict[KernelKey, float]
    kinds: Mapping[CollectiveKey, CollectiveKind | None]
    model: ContentionModel
    scales: Mapping[KernelClass, float]

    def _alone(self, kernel: TraceKernel, comm: TraceComm) -> tuple[float, bool]:
        """(ns alone, whether estimated)."""
        base = self.bases.get(kernel.key)
        if base is not None and base <= PLAUSIBLE * kernel.median_ns and kernel.median_ns <= PLAUSIBLE * base:
            return base, False
        if kernel.overlapped_ns <= 0:
            return kernel.median_ns, False
        ratio = slowdown_during(
            kernel.key, kernel.median_ns, self.model, key=comm.key, kind=self.kinds[comm.key], comm_ns=comm.median_ns
        )
        ratio = 1.0 + self.scales.get(kernel_class(kernel.key.name), 1.0) * (ratio - 1.0)
        return alone_ns(kernel.median_ns, min(kernel.overlapped_ns, kernel.median_ns), ratio), True

    def _computations(self, group: TraceGroup) -> tuple[list[CompOp], list[TracedOp | None], list[int]]:
        """Kernels and gaps in order, what each was in the trace, how many stand before each kernel of the trace."""
        longest = max(group.comms, key=lambda comm: comm.median_ns)
        ops: list[CompOp] = []
        traced: list[TracedOp | None] = []
        places = []
        gpu, profile = self.model.cluster.gpu, self.model.profile
        for number, kernel in enumerate(group.kernels):
            places.append(len(ops))
            share = kernel.advance_ns / kernel.median_ns if kernel.median_ns > 0 else 0.0
            length, estimated = self._alone(kernel, longest)
            length = _rounded(length * share)
            if length > 0:
                kind = kernel_class(kernel.key.name)
                work = modelled_kernel(kernel.key, length, gpu, profile)
                scale = self.scales.get(kind, 1.0)
                ops.append(CompOp(name=f"kernel{number}", work=replace(work, slowdown_scale=scale)))
                traced.append(
                    TracedOp(
                        kernel_class=kind,
                        measured_s=kernel.advance_ns / NS_PER_S,
                        is_slowed=kernel.overlapped_ns > 0,
                        is_estimated=estimated,
                    )
                )
            if kernel.gap_ns >= _LEAST_GAP_NS:
                idle = Kernel(num_blocks=1, blocks_per_sm=1, wave_s=_rounded(kernel.gap_ns) / NS_PER_S, block_bytes=0.0)
                ops.append(CompOp(name=f"gap{number}", work=idle))
                traced.append(None)
        return ops, traced, [*places, len(ops)]

    def built(self, group: TraceGroup) -> TracedGroup | str:
        """The group to simulate, or why it cannot be."""
        comms = []
        for number, comm in enumerate(group.comms):
            kind, key = self.kinds[comm.key], comm.key
            if kind is None or key.num_bytes < 1 or key.num_ranks < 2:
                return (
                    f"{group.name}: the trace does not say kind, bytes and ranks of a collective on "
                    f"{key.communicator!r} ({key.op}, {key.num_bytes} bytes, {key.num_ranks} ranks): not simulated"
                )
            comms.append(
                CommOp(
                    name=f"{group.name}.{number}.{key.op}",
                    collective=Collective(kind, key.num_bytes, key.num_ranks),
                    communicator=key.communicator,
                )
            )
        ops, traced, places = self._computations(group)
        if not ops:
            return f"{group.name}: its kernels have no length: not simulated"
        return TracedGroup(
            group=OverlapGroup(
                name=group.name,
                computations=tuple(ops),
                comms=tuple(comms),
                starts_after=tuple(places[min(comm.starts_after, len(group.kernel_keys))] for comm in group.comms),
                count=max(1, round(group.per_step)),
            ),
            source=group,
            makespan_s=group.makespan_ns / NS_PER_S,
            comm_s=tuple(comm.moving_ns / NS_PER_S for comm in group.comms),
            ops=tuple(traced),
            channels=tuple(comm.key.num_channels for comm in group.comms),
            reaches=tuple(comm.key.reach for comm in group.comms),
        )


def traced_job(
    findings: Findings,
    groups: Sequence[TraceGroup],
    model: ContentionModel,
    *,
    half: int | None = None,
    scales: Mapping[KernelClass, float] = MappingProxyType({}),
) -> TracedJob:
    """The groups of a trace on the model's GPU, as far as they can be simulated; `scales` are fitted factors by class.

    With a `half` (0 or 1) kernels' times alone are of that half of the trace only, as those of the groups must be.
    """
    builder = _Builder(bases_alone(findings, half), {row.key: row.kind for row in findings.rows}, model, scales)
    built = [builder.built(group) for group in groups]
    rare = [group for group in groups if group.per_step < 1] if half is None else []
    sentences = [one for one in built if isinstance(one, str)]
    if rare:
        whole = sum(group.makespan_ns * group.per_step for group in rare) / NS_PER_S
        sentences.append(
            f"{len(rare)} groups occur in some steps or ranks only ({format_seconds(whole)} per step of the average "
            "rank); each counts as once per step"
        )
    return TracedJob(groups=tuple(one for one in built if isinstance(one, TracedGroup)), left_out=tuple(sentences))
