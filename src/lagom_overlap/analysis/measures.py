"""Where the time of a rank went: exact to the nanosecond, per step and in all.

Over a window: span = busy + idle; communication = overlapped + exposed; overlapped is communication while at least one
kernel computes; exposed is communication while none does (a copy during it does not hide it). Copies and sets are
counted apart from computation. An idle gap is host-bound as far as the CPU had not yet begun to launch the event that
ends it.

Step windows. The profiler marks steps on the CPU, the GPU lags behind. The GPU's step k begins where the first kernel
launched in the CPU's step k starts after the main stream (the one that computes longest) has ended what was launched
before, and ends where step k+1 begins (the last one: at the trace's end), so that steps share nothing and leave nothing
out between the first and the last. A side stream may run ahead of the main one: that begins no step.
"""

from dataclasses import dataclass, fields

import numpy as np

from lagom_overlap.analysis.intervals import Intervals
from lagom_overlap.trace.gpu_trace import NO_TIME, UNKNOWN, EventRole, GpuEvents, GpuTrace, Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Lengths in nanoseconds; `memory_ns` are copies and sets, `host_bound_ns` is idle time that waits for the CPU."""

    span_ns: int
    compute_ns: int
    comm_ns: int
    memory_ns: int
    overlap_ns: int
    exposed_comm_ns: int
    idle_ns: int
    host_bound_ns: int

    @property
    def overlap_pct(self) -> float | None:
        """Overlapped communication per cent of communication; None without communication."""
        return 100 * self.overlap_ns / self.comm_ns if self.comm_ns else None

    @property
    def copies_alone_ns(self) -> int:
        """Copies and sets while nothing computes or communicates."""
        return self.span_ns - self.idle_ns - self.compute_ns - self.exposed_comm_ns

    def __add__(self, other: "Measures") -> "Measures":
        return Measures(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Measures)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasures:
    """One step's window on the GPU and its measures."""

    number: int
    start_ns: int
    end_ns: int
    measures: Measures


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupation:
    """The sets of time in which a rank computes, communicates, moves memory, does anything; and its host-bound gaps."""

    compute: Intervals
    comm: Intervals
    memory: Intervals
    overlap: Intervals
    busy: Intervals
    host_bound: Intervals

    def measures(self, start_ns: int, end_ns: int) -> Measures:
        """The measures of a window."""
        start, end = np.array([start_ns]), np.array([end_ns])
        inside = {name: int(getattr(self, name).within(start, end)[0]) for name in Occupation.__slots__}
        return Measures(
            span_ns=end_ns - start_ns,
            compute_ns=inside["compute"],
            comm_ns=inside["comm"],
            memory_ns=inside["memory"],
            overlap_ns=inside["overlap"],
            exposed_comm_ns=inside["comm"] - inside["overlap"],
            idle_ns=end_ns - start_ns - inside["busy"],
            host_bound_ns=inside["host_bound"],
        )


def _host_bound(events: GpuEvents, busy: Intervals) -> Intervals:
    """The part of each idle gap before the launch of the event that ends it began.

    Of several events that end a gap together, the first launched counts; one without a known launch, as if it had
    been launched in time.
    """
    gap_start, gap_end = busy.end_ns[:-1], busy.start_ns[1:]
    if not len(gap_start):
        return Intervals(gap_start, gap_end)
    first = np.searchsorted(events.start_ns, gap_end, side="left")
    last = np.searchsorted(events.start_ns, gap_end, side="right")
    launch = np.where(events.launch_ns == NO_TIME, gap_start.min(), events.launch_ns)
    inside = np.append(launch, NO_TIME)  # reduceat's ends must be indices too
    earliest = np.minimum.reduceat(inside, np.column_stack((first, last)).ravel())[::2]
    return Intervals.union(gap_start, np.clip(earliest, gap_start, gap_end))


def occupation_of(events: GpuEvents, *, knows_launches: bool = True) -> Occupation:
    """The sets of time of a rank; nothing is bound by the host where launches are not on the GPU's clock."""
    sets = {}
    for role in EventRole:
        rows = events.rows(role)
        sets[role] = Intervals.union(events.start_ns[rows], events.end_ns[rows])
    busy = Intervals.union(events.start_ns, events.end_ns)
    return Occupation(
        compute=sets[EventRole.COMPUTE],
        comm=sets[EventRole.COMM],
        memory=sets[EventRole.MEMORY],
        overlap=sets[EventRole.COMPUTE].intersect(sets[EventRole.COMM]),
        busy=busy,
        host_bound=_host_bound(events, busy) if knows_launches else busy.clip(0, 0),
    )


def whole(events: GpuEvents, occupation: Occupation) -> Measures:
    """The measures from the first event's start to the last one's end."""
    if not len(events):
        return occupation.measures(0, 0)
    return occupation.measures(int(events.start_ns[0]), int(events.end_ns.max()))


def step_of_events(trace: GpuTrace) -> Int64:
    """The index of the CPU step in which each event was launched; -1 before the first. Unknown launches: by start."""
    begins = np.array([step.start_ns for step in trace.steps], dtype=np.int64)
    at = np.where(trace.events.launch_ns == NO_TIME, trace.events.start_ns, trace.events.launch_ns)
    return (np.searchsorted(begins, at, side="right") - 1).astype(np.int64)


def _main_stream(events: GpuEvents) -> int:
    """The stream that computes longest; `UNKNOWN` where nothing computes."""
    rows = events.rows(EventRole.COMPUTE)
    if not len(rows):
        return UNKNOWN
    return int(np.argmax(np.bincount(events.stream[rows], (events.end_ns - events.start_ns)[rows].astype(np.float64))))


def marked_windows(trace: GpuTrace) -> tuple[tuple[int, int, int], ...]:
    """(number, start, end) of every step's window on the GPU; none where no step has GPU work.

    What was launched before the profiler looked is work of an earlier step and begins none: the GPU may be steps
    behind. Only where no launch at all is known do starts tell.
    """
    events = trace.events
    if not len(events):
        return ()
    last_end = int(events.end_ns.max())
    step = step_of_events(trace)
    works, known = events.memory_op == 0, events.launch_ns != NO_TIME
    if known.any():
        works = works & known
    main = np.flatnonzero((events.memory_op == 0) & (events.stream == _main_stream(events)))
    if known.any():  # what the main stream runs first without a launch was launched before the profiler looked
        step = np.where(
            np.cumsum(known & (events.stream == _main_stream(events))) == 0, np.where(known, step, -1), step
        )
    windows: list[tuple[int, int]] = []
    for index, cpu_step in enumerate(trace.steps):
        mine = works & (step == index)
        starts = events.start_ns[mine]
        if np.any(mine[main]):
            before = main[step[main] < index]
            starts = starts[starts >= (events.end_ns[before].max() if len(before) else starts[0])]
        if len(starts) and (not windows or starts[0] > windows[-1][1]):
            windows.append((cpu_step.number, int(starts[0])))
    ends = [*(start for _, start in windows[1:]), last_end][: len(windows)]
    return tuple((number, start, end) for (number, start), end in zip(windows, ends, strict=True))


def step_windows(trace: GpuTrace) -> tuple[tuple[int, int, int], ...]:
    """(number, start, end) of every step's window on the GPU; the whole trace as step 0 where no step has GPU work."""
    events = trace.events
    if not len(events):
        return ()
    return marked_windows(trace) or ((0, int(events.start_ns[0]), int(events.end_ns.max())),)


def step_measures(trace: GpuTrace, occupation: Occupation) -> tuple[StepMeasures, ...]:
    """The measures of every step."""
    return tuple(
        StepMeasures(number=number, start_ns=start, end_ns=end, measures=occupation.measures(start, end))
        for number, start, end in step_windows(trace)
    )
