"""Whose a wait is: of the window that waits, or of an earlier one whose collectives are still running.

A window can end while its collectives run on: nobody in it waits for them. Collectives issued later queue behind them,
and the time shows up where one of these is waited for. A search that makes the earlier ones slower must be told so,
or it takes from one group what another pays.
"""

from collections.abc import Sequence
from itertools import pairwise

from lagom_overlap.online.routes.base import CallRecord

Interval = tuple[float, float]
"""Begin and end of a wait, seconds since the step's begin."""


def waits_of(joins: Sequence[CallRecord], since_s: float) -> list[Interval]:
    """When the computation stood still for some calls, from a moment on; waiting for several at once counts once."""
    found: list[Interval] = []
    until_s = since_s
    for call in sorted(joins, key=lambda call: call.joined_s or 0.0):
        begin_s, end_s = max(call.joined_s or 0.0, until_s), call.resumed_s or 0.0
        if end_s > begin_s:
            found.append((begin_s, end_s))
            until_s = end_s
    return found


def owed_s(
    waits: Sequence[Sequence[Interval]], calls: Sequence[CallRecord], windows: Sequence[int]
) -> list[dict[int, float]]:
    """For each window, in order of the step, how long its waits were each window's.

    `windows[i]` is the window that call i belongs to. A moment in which none of the waiting window's own calls runs,
    but some of earlier windows', belongs to the earliest of these; every other one to the window itself.
    """
    order = sorted(range(len(calls)), key=lambda i: calls[i].begun_s)
    running: list[int] = []
    place = 0
    found: list[dict[int, float]] = []
    for window, intervals in enumerate(waits):
        owed: dict[int, float] = {}
        for begin_s, end_s in intervals:
            while place < len(order) and calls[order[place]].begun_s < end_s:
                running.append(order[place])
                place += 1
            running = [i for i in running if calls[i].ended_s > begin_s]
            edges = {time for i in running for time in (calls[i].begun_s, calls[i].ended_s) if begin_s < time < end_s}
            moments = [begin_s, *sorted(edges), end_s]
            for since_s, until_s in pairwise(moments):
                owners = [windows[i] for i in running if calls[i].begun_s <= since_s and calls[i].ended_s >= until_s]
                owner = window if window in owners else min([*owners, window])
                owed[owner] = owed.get(owner, 0.0) + until_s - since_s
        found.append(owed)
    return found
