"""Schedule generation in plain Python: what the C library's schedules are compared with, task by task."""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A graph as generation walks it: along its arcs, or against them."""

    ticks: tuple[int, ...]
    resource: tuple[int, ...]
    preds: tuple[tuple[int, ...], ...]
    succs: tuple[tuple[int, ...], ...]
    num_resources: int

    @classmethod
    def forward(cls, graph: TaskGraph) -> "Side":
        """Along the arcs."""
        return cls(
            ticks=graph.ticks,
            resource=graph.resource,
            preds=graph.preds,
            succs=graph.succs,
            num_resources=len(graph.resources),
        )

    @classmethod
    def backward(cls, graph: TaskGraph) -> "Side":
        """Against the arcs."""
        return cls(
            ticks=graph.ticks,
            resource=graph.resource,
            preds=graph.succs,
            succs=graph.preds,
            num_resources=len(graph.resources),
        )


Generator = Callable[[Side, Sequence[float]], Schedule]
"""Makes a schedule from a priority per task; the smallest goes first."""


def _ranked(priority: Sequence[float]) -> tuple[list[int], list[int]]:
    """Tasks by (priority, number), and each task's place among them: heaps of places are heaps of plain integers."""
    by_rank = sorted(range(len(priority)), key=priority.__getitem__)
    rank = [0] * len(by_rank)
    for place, task in enumerate(by_rank):
        rank[task] = place
    return by_rank, rank


def parallel(side: Side, priority: Sequence[float]) -> Schedule:
    """The non-delay schedule: a free resource takes the most urgent task that is ready."""
    ticks, resource, succs = side.ticks, side.resource, side.succs
    by_rank, rank = _ranked(priority)
    waits = [len(preds) for preds in side.preds]
    starts = [0] * len(ticks)
    ready: list[list[int]] = [[] for _ in range(side.num_resources)]
    for task, count in enumerate(waits):
        if not count:
            ready[resource[task]].append(rank[task])
    for queue in ready:
        heapq.heapify(queue)
    busy = [False] * side.num_resources
    ends: list[tuple[int, int]] = []
    push, pop = heapq.heappush, heapq.heappop
    now = 0
    while True:
        for number, queue in enumerate(ready):
            if queue and not busy[number]:
                task = by_rank[pop(queue)]
                starts[task] = now
                busy[number] = True
                push(ends, (now + ticks[task], task))
        if not ends:
            return Schedule(tuple(starts), now)
        now = ends[0][0]
        while ends and ends[0][0] == now:
            task = pop(ends)[1]
            busy[resource[task]] = False
            for succ in succs[task]:
                waits[succ] -= 1
                if not waits[succ]:
                    push(ready[resource[succ]], rank[succ])


def serial(side: Side, priority: Sequence[float]) -> Schedule:
    """The active schedule: tasks in a topological order by priority, each into the earliest gap that it fits in."""
    ticks, resource, preds, succs = side.ticks, side.resource, side.preds, side.succs
    by_rank, rank = _ranked(priority)
    waits = [len(tasks) for tasks in preds]
    starts, ends = [0] * len(ticks), [0] * len(ticks)
    gap_starts: list[list[int]] = [[0] for _ in range(side.num_resources)]
    gap_ends: list[list[int]] = [[_NEVER] for _ in range(side.num_resources)]
    ready = [rank[task] for task, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    push, pop = heapq.heappush, heapq.heappop
    while ready:
        task = by_rank[pop(ready)]
        earliest, length = 0, ticks[task]
        for pred in preds[task]:
            if ends[pred] > earliest:  # noqa: PLR1730 - the innermost loop, where a call of max costs
                earliest = ends[pred]
        opens, closes = gap_starts[resource[task]], gap_ends[resource[task]]
        place = max(0, bisect_right(opens, earliest) - 1)
        while True:
            gap = opens[place]
            start = gap if gap > earliest else earliest
            if start + length <= closes[place]:
                break
            place += 1
        end = start + length
        starts[task], ends[task] = start, end
        close = closes[place]
        if start == gap:
            if end == close:
                del opens[place], closes[place]
            else:
                opens[place] = end
        else:
            closes[place] = start
            if end < close:
                opens.insert(place + 1, end)
                closes.insert(place + 1, close)
        for succ in succs[task]:
            waits[succ] -= 1
            if not waits[succ]:
                push(ready, rank[succ])
    return Schedule(tuple(starts), max(ends, default=0))


def improved(
    schedule: Schedule,
    forward: Side,
    backward: Side,
    *,
    generators: tuple[Generator, Generator] = (serial, serial),
    max_rounds: int = 20,
    target: int = 0,
    deadline: Deadline | None = None,
) -> Schedule:
    """The best of forward-backward rounds from a schedule; never worse than it.

    `generators` make the forward and the backward schedules. Rounds end after two without gain, at a makespan of
    `target` ticks, or at the deadline.
    """
    best = current = schedule
    without_gain = 0
    for _ in range(max_rounds):
        if best.makespan <= target or without_gain == 2 or (deadline is not None and deadline.left_s <= 0):
            break
        from_end = generators[1](
            backward, [-start - ticks for start, ticks in zip(current.starts, forward.ticks, strict=True)]
        )
        latest = [
            from_end.makespan - start - ticks for start, ticks in zip(from_end.starts, forward.ticks, strict=True)
        ]
        current = generators[0](forward, latest)
        if current.makespan < best.makespan:
            best, without_gain = current, 0
        else:
            without_gain += 1
    return best
