"""The measured timeline with what was found drawn into it: a `Timeline` for every rank, ready for Perfetto."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from lagom_overlap.analysis.advice import describe
from lagom_overlap.analysis.collectives import key_of
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.analysis.intervals import Intervals
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.trace.gpu_trace import ROLE_CODES, UNKNOWN, EventRole, Int64, seconds

MAX_SPANS: Final = 200_000
"""Spans of a file in all; beyond, the shortest GPU events are left out."""
_MAX_NAME: Final = 160
"""Characters of a kernel's name that Perfetto is given: templates have thousands."""

GroupSpan = tuple[str, int, int, int]
"""One occurrence of an overlap group: name, start and end in the trace's ns, index of the rank among the findings'."""


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"


def _spans(intervals: Intervals, name: str, kind: SpanKind, stream: str, origin_ns: int) -> Iterator[Span]:
    for start, end in zip(intervals.start_ns.tolist(), intervals.end_ns.tolist(), strict=True):
        yield Span(
            name=name,
            kind=kind,
            stream=stream,
            start_s=seconds(start - origin_ns),
            end_s=seconds(end - origin_ns),
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


def _groups(rank: RankFindings, index: int, groups: Sequence[GroupSpan], origin_ns: int) -> Iterator[Span]:
    for name, start_ns, end_ns, of_rank in groups:
        if of_rank == index and end_ns >= start_ns:
            window = Intervals(np.array([start_ns]), np.array([end_ns]))
            yield from _spans(window, _short(name), SpanKind.COMP, "~ overlap groups", origin_ns)


def _stretched(findings: Findings, index: int, origin_ns: int) -> Iterator[Span]:
    """The stretched kernels, each with the collective to blame in its name: the one that overlaps it longest."""
    trace, runs = findings.ranks[index].trace, findings.contention.runs
    events, mine = trace.events, runs.rank == index
    for row, excess, at in zip(
        runs.row[mine].tolist(), runs.excess_ns[mine].tolist(), runs.call[mine].tolist(), strict=True
    ):
        length = int(events.end_ns[row]) - int(events.start_ns[row])
        if excess <= 0:
            continue
        blamed = "" if at == UNKNOWN else f" by {describe(key_of(trace.calls[at]))}"
        name = f"x{length / (length - excess):.2f}{blamed}: {events.names[int(events.name[row])]}"
        only = Intervals(events.start_ns[row : row + 1], events.end_ns[row : row + 1])
        yield from _spans(only, _short(name), SpanKind.COMP, "~ stretched by communication", origin_ns)


def rank_timeline(
    findings: Findings, index: int, *, room: int = MAX_SPANS, groups: Sequence[GroupSpan] = ()
) -> Timeline:
    """One rank's streams, then its steps, overlap groups, exposed communication, host-bound gaps, stretched kernels.

    Of `groups` this rank's are drawn.
    """
    rank = findings.ranks[index]
    events = rank.trace.events
    if not len(events):
        return Timeline(())
    origin_ns = int(events.start_ns[0])
    spans: list[Span] = []
    for row in _kept(rank, room).tolist():
        comm = int(events.role[row]) == ROLE_CODES[EventRole.COMM]
        spans.append(
            Span(
                name=_short(events.names[int(events.name[row])]),
                kind=SpanKind.COMM if comm else SpanKind.COMP,
                stream=events.streams[int(events.stream[row])],
                start_s=seconds(int(events.start_ns[row]) - origin_ns),
                end_s=seconds(int(events.end_ns[row]) - origin_ns),
            )
        )
    for step in rank.steps:
        window = Intervals(np.array([step.start_ns]), np.array([step.end_ns]))
        spans.extend(_spans(window, f"step {step.number}", SpanKind.COMP, "~ steps", origin_ns))
    spans.extend(_spans(_exposed(rank), "exposed", SpanKind.COMM, "~ exposed communication", origin_ns))
    spans.extend(_spans(rank.occupation.host_bound, "host-bound", SpanKind.COMP, "~ waits for the CPU", origin_ns))
    spans.extend(_groups(rank, index, groups, origin_ns))
    spans.extend(_stretched(findings, index, origin_ns))
    return Timeline(tuple(spans))
