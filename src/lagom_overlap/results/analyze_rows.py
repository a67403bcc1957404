"""The rows of an analysis: what `analysis/` measured in whole nanoseconds, summed up and in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lagom_overlap.analysis.collectives import CollectiveRow
from lagom_overlap.analysis.contention import ClassSlowdown, Contention, Slowdown
from lagom_overlap.analysis.estimate import FillIn
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.analysis.groups import TraceGroup
from lagom_overlap.analysis.hta import HtaFigures
from lagom_overlap.analysis.measures import StepMeasures
from lagom_overlap.trace.gpu_trace import NS_PER_S, NS_PER_US, seconds

_US_PER_S = NS_PER_S // NS_PER_US


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One profiler step on the GPU."""

    step: int
    span_s: float
    compute_s: float
    comm_s: float
    overlap_s: float
    exposed_comm_s: float
    idle_s: float
    host_bound_s: float
    memory_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One rank over its whole trace; with `--compat hta` over the events that HTA keeps, in HTA's rounding."""

    file: str
    rank: int | None
    steps: int
    span_s: float
    compute_s: float
    comm_s: float
    overlap_s: float
    exposed_comm_s: float
    idle_s: float
    overlap_pct: float | None
    stretched_compute_s: float
    host_bound_s: float
    memory_s: float
    non_compute_s: float
    waiting_s: float | None
    gpu: str
    per_step: tuple[StepTimes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimes:
    """All calls of one operation, communicator, size and launch, over all ranks."""

    kind: str
    communicator: str
    bytes: int
    channels: int
    threads: int
    num_ranks: int
    count: int
    total_s: float
    exposed_s: float
    stretched_s: float
    waiting_s: float | None
    median_s: float
    min_s: float
    busbw_bytes_per_s: float | None
    reach: str
    algorithm: str
    protocol: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownRow:
    """Kernels of one class during one collective (of all where both are null) against the same kernels alone."""

    kernel_class: str | None
    kind: str | None
    communicator: str | None
    bytes: int | None
    channels: int | None
    num_overlapped: int
    num_alone: int
    slowdown: float
    low: float | None
    high: float | None
    stretched_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledIn:
    """Estimates: kernels without a twin, `run_s` in all, would take `alone_s` alone; `left_s` stays open."""

    estimated_by: str
    num_runs: int
    run_s: float
    alone_s: float
    stretched_s: float
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionTimes:
    """Contention; `uncovered_s` is computation during collectives without an uncontended twin."""

    total: SlowdownRow
    classes: tuple[SlowdownRow, ...]
    covered_s: float
    uncovered_s: float
    filled_in: FilledIn


def _step_times(step: StepMeasures) -> StepTimes:
    measures = step.measures
    return StepTimes(
        step=step.number,
        span_s=seconds(measures.span_ns),
        compute_s=seconds(measures.compute_ns),
        comm_s=seconds(measures.comm_ns),
        overlap_s=seconds(measures.overlap_ns),
        exposed_comm_s=seconds(measures.exposed_comm_ns),
        idle_s=seconds(measures.idle_ns),
        host_bound_s=seconds(measures.host_bound_ns),
        memory_s=seconds(measures.memory_ns),
    )


def rank_times(rank: RankFindings, hta: HtaFigures | None) -> RankTimes:
    """A rank's row; HTA's figures in place of ours where given."""
    measures, trace = rank.measures, rank.trace
    waits = [wait for wait in rank.waiting_ns if wait is not None]
    exact = RankTimes(
        file=trace.file,
        rank=trace.rank,
        steps=len(trace.steps),
        span_s=seconds(measures.span_ns),
        compute_s=seconds(measures.compute_ns),
        comm_s=seconds(measures.comm_ns),
        overlap_s=seconds(measures.overlap_ns),
        exposed_comm_s=seconds(measures.exposed_comm_ns),
        idle_s=seconds(measures.idle_ns),
        overlap_pct=measures.overlap_pct,
        stretched_compute_s=seconds(rank.stretched_ns),
        host_bound_s=seconds(measures.host_bound_ns),
        memory_s=seconds(measures.memory_ns),
        non_compute_s=seconds(measures.span_ns - measures.idle_ns - measures.compute_ns),
        waiting_s=seconds(sum(waits)) if waits else None,
        gpu=trace.gpu_name,
        per_step=tuple(_step_times(step) for step in rank.steps),
    )
    if hta is None:
        return exact
    return replace(
        exact,
        span_s=hta.span_us / _US_PER_S,
        compute_s=hta.compute_us / _US_PER_S,
        comm_s=hta.comm_us / _US_PER_S,
        overlap_s=hta.overlap_us / _US_PER_S,
        exposed_comm_s=(hta.comm_us - hta.overlap_us) / _US_PER_S,
        idle_s=hta.idle_us / _US_PER_S,
        overlap_pct=None if hta.overlap_pct is None else round(hta.overlap_pct, 2),
        non_compute_s=hta.non_compute_us / _US_PER_S,
        per_step=(),
    )


def _collective_times(row: CollectiveRow, contention: Contention) -> CollectiveTimes:
    key = row.key
    return CollectiveTimes(
        kind=key.op,
        communicator=key.communicator,
        bytes=key.num_bytes,
        channels=key.num_channels,
        threads=key.num_threads,
        num_ranks=key.num_ranks,
        count=row.count,
        total_s=seconds(row.total_ns),
        exposed_s=seconds(row.exposed_ns),
        stretched_s=seconds(contention.blame.get(key, 0.0)),
        waiting_s=None if row.waiting_ns is None else seconds(row.waiting_ns),
        median_s=seconds(row.median_ns),
        min_s=seconds(row.min_ns),
        busbw_bytes_per_s=row.busbw_bytes_per_s,
        reach=row.key.reach.value,
        algorithm=key.algorithm,
        protocol=key.protocol,
    )


def _slowdown_row(slowdown: Slowdown, of: ClassSlowdown | None = None) -> SlowdownRow:
    key = None if of is None else of.collective
    return SlowdownRow(
        kernel_class=None if of is None else of.kernel_class.value,
        kind=None if key is None else key.op,
        communicator=None if key is None else key.communicator,
        bytes=None if key is None else key.num_bytes,
        channels=None if key is None else key.num_channels,
        num_overlapped=slowdown.num_overlapped,
        num_alone=slowdown.num_alone,
        slowdown=slowdown.slowdown,
        low=slowdown.low,
        high=slowdown.high,
        stretched_s=seconds(slowdown.stretched_ns),
    )


def _filled_in(filled: FillIn) -> FilledIn:
    """The estimate as it is printed."""
    return FilledIn(
        estimated_by=f"cost model, profile {filled.profile}",
        num_runs=filled.num_runs,
        run_s=seconds(filled.run_ns),
        alone_s=seconds(filled.alone_ns),
        stretched_s=seconds(filled.stretched_ns),
        left_s=seconds(filled.left_ns),
    )


def contention_times(contention: Contention, filled: FillIn) -> ContentionTimes:
    """The contention table."""
    return ContentionTimes(
        total=_slowdown_row(contention.total),
        classes=tuple(_slowdown_row(row.found, row) for row in contention.classes),
        covered_s=seconds(contention.covered_ns),
        uncovered_s=seconds(contention.uncovered_ns),
        filled_in=_filled_in(filled),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """A phase, a process group, or a wire (`by`), per step of the average rank; what a part overlaps counts for all."""

    by: str
    name: str
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    overlap_pct: float | None
    calls: float
    num_ranks: int


def part_times(findings: Findings) -> tuple[PartTimes, ...]:
    """The parts of the job."""
    num = findings.num_windows
    return tuple(
        PartTimes(
            by=part.by,
            name=part.name,
            compute_s=seconds(part.compute_ns / num),
            comm_s=seconds(part.comm_ns / num),
            exposed_comm_s=seconds(part.exposed_ns / num),
            overlap_pct=part.overlap_pct,
            calls=part.num_calls / num,
            num_ranks=part.num_ranks,
        )
        for part in findings.parts
    )


def collective_times(findings: Findings) -> tuple[CollectiveTimes, ...]:
    """The table of collectives."""
    return tuple(_collective_times(row, findings.contention) for row in findings.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCollective:
    """One collective of a group; it starts when that many of the group's kernels have ended."""

    kind: str
    communicator: str
    bytes: int
    channels: int
    starts_after: int
    median_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGroupTimes:
    """One overlap group, medians over its occurrences in all steps and ranks."""

    name: str
    bound: str
    agreement: float
    num_occurrences: int
    per_step: float
    num_kernels: int
    makespan_s: float
    comp_s: float
    comm_s: float
    exposed_s: float
    collectives: tuple[GroupCollective, ...]


def group_times(groups: Sequence[TraceGroup]) -> tuple[TraceGroupTimes, ...]:
    """The groups in order of first occurrence."""
    return tuple(
        TraceGroupTimes(
            name=group.name,
            bound=group.bound.value,
            agreement=group.agreement,
            num_occurrences=group.num_occurrences,
            per_step=group.per_step,
            num_kernels=len(group.kernel_keys),
            makespan_s=seconds(group.makespan_ns),
            comp_s=seconds(group.comp_ns),
            comm_s=seconds(group.comm_ns),
            exposed_s=seconds(group.exposed_ns),
            collectives=tuple(
                GroupCollective(
                    kind=comm.key.op,
                    communicator=comm.key.communicator,
                    bytes=comm.key.num_bytes,
                    channels=comm.key.num_channels,
                    starts_after=comm.starts_after,
                    median_s=seconds(comm.median_ns),
                )
                for comm in group.comms
            ),
        )
        for group in groups
    )
