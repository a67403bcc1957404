"""What the views of a plan show: timelines, the critical path, where the exposed time comes from."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from lagom_overlap.plan.predict import Prediction
from lagom_overlap.report.plan_model import PlanJson
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
    """Time in which nothing computed, while such collectives ran."""

    what: str
    num_comms: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan for people; `timelines` and `measured` by "before" and "after", `advice` by framework."""

    job: str
    num_ranks: int
    result: PlanJson
    timelines: Mapping[str, Timeline]
    measured: Mapping[str, Timeline]
    critical: tuple[PathPart, ...]
    exposed: tuple[ExposedPart, ...]
    notes: tuple[str, ...]
    is_optimal: bool
    advice: Mapping[str, tuple[str, ...]]


def sort_of(op: Op) -> str:
    """What an operator is to a reader: collective and communicator, or phase of the computation."""
    phase = f" ({op.origin.phase.replace('_', ' ')})" if op.origin.phase is not None else ""
    if isinstance(op, CommOp):
        return f"{op.collective.kind.replace('_', '-')} {op.communicator}{phase}"
    return f"compute{phase}"


def timeline_of(iteration: Iteration, prediction: Prediction) -> Timeline:
    """The predicted schedule of an iteration as spans."""
    graph, schedule = prediction.graph, prediction.schedule
    return Timeline(
        tuple(
            Span(
                name=op.name,
                kind=SpanKind.COMM if isinstance(op, CommOp) else SpanKind.COMP,
                stream=op.stream,
                start_s=graph.seconds(start),
                end_s=graph.seconds(start + ticks),
            )
            for op, start, ticks in zip(iteration.ops, schedule.starts, graph.ticks, strict=True)
        )
    )


def critical_path(iteration: Iteration, prediction: Prediction) -> tuple[PathPart, ...]:
    """One longest chain of operators that leaves no gap, from the last end back to time 0; neighbours of a sort joined.

    An operator waits for those that it depends on, and for whatever ran before it on its stream or resource.
    """
    graph, starts = prediction.graph, prediction.schedule.starts
    ends = [start + ticks for start, ticks in zip(starts, graph.ticks, strict=True)]
    by_end: dict[int, list[int]] = defaultdict(list)
    for task, end in enumerate(ends):
        by_end[end].append(task)
    task = max(range(len(ends)), key=lambda number: ends[number], default=-1)
    chain: list[int] = []
    while task >= 0:
        chain.append(task)
        before = [other for other in by_end[starts[task]] if other != task and starts[other] < starts[task]]
        needed = set(graph.preds[task])
        stream = iteration.ops[task].stream
        tight = [other for other in before if other in needed]
        tight += [
            other
            for other in before
            if graph.resource[other] == graph.resource[task] or iteration.ops[other].stream == stream
        ]
        task = tight[0] if tight else -1
    parts: list[PathPart] = []
    for number in reversed(chain):
        op, seconds = iteration.ops[number], graph.seconds(graph.ticks[number])
        kind = SpanKind.COMM if isinstance(op, CommOp) else SpanKind.COMP
        if parts and parts[-1].what == sort_of(op):
            last = parts.pop()
            parts.append(PathPart(last.what, kind, last.num_ops + 1, last.seconds + seconds))
        else:
            parts.append(PathPart(sort_of(op), kind, 1, seconds))
    return tuple(parts)


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
