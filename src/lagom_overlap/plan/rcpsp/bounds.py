"""Lower bounds of every makespan of a project, without search."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.plan.rcpsp.project import Project

_NUM_HEADS: Final = 256
"""Moments from which work is counted, at most; each gives a bound, so that fewer are right too."""


def paths(project: Project) -> tuple[list[int], list[int]]:
    """The longest path before each activity, and that from its start to the end of the project."""
    heads, tails = [0] * len(project), [0] * len(project)
    order = project.topological()
    succs = project.succs()
    for activity in order:
        heads[activity] = max((heads[p] + project.durations[p] for p in project.preds[activity]), default=0)
    for activity in reversed(order):
        tails[activity] = project.durations[activity] + max((tails[s] for s in succs[activity]), default=0)
    return heads, tails


def lower_bound(project: Project) -> int:
    """The critical path, or what the work needs that lies between a common head and a common tail.

    Of activities with a head of at least h and at least t from their end to the end of the project, h + t + their work
    on a resource over its capacity, rounded up; the most over h, t and resources. With h = t = 0 it is the load.
    """
    heads, tails = paths(project)
    longest = max(head + tail for head, tail in zip(heads, tails, strict=True))
    after = np.array(tails) - np.array(project.durations)
    order = np.argsort(-after, kind="stable")
    head, after = np.array(heads)[order], after[order]
    moments = np.unique(head)
    moments = moments[:: -(-len(moments) // _NUM_HEADS)]
    bounds = [longest]
    for resource, capacity in enumerate(project.capacities):
        if not capacity:
            continue
        work, rate = _work(project, resource, capacity)
        for moment in moments:
            is_late = head >= moment
            total = np.cumsum(np.where(is_late, work[order], 0))
            bounds.append(int(np.max((moment + after - (-total // rate))[is_late])))
    return max(bounds)


def _work(project: Project, resource: int, capacity: int) -> tuple[NDArray[np.int64], int]:
    """Work of each activity and capacity, both coarser (work rounded down) if sums would not fit 64 bits."""
    shift = max(0, (capacity * (sum(project.durations) + 1)).bit_length() - 62)
    work = [
        duration * (row[resource] >> shift) for duration, row in zip(project.durations, project.demands, strict=True)
    ]
    return np.array(work, np.int64), -(-capacity >> shift)
