"""What a timeline says about overlap: exposed communication, overlap ratio."""

from collections.abc import Iterable
from dataclasses import dataclass

from lagom_overlap.timeline.span import Span, SpanKind, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapMetrics:
    """Times of one rank, in seconds; `comp_s` and `comm_s` are lengths of unions, so concurrent spans count once.

    `exposed_comm_s` is communication while nothing computes, `overlap_ratio` the share of communication that is hidden
    (1 where there is none).
    """

    makespan_s: float
    comp_s: float
    comm_s: float
    exposed_comm_s: float
    overlap_ratio: float


def merge_intervals(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The union of the spans as disjoint increasing intervals; touching ones are joined, empty ones dropped."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((s.start_s, s.end_s) for s in spans if s.end_s > s.start_s):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _intersection_s(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    i = j = 0
    total = 0.0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap_metrics(timeline: Timeline, *, rank: int = 0) -> OverlapMetrics:
    """The metrics of one rank."""
    comps = timeline.of(SpanKind.COMP, rank)
    comms = timeline.of(SpanKind.COMM, rank)
    comp, comm, busy = merge_intervals(comps), merge_intervals(comms), merge_intervals((*comps, *comms))
    makespan_s = busy[-1][1] - busy[0][0] if busy else 0.0
    comm_s, overlapped_s = _length(comm), _intersection_s(comp, comm)
    return OverlapMetrics(
        makespan_s=makespan_s,
        comp_s=_length(comp),
        comm_s=comm_s,
        exposed_comm_s=comm_s - overlapped_s,
        overlap_ratio=overlapped_s / comm_s if comm_s else 1.0,
    )
