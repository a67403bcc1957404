"""The measured timeline with what was found drawn into it: a `Timeline` for every rank, ready for Perfetto."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.analysis.intervals import Intervals
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.trace.gpu_trace import NS_PER_S, ROLE_CODES, Int64, Role

MAX_SPANS: Final = 200_000
"""Spans of a file in all; beyond, the shortest GPU events are left out."""
_MAX_NAME: Final = 120


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"


def _spans(found: Intervals, name: str, kind: SpanKind, stream: str, origin_ns: int) -> Iterator[Span]:
    for start, end in zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True):
        yield Span(
            name=name,
            kind=kind,
            stream=stream,
            start_s=(start - origin_ns) / NS_PER_S,
            end_s=(end - origin_ns) / NS_PER_S,
        )


def _exposed(rank: RankFindings) -> Intervals:
    comm = rank.occupation.comm
    if not len(comm.start_ns):
        return comm
    bare = rank.occupation.compute.gaps(int(comm.start_ns[0]), int(comm.end_ns[-1]))
    return comm.intersect(bare)


def _kept(rank: RankFindings, room: int) -> Int64:
    events = rank.trace.events
    if len(events) <= room:
        return np.arange(len(events))
    longest = np.argsort(events.start_ns - events.end_ns, kind="stable")[: max(room, 0)]
    return np.sort(longest)


def rank_timeline(findings: Findings, index: int, *, room: int = MAX_SPANS) -> Timeline:
    """One rank's streams, then its steps, exposed communication, host-bound gaps and stretched computation."""
    rank = findings.ranks[index]
    events = rank.trace.events
    if not len(events):
        return Timeline(())
    origin_ns = int(events.start_ns[0])
    spans: list[Span] = []
    for row in _kept(rank, room).tolist():
        comm = int(events.role[row]) == ROLE_CODES[Role.COMM]
        spans.append(
            Span(
                name=_short(events.names[int(events.name[row])]),
                kind=SpanKind.COMM if comm else SpanKind.COMP,
                stream=events.streams[int(events.stream[row])],
                start_s=(int(events.start_ns[row]) - origin_ns) / NS_PER_S,
                end_s=(int(events.end_ns[row]) - origin_ns) / NS_PER_S,
            )
        )
    for step in rank.steps:
        window = Intervals(np.array([step.start_ns]), np.array([step.end_ns]))
        spans.extend(_spans(window, f"step {step.number}", SpanKind.COMP, "~ steps", origin_ns))
    spans.extend(_spans(_exposed(rank), "exposed", SpanKind.COMM, "~ exposed communication", origin_ns))
    spans.extend(_spans(rank.occupation.host_bound, "host-bound", SpanKind.COMP, "~ waits for the CPU", origin_ns))
    runs = findings.contention.runs
    for row, excess in zip(runs.row[runs.rank == index].tolist(), runs.excess_ns[runs.rank == index], strict=True):
        if excess > 0:
            alone = 1 - excess / (int(events.end_ns[row]) - int(events.start_ns[row]))
            only = Intervals(events.start_ns[row : row + 1], events.end_ns[row : row + 1])
            name = f"x{1 / alone:.2f} {_short(events.names[int(events.name[row])])}"
            spans.extend(_spans(only, name, SpanKind.COMP, "~ stretched by communication", origin_ns))
    return Timeline(tuple(spans))
