"""What one step under PyTorch's profiler fixes for those that follow: with NCCL's times of a later step, its joins.

NCCL's profiler says when each collective started and ended, and nothing of the computation. Three things are known of
the computation all the same:

- a collective starts when the computation has come to where it waits for it, if its stream was idle: `lag_s` later,
  which is what copies and the launch take. So each such start dates a place of the computation (a *mark*);
- a join ends no earlier than its collective;
- the device is idle before the step and after it, and events say how long it took.

Between two dated places the pattern knows every stretch of computation, as long as it took when it was profiled. Under
another setting, and other contention, they take `f` times as long, one `f` for each interval: the one with which the
second date comes out, or 1 where a wait hides what the computation took. So the length of computation that ends in an
exposed wait is an estimate; where the wait ends is not.

Which collectives a start and a join depend on is the host's order (`launch_order`), the same under every setting.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.online.routes.launch_order import LaunchedCollective, computation_of, launched, starts_of
from lagom_overlap.online.routes.plugin_events import TimedCall, step_length_s, timed_calls
from lagom_overlap.trace.gpu_trace import NS_PER_S, GpuTrace, KnobReach

RESOLUTION_S: Final = 10e-6
"""Gaps and shifts below are the launch and the clocks: kernels of one stream follow each other within it."""
MOST_GUESSED: Final = 0.3
"""Of a step, the computation between each wait and its nearest date, summed.

Where contention stretches it by a tenth more here than there, waits come out wrong by a tenth of it: 3 % of a step.
"""
LATE_HOST: Final = 2.0
"""A lag this many times the usual one of such calls is the host's, which launched late under PyTorch's profiler."""
_MOST_STRETCH: Final = 64.0
"""Upper end of the stretches that are looked for; where even that is too little, none is assumed."""
_NUM_HALVINGS: Final = 40
"""Of the interval up to `_MOST_STRETCH`: to 6e-11, below a nanosecond per second."""


class _Role(IntEnum):
    """What happens at a place of the computation; at one place in this order."""

    MARK = 0
    ISSUE = 1
    JOIN = 2


@dataclass(frozen=True, slots=True)
class _Point:
    """A place of the computation at which call number `call` is concerned; `segment_s` is computed before it."""

    role: _Role
    call: int
    segment_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A collective of the pattern: what the profiler said of it, and what it waits for.

    `after`: calls that must have ended before it starts. `lag_s`: from its mark to its start, by the GPU alone; None
    where that was not seen, because another collective kept the stream busy.
    """

    seen: TimedCall
    after: tuple[int, ...]
    lag_s: float | None


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """When a collective ran, in seconds since the step's first GPU event, and on how many channels."""

    begun_s: float
    ended_s: float
    num_channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPattern:
    """A step's collectives of a size and more, in the order of their launch, and the computation between them.

    `tail_s` is computed after the last point.
    """

    calls: tuple[_Call, ...]
    points: tuple[_Point, ...]
    tail_s: float

    @property
    def seen(self) -> tuple[TimedCall, ...]:
        """The calls as they were profiled."""
        return tuple(call.seen for call in self.calls)

    def replay(self, spans: Sequence[KernelSpan], length_s: float) -> tuple[TimedCall, ...]:
        """The calls of a later step of `length_s` in which they ran at `spans`."""
        joined, issued = dict[int, tuple[float, float]](), dict[int, float]()
        begins, begun_s = 0, 0.0
        for end, date_s in self._dates(spans, length_s):
            part = self.points[begins:end]
            tail_s = self.tail_s if end == len(self.points) else 0.0
            stretch = _stretch(part, tail_s, spans, begun_s, date_s)
            for point, times in zip(part, _run(part, spans, begun_s, stretch), strict=True):
                if point.role is _Role.JOIN:
                    joined[point.call] = times
                elif point.role is _Role.ISSUE:
                    issued[point.call] = times[0]
            begins, begun_s = end, date_s
        return tuple(
            _replayed(call.seen, span, issued[number], joined.get(number))
            for number, (call, span) in enumerate(zip(self.calls, spans, strict=True))
        )

    def _dates(self, spans: Sequence[KernelSpan], length_s: float) -> list[tuple[int, float]]:
        """Up to which points a time is known, and which; the last is the end of the step."""
        dates, last_s = [], 0.0
        for end, point in enumerate(self.points, start=1):
            mark_s = self._mark_s(point.call, spans) if point.role is _Role.MARK else None
            if mark_s is not None and mark_s >= last_s:
                dates.append((end, mark_s))
                last_s = mark_s
        return [*dates, (len(self.points), length_s)]

    def _mark_s(self, number: int, spans: Sequence[KernelSpan]) -> float | None:
        """When the computation had come to the call's mark; None if the call does not tell."""
        call = self.calls[number]
        if call.lag_s is None or not _is_idle(spans[number], [spans[before] for before in call.after]):
            return None
        return max(0.0, spans[number].begun_s - call.lag_s)


def pattern_of(trace: GpuTrace, least_bytes: int) -> StepPattern:
    """The pattern of a profiled step; smaller calls are no part of it.

    Raises:
        TraceError: in words, if the later steps cannot be told by NCCL's profiler.
    """
    timed = timed_calls(trace)
    computation = computation_of(trace)
    if timed is None or computation is None:
        raise TraceError("its trace does not tell what waits for what")
    comms = launched(trace)
    _check_reported(comms, least_bytes)
    large = [call for call in timed if call.num_bytes >= least_bytes]
    if not large:
        raise TraceError("it has no collectives")
    starts = starts_of(comms, trace.waits, computation.stream)
    numbers = {call.issue_place: number for number, call in enumerate(large)}
    origin_ns = int(trace.events.start_ns[0])

    def reached_s(place: int) -> float:
        return float(computation.reached_ns(place, origin_ns) - origin_ns) / NS_PER_S

    marks, lags_s, after = dict[int, int](), dict[int, float](), list[tuple[int, ...]]()
    for number, call in enumerate(large):
        start = starts[call.issue_place]
        after.append(tuple(numbers[place] for place in start.comms if place in numbers))
        if start.computed is not None:
            marks[number] = start.computed
            if _is_idle(_span(call), [_span(large[before]) for before in after[-1]]):
                lags_s[number] = max(0.0, call.begun_s - reached_s(start.computed))
    lags_s = _without_the_hosts(large, lags_s)
    calls = tuple(_Call(seen=call, after=after[number], lag_s=lags_s.get(number)) for number, call in enumerate(large))
    length_s = step_length_s(trace)
    points, tail_s = _points(large, marks, reached_s, length_s)
    pattern = StepPattern(calls=calls, points=points, tail_s=tail_s)
    _check_dated(pattern, length_s)
    return pattern


def _without_the_hosts(calls: Sequence[TimedCall], lags_s: Mapping[int, float]) -> dict[int, float]:
    """Lags with those of a late host replaced by the usual one of calls of that kind and size."""
    alike: dict[tuple[CollectiveKind, int], list[float]] = defaultdict(list)
    for number, lag_s in lags_s.items():
        alike[calls[number].kind, calls[number].num_bytes].append(lag_s)
    usual_s = {site: median(lags) for site, lags in alike.items()}
    kept = {}
    for number, lag_s in lags_s.items():
        usual = usual_s[calls[number].kind, calls[number].num_bytes]
        kept[number] = usual if lag_s > LATE_HOST * usual + RESOLUTION_S else lag_s
    return kept


def is_same_sequence(one: Sequence[TimedCall], other: Sequence[TimedCall]) -> bool:
    """Whether two steps make the same calls and joins, in the same order."""
    return _shape(one) == _shape(other)


def _shape(calls: Sequence[TimedCall]) -> tuple[object, ...]:
    places = sorted(
        [(call.issue_place, 0, number) for number, call in enumerate(calls)]
        + [(call.join_place, 1, number) for number, call in enumerate(calls) if call.join_place is not None]
    )
    return (
        *((call.kind, call.num_bytes, call.num_ranks) for call in calls),
        *((is_join, number) for _, is_join, number in places),
    )


def _check_reported(comms: Sequence[LaunchedCollective], least_bytes: int) -> None:
    for comm in comms:
        call = comm.call
        if call.kind is None or call.reach is not KnobReach.TUNER:
            if not 0 < call.num_bytes < least_bytes:
                raise TraceError(f"NCCL's profiler does not report its {call.op}")
        elif call.num_bytes == 0:
            raise TraceError(f"its trace does not say how large a {call.kind} is")


def _check_dated(pattern: StepPattern, length_s: float) -> None:
    """Refuses a step whose waits are far from dates: its collectives hardly ever find their stream idle."""
    is_date = [point.role is _Role.MARK and pattern.calls[point.call].lag_s is not None for point in pattern.points]
    since_s, behind = 0.0, list[float]()
    for point, is_here in zip(pattern.points, is_date, strict=True):
        since_s = 0.0 if is_here else since_s + point.segment_s
        behind.append(since_s)
    until_s, num_far, guessed_s = pattern.tail_s, 0, 0.0
    for point, is_here, since_s in reversed(list(zip(pattern.points, is_date, behind, strict=True))):
        until_s = 0.0 if is_here else until_s
        if point.role is _Role.JOIN:
            guessed_s += min(since_s, until_s)
            num_far += min(since_s, until_s) > RESOLUTION_S
        until_s += point.segment_s
    if guessed_s > MOST_GUESSED * length_s:
        num_joins = sum(1 for point in pattern.points if point.role is _Role.JOIN)
        raise TraceError(
            f"its collectives keep their streams busy: {num_far} of {num_joins} waits are far from a start on an idle "
            "one"
        )


def _points(
    calls: Sequence[TimedCall], marks: dict[int, int], reached_s: Callable[[int], float], length_s: float
) -> tuple[tuple[_Point, ...], float]:
    """The points in the computation's order, and what is computed after the last."""
    places = [(place, _Role.MARK, number) for number, place in marks.items()]
    for number, call in enumerate(calls):
        places.append((call.issue_place, _Role.ISSUE, number))
        if call.join_place is not None:
            places.append((call.join_place, _Role.JOIN, number))
    points, now_s = [], 0.0
    for place, role, number in sorted(places):
        at_s = reached_s(place)
        points.append(_Point(role, number, max(0.0, at_s - now_s)))
        now_s = max(now_s, at_s)
        if role is _Role.JOIN:
            now_s = max(now_s, calls[number].ended_s)
    return tuple(points), max(0.0, length_s - now_s)


def _run(
    points: Sequence[_Point], spans: Sequence[KernelSpan], begun_s: float, stretch: float
) -> list[tuple[float, float]]:
    """When the computation comes to each point and goes on from it, if it takes `stretch` times as long."""
    now_s, runs = begun_s, []
    for point in points:
        at_s = now_s + stretch * point.segment_s
        now_s = max(at_s, spans[point.call].ended_s) if point.role is _Role.JOIN else at_s
        runs.append((at_s, now_s))
    return runs


def _stretch(
    points: Sequence[_Point], tail_s: float, spans: Sequence[KernelSpan], begun_s: float, date_s: float
) -> float:
    """The stretch with which an interval ends at its date; 1 where none does, or a wait before the date hides it."""

    def late_s(stretch: float) -> float:
        ran = _run(points, spans, begun_s, stretch)
        return (ran[-1][1] if ran else begun_s) + stretch * tail_s - date_s

    if late_s(0.0) > 0 or late_s(_MOST_STRETCH) < 0:
        return 1.0
    computed_s = since_s = 0.0
    for point, (at_s, from_s) in zip(points, _run(points, spans, begun_s, 1.0), strict=True):
        computed_s += point.segment_s
        since_s = 0.0 if from_s > at_s else since_s + point.segment_s
    # Of little computation after an exposed wait a shift of the clocks would make any stretch.
    if since_s + tail_s < (computed_s + tail_s) / 2 and abs(late_s(1.0)) <= RESOLUTION_S:
        return 1.0
    low, high = 0.0, _MOST_STRETCH
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if late_s(middle) < 0 else (low, middle)
    return high


def _is_idle(span: KernelSpan, before: Sequence[KernelSpan]) -> bool:
    return all(span.begun_s > other.ended_s + RESOLUTION_S for other in before)


def _span(call: TimedCall) -> KernelSpan:
    return KernelSpan(call.begun_s, call.ended_s, call.num_channels)


def _replayed(seen: TimedCall, span: KernelSpan, issued_s: float, joined: tuple[float, float] | None) -> TimedCall:
    return TimedCall(
        kind=seen.kind,
        num_bytes=seen.num_bytes,
        num_ranks=seen.num_ranks,
        num_channels=span.num_channels,
        issued_s=min(issued_s, span.begun_s),
        begun_s=span.begun_s,
        ended_s=span.ended_s,
        joined_s=joined[0] if joined else None,
        resumed_s=max(joined[1], span.ended_s) if joined else None,
        issue_place=seen.issue_place,
        join_place=seen.join_place,
    )
