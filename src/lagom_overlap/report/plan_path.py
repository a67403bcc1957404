"""A simulated step seen as a critical path, and where its exposed time comes from."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.timeline.metrics import merge_intervals
from lagom_overlap.workload import CommOp, Iteration, Op


@dataclass(frozen=True, slots=True)
class PathPart:
    """A stretch of the critical path on operators of one sort: how many, and their seconds in all."""

    what: str
    kind: SpanKind
    num_ops: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ExposedPart:
    """Time in which nothing computed while collectives of this sort ran."""

    what: str
    num_comms: int
    seconds: float


def sort_of(op: Op) -> str:
    """What an operator is to a reader: collective and communicator, or phase of the computation."""
    phase = f" ({op.origin.phase.replace('_', ' ')})" if op.origin.phase is not None else ""
    if isinstance(op, CommOp):
        return f"{op.collective.kind.replace('_', '-')} {op.communicator}{phase}"
    return f"compute{phase}"


def critical_path(iteration: Iteration, timeline: Timeline) -> tuple[PathPart, ...]:
    """One longest chain of operators that leaves no gap, from the last end back to time 0; neighbours of a sort joined.

    An operator waits for its dependences, for its predecessor on the stream, and for whatever used its link before.
    """
    ops = {op.name: op for op in iteration.ops}
    by_end: dict[float, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        by_end[span.end_s].append(span)
    current: Span | None = max(timeline.spans, key=lambda span: span.end_s, default=None)
    chain: list[Span] = []
    while current is not None:
        chain.append(current)
        current = _predecessor(current, by_end[current.start_s], ops[current.name].deps)
    parts: list[PathPart] = []
    for span in reversed(chain):
        what = sort_of(ops[span.name])
        if parts and parts[-1].what == what:
            last = parts.pop()
            parts.append(PathPart(what, span.kind, last.num_ops + 1, last.seconds + span.duration_s))
        else:
            parts.append(PathPart(what, span.kind, 1, span.duration_s))
    return tuple(parts)


def _predecessor(span: Span, ended: list[Span], deps: tuple[str, ...]) -> Span | None:
    """The span that this one waited for, of those that ended when it started; None at the start of the step."""
    before = [other for other in ended if other.start_s < span.start_s]
    return min(
        before,
        key=lambda one: (one.name not in deps, one.stream != span.stream, one.kind is not span.kind),
        default=None,
    )


def exposed_by(timeline: Timeline, iteration: Iteration) -> tuple[ExposedPart, ...]:
    """Where time without computation goes, largest first; what several collectives share is split evenly.

    Time in which nothing runs at all is the last entry, "nothing runs".
    """
    sorts = {op.name: sort_of(op) for op in iteration.ops}
    busy = merge_intervals(timeline.of(SpanKind.COMP))
    gaps = _gaps(busy, timeline.makespan_s)
    seconds: dict[str, float] = defaultdict(float)
    comms: dict[str, set[str]] = defaultdict(set)
    spans = sorted(timeline.of(SpanKind.COMM), key=lambda span: span.start_s)
    for start, end in gaps:
        inside = [span for span in spans if span.start_s < end and span.end_s > start]
        marks = sorted({start, end, *(min(max(m, start), end) for s in inside for m in (s.start_s, s.end_s))})
        for low, high in pairwise(marks):
            running = [span for span in inside if span.start_s <= low and span.end_s >= high]
            for span in running:
                seconds[sorts[span.name]] += (high - low) / len(running)
                comms[sorts[span.name]].add(span.name)
            if not running:
                seconds[""] += high - low
    parts = [ExposedPart(what, len(comms[what]), total) for what, total in seconds.items() if what]
    parts.sort(key=lambda part: (-part.seconds, part.what))
    if seconds[""] > 0:
        parts.append(ExposedPart("nothing runs", 0, seconds[""]))
    return tuple(parts)


def _gaps(busy: list[tuple[float, float]], end_s: float) -> list[tuple[float, float]]:
    gaps, now = [], 0.0
    for start, end in busy:
        if start > now:
            gaps.append((now, start))
        now = max(now, end)
    if end_s > now:
        gaps.append((now, end_s))
    return gaps
