"""Groups found in a trace as groups that can be simulated: kernels with their time alone, collectives, gaps.

A kernel's time alone is, in this order: the median of its runs without a concurrent collective (three at least), its
time in the group where no collective overlaps it there, what the cost model estimates (`fill_in.py`). A gap between
kernels stays as a kernel of one block that nothing slows: the CPU's launches do not become faster by tuning.

A group with a collective whose kind, bytes or ranks the trace does not say cannot be simulated; it is named, never
guessed. A collective's time is without the wait for late peers where several ranks tell it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from typing import Final

import numpy as np

from lagom_overlap.analysis.collectives import CollectiveKey, CollectiveRow
from lagom_overlap.analysis.concurrency_model import alone_ns, slowdown_during
from lagom_overlap.analysis.contention import MIN_ALONE, PLAUSIBLE
from lagom_overlap.analysis.equal_rows import equal_rows
from lagom_overlap.analysis.findings import Findings
from lagom_overlap.analysis.groups import KernelKey, TraceGroup, TraceKernel
from lagom_overlap.analysis.modelled_kernel import modelled_kernel
from lagom_overlap.collective import Collective
from lagom_overlap.cost import ContentionModel
from lagom_overlap.trace.gpu_trace import NS_PER_S, EventRole, KnobReach
from lagom_overlap.units import format_seconds
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup

_LEAST_GAP_NS: Final = 1000
"""A shorter gap between kernels is what a launch itself leaves, not a wait."""
_DIGITS: Final = 3
"""Significant digits of a time: equal kernels stay equal, which the simulator is quick at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGroup:
    """A group to simulate, and what was measured of it: all in seconds, `comm_s` without waiting where that is known.

    `channels` are those of each collective in the trace (0 unknown), `reaches` which knobs reach it. `num_estimated` of
    its kernels have a time alone that is estimated.
    """

    group: OverlapGroup
    source: TraceGroup
    makespan_s: float
    comm_s: tuple[float, ...]
    channels: tuple[int, ...]
    reaches: tuple[KnobReach, ...]
    num_estimated: int

    def halves(self) -> tuple["TracedGroup", float | None]:
        """The group as every second window shows its makespan, and the others' median (s); None where it ran once.

        The windows of a step are neighbours in time, and so are those of a warm-up: every second one is of each.
        """
        lengths = [(end - start) / NS_PER_S for _, start, end in self.source.occurrences]
        if len(lengths) < 2:
            return self, None
        return replace(self, makespan_s=float(np.median(lengths[::2]))), float(np.median(lengths[1::2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedJob:
    """The groups of a job, and sentences about those that cannot be simulated."""

    groups: tuple[TracedGroup, ...]
    left_out: tuple[str, ...]


def bases_alone(findings: Findings) -> dict[KernelKey, float]:
    """The median length (ns) of each kernel's runs without a concurrent collective, where there are enough."""
    runs: dict[KernelKey, list[int]] = defaultdict(list)
    for rank in findings.ranks:
        events = rank.trace.events
        rows = events.rows(EventRole.COMPUTE)
        start, end = events.start_ns[rows], events.end_ns[rows]
        free = rows[rank.occupation.comm.within(start, end) == 0]
        if not len(free):
            continue
        columns = np.column_stack((events.name[free], events.grid[free], events.block[free]))
        first, inverse = equal_rows(columns)
        lengths = events.end_ns[free] - events.start_ns[free]
        order = np.argsort(inverse, kind="stable")
        parts = np.split(lengths[order], np.cumsum(np.bincount(inverse))[:-1])
        for (name, gx, gy, gz, bx, by, bz), part in zip(columns[first].tolist(), parts, strict=True):
            runs[KernelKey(events.names[name], (gx, gy, gz), (bx, by, bz))].extend(part.tolist())
    return {key: float(np.median(runs_ns)) for key, runs_ns in runs.items() if len(runs_ns) >= MIN_ALONE}


def _rounded(value: float) -> float:
    """To `_DIGITS` significant digits."""
    return round(value, _DIGITS - 1 - floor(log10(value))) if value > 0 else value


@dataclass(frozen=True, slots=True)
class _Builder:
    bases: dict[KernelKey, float]
    rows: dict[CollectiveKey, CollectiveRow]
    model: ContentionModel

    def _alone(self, kernel: TraceKernel, row: CollectiveRow) -> tuple[float, bool]:
        """(ns alone, whether estimated)."""
        base = self.bases.get(kernel.key)
        if base is not None and base <= PLAUSIBLE * kernel.median_ns and kernel.median_ns <= PLAUSIBLE * base:
            return base, False
        if kernel.overlapped_ns <= 0:
            return kernel.median_ns, False
        ratio = slowdown_during(kernel.key, kernel.median_ns, row, self.model)
        return alone_ns(kernel.median_ns, min(kernel.overlapped_ns, kernel.median_ns), ratio), True

    def _computations(self, group: TraceGroup) -> tuple[list[CompOp], list[int], int]:
        """Kernels and gaps in order, how many of them stand before each kernel of the trace, how many are estimated."""
        longest = self.rows[max(group.comms, key=lambda comm: comm.median_ns).key]
        ops: list[CompOp] = []
        places, num_estimated = [], 0
        gpu, profile = self.model.cluster.gpu, self.model.profile
        for number, kernel in enumerate(group.kernels):
            places.append(len(ops))
            share = kernel.advance_ns / kernel.median_ns if kernel.median_ns > 0 else 0.0
            length, estimated = self._alone(kernel, longest)
            length = _rounded(length * share)
            if length > 0:
                work = modelled_kernel(kernel.key, length, gpu, profile)
                ops.append(CompOp(name=f"kernel{number}", work=work))
                num_estimated += estimated
            if kernel.gap_ns >= _LEAST_GAP_NS:
                idle = Kernel(num_blocks=1, blocks_per_sm=1, wave_s=_rounded(kernel.gap_ns) / NS_PER_S, block_bytes=0.0)
                ops.append(CompOp(name=f"gap{number}", work=idle))
        return ops, [*places, len(ops)], num_estimated

    def _moving_s(self, key: CollectiveKey, median_ns: float) -> float:
        """A collective's time in a group without the mean wait for late peers, at least its shortest run."""
        row = self.rows[key]
        waited = 0.0 if row.waiting_ns is None else row.waiting_ns / row.count
        return max(float(min(row.min_ns, median_ns)), median_ns - waited) / NS_PER_S

    def built(self, group: TraceGroup) -> TracedGroup | str:
        """The group to simulate, or why it cannot be."""
        comms = []
        for number, comm in enumerate(group.comms):
            kind, key = self.rows[comm.key].kind, comm.key
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
        ops, places, num_estimated = self._computations(group)
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
            comm_s=tuple(self._moving_s(comm.key, comm.median_ns) for comm in group.comms),
            channels=tuple(comm.key.num_channels for comm in group.comms),
            reaches=tuple(comm.key.reach for comm in group.comms),
            num_estimated=num_estimated,
        )


def traced_job(findings: Findings, groups: Sequence[TraceGroup], model: ContentionModel) -> TracedJob:
    """The groups of a trace on the model's GPU, as far as they can be simulated."""
    builder = _Builder(bases_alone(findings), {row.key: row for row in findings.rows}, model)
    built = [builder.built(group) for group in groups]
    rare = [group for group in groups if group.per_step < 1]
    sentences = [one for one in built if isinstance(one, str)]
    if rare:
        whole = sum(group.makespan_ns * group.per_step for group in rare) / NS_PER_S
        sentences.append(
            f"{len(rare)} groups occur in some steps or ranks only ({format_seconds(whole)} per step of the average "
            "rank); each counts as once per step"
        )
    return TracedJob(groups=tuple(one for one in built if isinstance(one, TracedGroup)), left_out=tuple(sentences))
