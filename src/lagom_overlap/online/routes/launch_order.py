"""The host's order of a profiled step: collectives, the computation's kernels, and what waits for what.

Kernels and waits are put into the order of the host by correlation id, so nothing here depends on how long they took.
What a stream has waited for passes on to whoever waits for that stream: FSDP2's copy-out stream between a collective
and the computation is no join of its own, and its copy-in stream no start.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lagom_overlap.trace.gpu_trace import ROLE_CODES, CommCall, EventRole, GpuTrace, StreamWait


@dataclass(frozen=True, slots=True)
class LaunchedCollective:
    """A collective of the step in the host's order, and the stream it runs on."""

    call: CommCall
    correlation: int
    stream: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Computation:
    """The kernels of the computation's stream in the host's order; `ends_ns[i]`: the last end of the first i + 1."""

    stream: str
    correlations: tuple[int, ...]
    ends_ns: tuple[int, ...]

    def reached_ns(self, correlation: int, origin_ns: int) -> int:
        """When all kernels that the host launched before had ended."""
        num_before = bisect_left(self.correlations, correlation)
        return self.ends_ns[num_before - 1] if num_before else origin_ns


@dataclass(frozen=True, slots=True)
class Start:
    """What a collective waits for before it can start, in the host's order.

    `computed`: the last place of the computation's stream, None if it waits for nothing there. `comms`: collectives on
    its own stream and on those that it waits for other than through the computation.
    """

    computed: int | None
    comms: tuple[int, ...]


def launched(trace: GpuTrace) -> list[LaunchedCollective]:
    """The collectives in the host's order."""
    events = trace.events
    kernels = [
        LaunchedCollective(
            call,
            int(events.correlation[call.event]),
            events.streams[int(events.stream[call.event])],
            int(events.start_ns[call.event]),
            int(events.end_ns[call.event]),
        )
        for call in trace.calls
    ]
    return sorted(kernels, key=lambda comm: comm.correlation)


def computation_of(trace: GpuTrace) -> Computation | None:
    """The stream with the most time of kernels that do not communicate."""
    events = trace.events
    rows = [row for row in range(len(events)) if events.role[row] != ROLE_CODES[EventRole.COMM]]
    busy_ns: dict[str, int] = defaultdict(int)
    for row in rows:
        if not events.memory_op[row]:
            busy_ns[events.streams[int(events.stream[row])]] += int(events.end_ns[row] - events.start_ns[row])
    if not busy_ns:
        return None
    stream = max(busy_ns, key=lambda name: (busy_ns[name], name))
    own = sorted(
        (int(events.correlation[row]), int(events.end_ns[row]))
        for row in rows
        if events.streams[int(events.stream[row])] == stream
    )
    ends = accumulate((end for _, end in own), max)
    return Computation(stream, tuple(correlation for correlation, _ in own), tuple(ends))


def is_ordered(trace: GpuTrace, comms: Sequence[LaunchedCollective], computation: Computation) -> bool:
    """Whether correlations tell the host's order of collectives, waits and the computation.

    All kernels of a replayed CUDA graph have the correlation of its launch. Where they only compute, the launch is one
    point of the host's order; of a collective among them it cannot be told what it ran beside.
    """
    if computation.correlations[0] <= 0:
        return False
    places = Counter(trace.events.correlation.tolist())
    places.update(wait.correlation for wait in trace.waits)
    own = [*(comm.correlation for comm in comms), *(wait.correlation for wait in trace.waits)]
    return all(place > 0 and places[place] == 1 for place in own)


def joins_of(comms: Sequence[LaunchedCollective], waits: Sequence[StreamWait], compute: str) -> Mapping[int, int]:
    """Correlation of a collective -> that of the wait with which the computation first depends on it.

    A collective on the computation's stream is its own join.
    """
    # What each stream depends on: the collective, and since which point of the host's order; points only grow.
    places: dict[str, dict[int, int]] = defaultdict(dict)
    logs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    # How much of one stream's log another has taken over: the next wait between the two goes on from there.
    num_taken: dict[tuple[str, str], int] = defaultdict(int)

    def depend(stream: str, comm: int, since: int) -> None:
        if comm not in places[stream]:
            places[stream][comm] = since
            logs[stream].append((comm, since))

    items: list[tuple[int, LaunchedCollective | StreamWait]] = [
        *((comm.correlation, comm) for comm in comms),
        *((wait.correlation, wait) for wait in waits),
    ]
    for place, item in sorted(items, key=lambda pair: pair[0]):
        if isinstance(item, LaunchedCollective):
            depend(item.stream, place, place)
        elif item.stream != item.waited_for:
            log, pair = logs[item.waited_for], (item.waited_for, item.stream)
            while num_taken[pair] < len(log) and log[num_taken[pair]][1] <= item.recorded:
                depend(item.stream, log[num_taken[pair]][0], place)
                num_taken[pair] += 1
    return places[compute]


def starts_of(comms: Sequence[LaunchedCollective], waits: Sequence[StreamWait], compute: str) -> Mapping[int, Start]:
    """Correlation of a collective -> what it waits for. One on the computation's stream waits for what is before it."""
    # Of each stream the latest place of every other stream that it depends on; a log of it, because a wait is for what
    # the other stream depended on when the event was recorded.
    clocks: dict[str, dict[str, int]] = defaultdict(dict)
    logs: dict[str, list[tuple[int, dict[str, int]]]] = defaultdict(list)
    starts: dict[int, Start] = {}
    items: list[tuple[int, LaunchedCollective | StreamWait]] = [
        *((comm.correlation, comm) for comm in comms),
        *((wait.correlation, wait) for wait in waits),
    ]
    for place, item in sorted(items, key=lambda pair: pair[0]):
        clock = clocks[item.stream]
        if isinstance(item, LaunchedCollective):
            if item.stream == compute:
                starts[place] = Start(place, ())
                continue
            starts[place] = Start(
                clock.get(compute), tuple(sorted(at for name, at in clock.items() if name != compute))
            )
            clock[item.stream] = place
        elif item.stream in (compute, item.waited_for):
            continue
        elif item.waited_for == compute:
            clock[compute] = max(clock.get(compute, 0), item.recorded)
        else:
            log = logs[item.waited_for]
            at = bisect_right(log, item.recorded, key=lambda entry: entry[0])
            for name, since in (log[at - 1][1] if at else {}).items():
                clock[name] = max(clock.get(name, 0), since)
        logs[item.stream].append((place, dict(clock)))
    return starts
