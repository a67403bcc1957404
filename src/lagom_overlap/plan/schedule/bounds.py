"""Lower bounds of the makespan: the critical path and Jackson's preemptive one-machine bound of each resource.

Spec, planners section 0.5. The preemptive bound is not attainable where tasks are coarse (section 5.6), and no bound
sees contention.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from lagom_overlap.plan.schedule.graph import TaskGraph


def heads(graph: TaskGraph) -> list[int]:
    """The longest path before each task (ticks): it cannot start earlier."""
    earliest = [0] * len(graph)
    for task in graph.topological:
        end = earliest[task] + graph.ticks[task]
        for succ in graph.succs[task]:
            earliest[succ] = max(earliest[succ], end)
    return earliest


def tails(graph: TaskGraph) -> list[int]:
    """The longest path after each task (ticks): so much passes after its end."""
    after = [0] * len(graph)
    for task in reversed(graph.topological):
        for succ in graph.succs[task]:
            after[task] = max(after[task], after[succ] + graph.ticks[succ])
    return after


def preemptive_one_machine(jobs: Iterable[tuple[int, int, int]]) -> int:
    """Jackson's preemptive schedule of jobs (head, ticks, tail) on one machine: the least max of end plus tail.

    At every moment the released job with the longest tail runs; O(n log n).
    """
    waiting = sorted(jobs)
    ready: list[list[int]] = []  # [-tail, ticks left]
    now = bound = place = 0
    while place < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[place][0])
        while place < len(waiting) and waiting[place][0] <= now:
            _, ticks, tail = waiting[place]
            heapq.heappush(ready, [-tail, ticks])
            place += 1
        job = ready[0]
        if place == len(waiting) or now + job[1] <= waiting[place][0]:
            now += job[1]
            bound = max(bound, now - job[0])
            heapq.heappop(ready)
        else:
            job[1] -= waiting[place][0] - now
            now = waiting[place][0]
    return bound


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds in ticks; `one_machine` has one per resource of the graph."""

    critical_path: int
    one_machine: tuple[int, ...]

    @property
    def best(self) -> int:
        """The greatest."""
        return max(self.critical_path, *self.one_machine)


def bounds_of(graph: TaskGraph) -> Bounds:
    """All lower bounds of a graph."""
    before, after = heads(graph), tails(graph)
    jobs: list[list[tuple[int, int, int]]] = [[] for _ in graph.resources]
    path = 0
    for task, (head, ticks, tail) in enumerate(zip(before, graph.ticks, after, strict=True)):
        jobs[graph.resource[task]].append((head, ticks, tail))
        path = max(path, head + ticks + tail)
    return Bounds(path, tuple(map(preemptive_one_machine, jobs)))


def lower_bound(graph: TaskGraph) -> int:
    """No schedule of the graph is shorter than so many ticks."""
    return bounds_of(graph).best
