"""Timelines as a Chrome trace, the JSON that Perfetto and chrome://tracing open, and back.

Source: "Trace Event Format" (Google, JSON object format). One process per timeline and rank, one thread per stream,
one complete event (`"ph": "X"`) per span with `ts` and `dur` in microseconds, names as metadata events (`"ph": "M"`).

Viewers drop complete events that overlap on one thread without nesting, so spans that run at once on one stream are
spread over further threads of the same stream. Times are rounded to whole nanoseconds, start and end alike, so spans
that touch still touch. Process and thread numbers start at 1 and no two threads share one: viewers treat 0 as idle and
take threads of equal number for the same thread.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import msgspec

from lagom_overlap.errors import BundleError, in_words
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.trace.gpu_trace import NS_PER_S, NS_PER_US
from lagom_overlap.units import NS

_FORMAT: Final = "lagom-overlap timeline"
_VERSION: Final = 1
"""Of what we add to the format; a timeline of another version is refused."""


class _Args(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    sort_index: int | None = None
    timeline: str | None = None
    rank: int | None = None
    stream: str | None = None


class _Event(msgspec.Struct, frozen=True, omit_defaults=True):
    ph: str
    name: str
    pid: int
    tid: int
    cat: str | None = None
    ts: float | None = None
    dur: float | None = None
    args: _Args | None = None


class _OtherData(msgspec.Struct, frozen=True):
    format: str
    version: int
    timelines: tuple[str, ...]


class _File(msgspec.Struct, frozen=True, rename="camel"):
    display_time_unit: str
    other_data: _OtherData
    trace_events: list[_Event]


def _to_ns(seconds: float, what: str) -> int:
    try:
        return round(seconds / NS)
    except (OverflowError, ValueError):
        raise ValueError(f"{what} is {seconds} s, must be finite") from None


def _lanes(spans: tuple[Span, ...]) -> dict[tuple[str, int], list[Span]]:
    """The spans of one rank by (stream, lane): the first lane of the stream that is free when the span starts."""
    lanes: dict[tuple[str, int], list[Span]] = {}
    streams: dict[str, int] = defaultdict(int)
    for span in spans:
        for lane in range(streams[span.stream] + 1):
            lane_spans = lanes.setdefault((span.stream, lane), [])
            if not lane_spans or lane_spans[-1].end_s <= span.start_s:
                lane_spans.append(span)
                streams[span.stream] = max(streams[span.stream], lane + 1)
                break
    return {key: lane_spans for key, lane_spans in sorted(lanes.items()) if lane_spans}


def _complete(span: Span, pid: int, tid: int) -> _Event:
    start, end = _to_ns(span.start_s, f"start of {span.name!r}"), _to_ns(span.end_s, f"end of {span.name!r}")
    return _Event(
        ph="X",
        name=span.name,
        pid=pid,
        tid=tid,
        cat=str(span.kind),
        ts=start / NS_PER_US,
        dur=(end - start) / NS_PER_US,
    )


def _metadata(what: str, pid: int, tid: int, args: _Args) -> _Event:
    return _Event(ph="M", name=what, pid=pid, tid=tid, args=args)


def chrome_trace(timelines: Mapping[str, Timeline]) -> bytes:
    """The timelines as one JSON file, in the order given; the same timelines give the same bytes.

    Raises:
        ValueError: if a time is not finite.
    """
    processes = [
        (name, rank, tuple(span for span in timeline.spans if span.rank == rank))
        for name, timeline in timelines.items()
        for rank in sorted({span.rank for span in timeline.spans})
    ]
    events: list[_Event] = []
    tid = len(processes)
    for pid, (name, rank, spans) in enumerate(processes, start=1):
        several = len({span.rank for span in timelines[name].spans}) > 1
        label = f"{name}, rank {rank}" if several else name
        events.append(_metadata("process_name", pid, 0, _Args(name=label, timeline=name, rank=rank)))
        events.append(_metadata("process_sort_index", pid, 0, _Args(sort_index=pid)))
        for (stream, lane), lane_spans in _lanes(spans).items():
            tid += 1
            label = stream if lane == 0 else f"{stream} ({lane + 1})"
            events.append(_metadata("thread_name", pid, tid, _Args(name=label, stream=stream)))
            events.append(_metadata("thread_sort_index", pid, tid, _Args(sort_index=tid)))
            events.extend(_complete(span, pid, tid) for span in lane_spans)
    other = _OtherData(format=_FORMAT, version=_VERSION, timelines=tuple(timelines))
    file = _File(display_time_unit="ns", other_data=other, trace_events=events)
    return msgspec.json.encode(file)


def read_timelines(content: bytes) -> dict[str, Timeline]:
    """The timelines of a file that `chrome_trace` made, by name, to the nanosecond.

    Raises:
        BundleError: if it is another file, or damaged.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
        head = file.other_data
        if (head.format, head.version) != (_FORMAT, _VERSION):
            raise ValueError(f"format {head.format!r} version {head.version}")
        owners: dict[int, tuple[str, int]] = {}
        streams: dict[int, str] = {}
        spans: dict[str, list[Span]] = {name: [] for name in head.timelines}
        for event in file.trace_events:
            args = event.args or _Args()
            match event.ph, event.name:
                case "M", "process_name":
                    owners[event.pid] = args.timeline or "", args.rank or 0
                case "M", "thread_name":
                    streams[event.tid] = args.stream or ""
                case "X", name:
                    owner, rank = owners[event.pid]
                    start, length = (round((time_us or 0.0) * NS_PER_US) for time_us in (event.ts, event.dur))
                    spans[owner].append(
                        Span(
                            name=name,
                            kind=SpanKind(event.cat or ""),
                            stream=streams[event.tid],
                            start_s=start / NS_PER_S,
                            end_s=(start + length) / NS_PER_S,
                            rank=rank,
                        )
                    )
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, KeyError) as error:
        raise BundleError(f"a timeline that is damaged: {in_words(str(error))}") from None
    return {name: Timeline(tuple(own_spans)) for name, own_spans in spans.items()}
