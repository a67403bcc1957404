"""Steps timed by NCCL's profiler: our plug-in's ring, events for the step's length, PyTorch's profiler now and then.

A step under PyTorch's profiler (Kineto) costs a job 0.1 to 0.4 s, and seconds at the first; the ring costs reading a
file. So Kineto fixes once what does not depend on the setting (`step_pattern`): call sites, their order, what each
waits for, the computation in between. Later steps are told by when their collectives started and ended. The next
measured step after a pattern was learned, and then every `CHECK_EVERY`-th, runs under both. Both must agree on what the
search goes by, the makespans of the overlap groups: within what two steps of the untouched job differ by under Kineto
alone (A/A), or `LEAST_DIFFERENCE`. A step whose calls are not those of the pattern counts as untimed. One alone is an
evaluation or a log, and the pattern stays; after a second one the next step is learned anew.

Collectives that NCCL runs in one kernel (groups: PyTorch's coalesced calls) are one call here, as they are to PyTorch's
profiler: the ring says which, and how large they are together, which the trace may not say. NCCL asks the tuner once
for those of a group that are within four times each other's size. So a group of like sizes is one question and one
call; one of 1 and 8 MiB is two questions and one call, and its step is not timed.

Whatever is wrong with the ring (not there, of another process, truncated, calls lost) leaves Kineto in every measured
step for the rest of the job, and is said in one line.

Two clocks meet at the first collective: it starts as long after the step's first GPU event as under Kineto, because
nothing that is set can have changed what is before it. The end is that of an event on the computation's stream, which
is recorded where the step's work ends (`mark_end`): data and checkpoints come between that and the next step. Where
collectives follow it (gathered parameters), the step ends as long after the last of them as under Kineto.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import reduce
from operator import or_
from os import getpid
from pathlib import Path
from statistics import median
from time import monotonic, monotonic_ns, sleep
from typing import Any, Final, Protocol, TypeAlias

from lagom_overlap.collective import CollectiveKind, CommunicatorId, ConfigKey, ConfigSpace, Subspace
from lagom_overlap.errors import TableError, TraceError
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.profile_log import ProfiledCollective, ProfileFlag, ProfileRing
from lagom_overlap.online.program import groups_of, program_of, times_of
from lagom_overlap.online.routes.launch_order import launched
from lagom_overlap.online.routes.plugin_events import TimedCall, step_length_s, step_record, timed_calls
from lagom_overlap.online.routes.step_pattern import KernelSpan, StepPattern, is_same_sequence, pattern_of
from lagom_overlap.online.step_clock import MS_PER_S
from lagom_overlap.trace.gpu_trace import GpuTrace, KnobReach
from lagom_overlap.units import NS, format_percent

_log = logging.getLogger(__name__)

CHECK_EVERY: Final = 20
"""Measured steps from one that ran under both to the next."""
LEAST_DIFFERENCE: Final = 0.02
"""What both may always differ by: the plug-in's times leave out the launch (0.97 to 1.00 of a kernel on an H100)."""
MOST_MISSES: Final = 4
"""Steps in a row that could be neither learned nor told; then Kineto stays."""
_ODD_STEPS: Final = 1
"""Steps in a row that may be like no other: what is known of the others stays."""
REPORT_LIMIT_S: Final = 1.0
"""How long the calls of a step that has ended on the GPU may take to be in the ring: NCCL's proxy thread polls."""
_POLL_S: Final = 1e-3
"""Between two looks for calls of a step that are still under way."""


class TraceTimer(Protocol):
    """PyTorch's profiler around a step."""

    def begin(self) -> None:
        """The measured step begins, on an idle device."""

    def mark_end(self) -> None:
        """See `StepTimer`."""

    def end(self) -> tuple[float, tuple[TimedCall, ...] | None]:
        """See `StepTimer`."""

    def end_trace(self) -> tuple[float, GpuTrace | None]:
        """The step's length in seconds and its trace; None where there is none."""


class StepProfiler(Protocol):
    """NCCL's profiler around a step."""

    def begin(self) -> None:
        """From here on calls are recorded.

        Raises:
            TableError: if there is no ring of this process.
        """

    def end(self, is_whole: Callable[[Sequence[ProfiledCollective]], bool]) -> list[ProfiledCollective]:
        """The calls since `begin`, once they are whole or none is under way, or after a while; no more are recorded.

        Raises:
            TableError: if the ring cannot be read, or has lost calls.
        """


class RingRecorder:
    """Implements `StepProfiler` by our plug-in and the ring that it was started with."""

    def __init__(
        self,
        plugin: TunerPlugin,
        path: Path,
        *,
        clock: Callable[[], float] = monotonic,
        limit_s: float = REPORT_LIMIT_S,
    ) -> None:
        self._plugin, self._path = plugin, path
        self._clock, self._limit_s = clock, limit_s
        self._ring: ProfileRing | None = None
        self._began_ns = 0
        self._num_dropped = self._num_open = 0
        plugin.profile(is_enabled=False)

    def begin(self) -> None:
        """See `StepProfiler`."""
        if self._ring is None:
            ring = ProfileRing(self._path, self._plugin.flush_profile)
            if ring.process_id != getpid():
                raise TableError(f"{self._path} is the profile of process {ring.process_id}, not of this one")
            self._ring = ring
        self._ring.take()
        self._num_dropped = self._ring.num_dropped + self._ring.num_late
        self._num_open = self._ring.num_open
        self._began_ns = monotonic_ns()
        if not self._plugin.profile(is_enabled=True):
            raise TableError("NCCL runs no communicator under it")

    def end(self, is_whole: Callable[[Sequence[ProfiledCollective]], bool]) -> list[ProfiledCollective]:
        """See `StepProfiler`."""
        assert self._ring is not None, "end before begin"
        until_s, collectives = self._clock() + self._limit_s, list[ProfiledCollective]()
        try:
            while True:
                is_all = self._ring.num_open <= self._num_open  # looked at before: what is written later comes later
                log = self._ring.take()
                if log.num_lost or self._ring.num_dropped + self._ring.num_late > self._num_dropped:
                    raise TableError(f"{self._path} has lost calls of the step")
                collectives += [call for call in log.collectives if call.launched_ns >= self._began_ns]
                if is_all or is_whole(collectives) or self._clock() >= until_s:
                    return collectives
                sleep(_POLL_S)
        finally:
            self._plugin.profile(is_enabled=False)


_Wire: TypeAlias = tuple[int, CollectiveKind, int]
"""A communicator's id, kind and bytes."""


class _Mode(Enum):
    """What times a step."""

    KINETO = auto()
    BOTH = auto()
    RING = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """A pattern, NCCL's id and our key of each of its calls, and how the ring's clock and the events' meet.

    The keys name communicators by that id: they are for this process only.
    `head_s`: from the step's first GPU event to the first call's start. `idle_s`: of what the events measured, all but
    the step's length, which is `length_s`; `after_s` of it follow the last call.
    """

    pattern: StepPattern
    wires: tuple[_Wire, ...]
    keys: tuple[ConfigKey, ...]
    head_s: float
    idle_s: float
    after_s: float
    length_s: float

    def makespans_s(self, calls: Sequence[TimedCall], length_s: float) -> list[float]:
        """What each overlap group takes in a step of this sequence."""
        untouched = step_record(self.keys, self.length_s, self.pattern.seen)
        program = program_of([untouched], [ConfigSpace((Subspace(num_channels=(1,)),))] * len(self.keys))
        groups = groups_of(program)
        times = times_of(program, groups, step_record(self.keys, length_s, calls))
        return [group.count * times[group.name].makespan_s for group in groups]


class ProfileTimer:
    """Implements `StepTimer`; `make_event` makes a device event with a time, `synchronize` waits for the device."""

    def __init__(
        self,
        kernels: TraceTimer,
        recorder: StepProfiler,
        *,
        make_event: Callable[[], Any],
        synchronize: Callable[[], None],
        least_bytes: int,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._kernels, self._recorder = kernels, recorder
        self._make_event, self._synchronize = make_event, synchronize
        self._least_bytes = least_bytes
        self._clock_ns = clock_ns
        self._mode = _Mode.BOTH
        self._begun: Any = None
        self._marked: Any = None
        self._marked_ns = 0
        self._reference: _Reference | None = None
        self._is_trusted = self._is_off = False
        self._num_since = self._num_missed = 0
        self._noise: float | None = None

    def begin(self) -> None:
        """See `StepTimer`."""
        self._mode = self._next_mode()
        if self._mode is not _Mode.RING:
            self._kernels.begin()
        if self._mode is _Mode.KINETO:
            return
        try:
            self._synchronize()
            self._recorder.begin()
        except TableError as error:
            self._give_up(str(error))
            if self._mode is _Mode.RING:
                self._kernels.begin()
            self._mode = _Mode.KINETO
            return
        self._begun, self._marked = self._recorded(), None

    def mark_end(self) -> None:
        """See `StepTimer`."""
        if self._mode is not _Mode.RING:
            self._kernels.mark_end()
        if self._mode is not _Mode.KINETO:
            self._marked, self._marked_ns = self._recorded(), self._clock_ns()

    def end(self) -> tuple[float, tuple[TimedCall, ...] | None]:
        """See `StepTimer`."""
        if self._mode is _Mode.KINETO:
            return self._kernels.end()
        if self._marked is None:
            self._marked, self._marked_ns = self._recorded(), self._clock_ns()
        self._synchronize()
        elapsed_s = float(self._begun.elapsed_time(self._marked)) / MS_PER_S
        if self._mode is _Mode.RING:
            return self._by_ring(elapsed_s)
        duration_s, trace = self._kernels.end_trace()
        num_expected = 0 if trace is None else sum(1 for call in trace.calls if call.reach is KnobReach.TUNER)
        kernels = self._ring_kernels(lambda kernels: len(kernels) >= num_expected)
        if trace is None:
            return duration_s, None
        if kernels is not None:
            trace = _sized(trace, kernels)
            calls = self._large(kernels)
            self._compare(trace, calls, self._until(calls, elapsed_s))
        return duration_s, timed_calls(trace)

    def _until(self, calls: Sequence[ProfiledCollective], elapsed_s: float) -> float | None:
        """What the events measured; None if calls follow the step's last mark."""
        return None if any(call.launched_ns > self._marked_ns for call in calls) else elapsed_s

    def _next_mode(self) -> _Mode:
        if self._is_off:
            return _Mode.KINETO
        return _Mode.RING if self._is_trusted and self._num_since + 1 < CHECK_EVERY else _Mode.BOTH

    def _recorded(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def _large(self, calls: Sequence[ProfiledCollective]) -> list[ProfiledCollective]:
        """Those that are part of a step, and those of unknown size, which are like none."""
        return [call for call in calls if call.num_bytes is None or call.num_bytes >= self._least_bytes]

    def _ring_kernels(
        self, is_whole: Callable[[Sequence[ProfiledCollective]], bool]
    ) -> list[ProfiledCollective] | None:
        """What the ring says of the step, in the order of launch; None where it cannot be read: it is given up.

        It is waited for until it is whole, or nothing is under way any more.
        """
        try:
            return _kernels(self._recorder.end(lambda calls: is_whole(_kernels(calls))))
        except TableError as error:
            self._give_up(str(error))
            return None

    def _by_ring(self, elapsed_s: float) -> tuple[float, tuple[TimedCall, ...] | None]:
        """The step by the pattern; untimed if its calls are others."""
        assert self._reference is not None, "no pattern to tell by"
        reference = self._reference
        kernels = self._ring_kernels(lambda kernels: _in_order(reference.wires, self._large(kernels)) is not None)
        if kernels is None:
            return elapsed_s, None
        calls = self._large(kernels)
        ordered = _in_order(reference.wires, calls)
        if ordered is None:
            self._miss("steps made other calls than those before, or NCCL's profiler did not report all of them")
            return elapsed_s, None
        self._num_since += 1
        self._num_missed = 0
        return _replayed(reference, ordered, self._until(calls, elapsed_s))

    def _compare(self, trace: GpuTrace, calls: Sequence[ProfiledCollective], elapsed_s: float | None) -> None:
        """After a step under both: whether they agree on it, or, if it is of another sequence, its pattern.

        A pattern is kept: the setting that is tried now may leave no stream idle, and tell less.
        """
        length_s, before = step_length_s(trace), self._reference
        try:
            reference = _learned(pattern_of(trace, self._least_bytes), calls, length_s, elapsed_s)
        except TraceError as error:
            self._miss(str(error))
            return
        ordered = None if before is None else _in_order(before.wires, calls)
        if before is None or ordered is None or not is_same_sequence(before.pattern.seen, reference.pattern.seen):
            words = "their calls change from step to step"
            if self._is_trusted and self._num_missed < _ODD_STEPS:
                self._miss(words)
                return
            self._reference, self._is_trusted, self._num_since = reference, False, 0
            if before is not None:
                self._count_miss(words)
            return
        self._num_since = 0
        timed = reference.pattern.seen
        if self._noise is None:
            self._noise = _difference(before, (before.length_s, before.pattern.seen), (length_s, timed))
        off = _difference(before, _replayed(before, ordered, elapsed_s), (length_s, timed))
        most = max(self._noise, LEAST_DIFFERENCE)
        if off > most:
            self._give_up(f"they differ by {format_percent(off)} of a step, more than {format_percent(most)}")
            return
        if not self._is_trusted:
            _log.info("measured steps are timed by NCCL's profiler, one in %d by PyTorch's as well", CHECK_EVERY)
        self._is_trusted, self._num_missed = True, 0

    def _miss(self, why: str) -> None:
        """The step could not be told; one alone is forgotten, after more of them the next one is learned."""
        if self._num_missed >= _ODD_STEPS:
            self._reference, self._is_trusted = None, False
        self._count_miss(why)

    def _count_miss(self, why: str) -> None:
        self._num_missed += 1
        if self._num_missed >= MOST_MISSES:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self._is_off = True
        self._reference = None
        _log.warning("measured steps are timed by PyTorch's profiler, not by NCCL's: %s", why)


def _learned(
    pattern: StepPattern, calls: Sequence[ProfiledCollective], length_s: float, elapsed_s: float | None
) -> _Reference:
    """What later steps are told by; `calls` are the same step's by the ring.

    Raises:
        TraceError: if the two profilers saw different calls.
    """
    timed = pattern.seen
    wires = [(call.comm_id, call.kind, call.num_bytes or 0) for call in calls]
    ordered = _in_order(wires, calls)
    if ordered is None or [wire[1:] for wire in wires] != [(call.kind, call.num_bytes) for call in timed]:
        raise TraceError(f"it saw {len(calls)} collectives of a step, PyTorch's {len(timed)}, or others")
    first_ns = _start_ns(ordered[0])
    late = median(call.begun_s - (_start_ns(ring) - first_ns) * NS for call, ring in zip(timed, ordered, strict=True))
    return _Reference(
        pattern=pattern,
        wires=tuple(wires),
        keys=_keys(ordered),
        head_s=late,
        idle_s=0.0 if elapsed_s is None else elapsed_s - length_s,
        after_s=length_s - max(call.ended_s for call in timed),
        length_s=length_s,
    )


def _difference(
    reference: _Reference, one: tuple[float, Sequence[TimedCall]], other: tuple[float, Sequence[TimedCall]]
) -> float:
    """How far two views of steps are apart: of the groups' makespans, as a share of a step."""
    ours, theirs = (reference.makespans_s(calls, length_s) for length_s, calls in (one, other))
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(one[0], other[0])


def _keys(calls: Sequence[ProfiledCollective]) -> tuple[ConfigKey, ...]:
    counts: Counter[tuple[CommunicatorId, CollectiveKind, int]] = Counter()
    keys = []
    for call in calls:
        name = CommunicatorId(description=f"{call.comm_id:016x}", ranks=tuple(range(call.num_ranks)))
        site = (name, call.kind, call.num_bytes or 0)
        keys.append(ConfigKey(communicator=name, kind=site[1], num_bytes=site[2], occurrence=counts[site]))
        counts[site] += 1
    return tuple(keys)


def _kernels(calls: Sequence[ProfiledCollective]) -> list[ProfiledCollective]:
    """The calls in the order of launch, those of one kernel and kind as one."""
    members: dict[tuple[object, ...], list[ProfiledCollective]] = defaultdict(list)
    for place, call in enumerate(sorted(calls, key=lambda call: (call.launched_ns, call.call))):
        members[call.comm_id, call.kind, call.launch or -place - 1].append(call)
    return [_as_one(events) for events in members.values()]


def _as_one(calls: Sequence[ProfiledCollective]) -> ProfiledCollective:
    """All their bytes, from the first start to the last end, on the channels of one: they may have shared them."""
    if len(calls) == 1:
        return calls[0]
    starts = [call.start_ns for call in calls if call.start_ns is not None]
    ends = [call.end_ns for call in calls if call.end_ns is not None]
    sizes = [call.num_bytes for call in calls if call.num_bytes is not None]
    return replace(
        calls[0],
        num_bytes=sum(sizes) if len(sizes) == len(calls) else None,
        num_channels=max(call.num_channels or 0 for call in calls) or None,
        start_ns=min(starts, default=None),
        end_ns=max(ends, default=None),
        flags=reduce(or_, (call.flags for call in calls)),
    )


def _sized(trace: GpuTrace, kernels: Sequence[ProfiledCollective]) -> GpuTrace:
    """The trace with the sizes that it does not tell, if the ring has the same kernels; coalesced calls have none."""
    comms = [comm.call for comm in launched(trace) if comm.call.reach is KnobReach.TUNER]
    pairs = list(zip(comms, kernels, strict=False))
    alike = all(call.kind == ring.kind and call.num_bytes in (0, ring.num_bytes) for call, ring in pairs)
    if len(comms) != len(kernels) or not alike:
        return trace
    sizes = {call.event: ring.num_bytes or 0 for call, ring in pairs}
    calls = tuple(replace(call, num_bytes=sizes.get(call.event, call.num_bytes)) for call in trace.calls)
    return replace(trace, calls=calls)


def _in_order(wires: Sequence[_Wire], calls: Sequence[ProfiledCollective]) -> list[ProfiledCollective] | None:
    """The calls in the pattern's order, by communicator, kind and NCCL's number; None if they are not the pattern's."""
    queues: dict[tuple[int, CollectiveKind], list[ProfiledCollective]] = defaultdict(list)
    for call in sorted(calls, key=lambda call: call.call, reverse=True):
        queues[call.comm_id, call.kind].append(call)
    ordered = []
    for comm_id, kind, num_bytes in wires:
        queue = queues[comm_id, kind]
        if not queue or queue[-1].num_bytes != num_bytes or not _is_timed(queue[-1]):
            return None
        ordered.append(queue.pop())
    return ordered if len(ordered) == len(calls) else None


def _is_timed(call: ProfiledCollective) -> bool:
    """Whether it ended, and was launched by the program: a replayed graph's calls have no place in the host's order."""
    return call.duration_s is not None and ProfileFlag.CAPTURED not in call.flags


def _start_ns(call: ProfiledCollective) -> int:
    assert call.start_ns is not None, "a call that is not timed"
    return call.start_ns


def _replayed(
    reference: _Reference, calls: Sequence[ProfiledCollective], elapsed_s: float | None
) -> tuple[float, tuple[TimedCall, ...]]:
    """The step's length and its calls by the ring's times of them, in the pattern's order."""
    first_ns = _start_ns(calls[0])
    spans = []
    for call in calls:
        begun_s = max(0.0, reference.head_s + (_start_ns(call) - first_ns) * NS)
        spans.append(KernelSpan(begun_s, begun_s + (call.duration_s or 0.0), call.num_channels or 0))
    last_s = max(span.ended_s for span in spans)
    length_s = last_s + reference.after_s if elapsed_s is None else max(elapsed_s - reference.idle_s, last_s)
    return length_s, reference.pattern.replay(spans, length_s)
