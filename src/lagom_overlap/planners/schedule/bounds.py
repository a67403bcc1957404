"""Lower bounds of the makespan: the critical path and Jackson's preemptive one-machine bound of each resource.

Spec, planners section 0.5. The preemptive bound is not attainable where tasks are coarse (section 5.6), and no bound
sees contention.

Steps in which two independent chains begin (two microbatches, until one of them is at its backward pass) have a higher
bound. Jackson's takes a resource for idle only if no task is released. But while two forward passes run that nothing
else can overlap, each a chain of computations and collectives, a resource idles whenever both chains are elsewhere. How
little that can be is known exactly: two chains are a job shop of two jobs, a shortest path (Akers 1956;
csrc/lagom_two_chains.c). What must run on a resource plus that idle time bounds every schedule of the uncut step.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lagom_overlap.planners.schedule.graph import TaskGraph
from lagom_overlap.planners.schedule.library import library


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
    """No schedule of the graph is shorter than that many ticks."""
    return bounds_of(graph).best


def two_chain_bound(graph: TaskGraph) -> int:
    """No schedule of the graph is shorter than that many ticks; 0 if two chains neither begin nor end it.

    Takes seconds for chains of 5,000 tasks, and says 0 if they are much longer.
    """
    loads = np.bincount(graph.resource, weights=graph.ticks, minlength=len(graph.resources)).astype(np.int64)
    best = 0
    for preds, succs in ((graph.preds, graph.succs), (graph.succs, graph.preds)):
        idle = _least_idle(graph, preds, succs)
        if idle is not None:
            best = max(best, *(int(load) + int(gap) for load, gap in zip(loads, idle, strict=True) if load))
    return best


def _least_idle(graph: TaskGraph, preds: Sequence[Sequence[int]], succs: Sequence[Sequence[int]]) -> list[int] | None:
    """Ticks that each resource is idle at least until the first of two chains has ended; None if there are not two."""
    begins = [task for task, before in enumerate(preds) if not before]
    if len(begins) != 2:
        return None
    arguments: list[object] = []
    kept = []
    for task in begins:
        chain = [task]
        while len(succs[chain[-1]]) == 1 and len(preds[succs[chain[-1]][0]]) == 1:
            chain.append(succs[chain[-1]][0])
        ticks = np.array([graph.ticks[t] for t in chain], np.int64)
        resource = np.array([graph.resource[t] for t in chain], np.int32)
        kept.append((ticks, resource))
        arguments += [len(chain), ticks.ctypes.data, resource.ctypes.data]
    idle = np.zeros(len(graph.resources), np.int64)
    makespan = library().lls_two_chains(*arguments, len(idle), idle.ctypes.data)
    return [int(gap) for gap in idle] if makespan >= 0 else None
