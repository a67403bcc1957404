"""Critical communications: those that nothing independent of them can hide (Concerto, section 4.5; spec, planners 1.5).

With P the ancestors, S the descendants and I the rest, communication D is critical iff

    (sum of T over computations in I) - (sum of T over communications in I) < T_D

The paper's text says "exceeds"; its formula and its Fig. 7 have "<", which is what makes sense.

Over a whole training step I is huge (later micro-batches, the optimizer), so that nothing is critical. Mended: I holds
only what can run while D can, whose window [head, bound - tail] meets D's.
"""

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.plan.schedule.bounds import heads, lower_bound, tails
from lagom_overlap.plan.schedule.graph import TaskGraph


class Independence(StrEnum):
    """Which operators may hide a communication: all that are independent of it, or those near it in time."""

    PRINTED = "printed"
    WINDOW = "window"


_AT_ONCE = 512
"""Communications whose ancestors and descendants are held in memory together."""


def critical_communications(graph: TaskGraph, which: Independence = Independence.WINDOW) -> frozenset[int]:
    """Tasks that are critical communications; the first resource is that of computations."""
    comms = [task for task in range(len(graph)) if graph.resource[task] != 0]
    ticks = np.array(graph.ticks, dtype=np.float64)
    signed = np.where(np.array(graph.resource) == 0, ticks, -ticks)
    begin = np.array(heads(graph), dtype=np.int64)
    end = lower_bound(graph) - np.array(tails(graph), dtype=np.int64)
    found: list[int] = []
    for first in range(0, len(comms), _AT_ONCE):
        block = comms[first : first + _AT_ONCE]
        independent = ~(_reached(graph, block, ahead=True) | _reached(graph, block, ahead=False))
        if which is Independence.WINDOW:
            independent &= (begin[:, None] < end[block][None, :]) & (begin[block][None, :] < end[:, None])
        slack = signed @ independent.astype(np.float64)
        found += [task for place, task in enumerate(block) if slack[place] < ticks[task]]
    return frozenset(found)


def _reached(graph: TaskGraph, comms: list[int], *, ahead: bool) -> NDArray[np.bool_]:
    """[task, communication]: whether the task follows the communication (`ahead`) or leads to it; itself included."""
    found = np.zeros((len(graph), len(comms)), dtype=np.bool_)
    for place, task in enumerate(comms):
        found[task, place] = True
    neighbours = graph.preds if ahead else graph.succs
    for task in graph.topological if ahead else reversed(graph.topological):
        for neighbour in neighbours[task]:
            found[task] |= found[neighbour]
    return found
