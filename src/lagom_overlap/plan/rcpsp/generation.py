"""Serial schedule generation on renewable resources, and forward-backward improvement.

What is free of all resources in one period is one integer: a field per resource with a guard bit above it. A demand
fits if no guard bit is borrowed from: one subtraction and one mask per period, whatever the number of resources.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lagom_overlap.plan.rcpsp.project import Project


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A project in one direction, its demands packed; `free` is an empty period, `guard` the guard bits."""

    durations: tuple[int, ...]
    demands: tuple[int, ...]
    preds: tuple[tuple[int, ...], ...]
    succs: tuple[tuple[int, ...], ...]
    topological: tuple[int, ...]
    free: int
    guard: int
    horizon: int

    def reversed(self) -> "Packed":
        """The same project with time running backward."""
        return Packed(
            durations=self.durations,
            demands=self.demands,
            preds=self.succs,
            succs=self.preds,
            topological=self.topological[::-1],
            free=self.free,
            guard=self.guard,
            horizon=self.horizon,
        )


def packed(project: Project) -> Packed:
    """The project with its demands packed."""
    shifts, shift = [], 0
    for capacity in project.capacities:
        shifts.append(shift)
        shift += capacity.bit_length() + 1
    guard = sum(1 << at + c.bit_length() for at, c in zip(shifts, project.capacities, strict=True))
    return Packed(
        durations=project.durations,
        demands=tuple(sum(need << at for need, at in zip(row, shifts, strict=True)) for row in project.demands),
        preds=project.preds,
        succs=tuple(map(tuple, project.succs())),
        topological=tuple(project.topological()),
        free=guard + sum(c << at for at, c in zip(shifts, project.capacities, strict=True)),
        guard=guard,
        horizon=sum(project.durations) + max(project.durations) + 1,
    )


def serial(project: Packed, priority: Sequence[float]) -> list[int]:
    """Starts of the active schedule that takes activities in a topological order, the smallest priority first."""
    waits = [len(before) for before in project.preds]
    ready = [(priority[activity], activity) for activity, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        activity = heapq.heappop(ready)[1]
        order.append(activity)
        for succ in project.succs[activity]:
            waits[succ] -= 1
            if not waits[succ]:
                heapq.heappush(ready, (priority[succ], succ))
    return placed(project, order)


def placed(project: Packed, order: Sequence[int]) -> list[int]:
    """Starts if activities are placed in this topological order, each as early as what is placed allows."""
    durations, demands, preds, guard = project.durations, project.demands, project.preds, project.guard
    free = [project.free] * project.horizon
    ends = [0] * len(durations)
    for activity in order:
        duration, demand = durations[activity], demands[activity]
        period = 0
        for pred in preds[activity]:
            if ends[pred] > period:  # noqa: PLR1730 - the innermost loops, where a call of max costs
                period = ends[pred]
        end = period + duration
        if demand:
            while period < end:
                if (free[period] - demand) & guard != guard:
                    end = period + 1 + duration
                period += 1
            for period in range(end - duration, end):
                free[period] -= demand
        ends[activity] = end
    return [end - duration for end, duration in zip(ends, durations, strict=True)]


def makespan(project: Packed, starts: Sequence[int]) -> int:
    """The end of the last activity."""
    return max(start + duration for start, duration in zip(starts, project.durations, strict=True))


def justified(project: Packed, backward: Packed, starts: Sequence[int], max_rounds: int = 10) -> tuple[list[int], int]:
    """The best of forward-backward rounds from a schedule, and its makespan; `backward` is the project reversed."""
    best, shortest = list(starts), makespan(project, starts)
    current = best
    for _ in range(max_rounds):
        # Ties in topological order: an activity without duration ends where what it waits for does.
        ends_first = [-start - duration for start, duration in zip(current, project.durations, strict=True)]
        right = placed(backward, sorted(backward.topological, key=ends_first.__getitem__))
        length = makespan(project, right)
        latest = [length - start - duration for start, duration in zip(right, project.durations, strict=True)]
        current = placed(project, sorted(project.topological, key=latest.__getitem__))
        if makespan(project, current) >= shortest:
            break
        best, shortest = current, makespan(project, current)
    return best, shortest
