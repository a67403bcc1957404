"""A bound of steps in which two independent chains begin: two microbatches, until one of them is at its backward pass.

Jackson's bound takes a resource for idle only if no task is released. But while two forward passes run that nothing
else can run beside, each a chain of computations and collectives, a resource idles whenever both chains are elsewhere.
How little that can be is known exactly: two chains are a job shop of two jobs, a shortest path (Akers 1956;
csrc/lagom_two_chains.c). What must run on a resource plus that idle time bounds every schedule of the uncut step.
"""

from collections.abc import Sequence

import numpy as np

from lagom_overlap.plan.schedule.graph import TaskGraph
from lagom_overlap.plan.schedule.library import library


def two_chain_bound(graph: TaskGraph) -> int:
    """No schedule of the graph is shorter than so many ticks; 0 if two chains neither begin nor end it.

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
