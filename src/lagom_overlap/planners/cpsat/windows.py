"""One window of an order of issue, solved with heads and tails: never worse than before (spec, planners section 1.3).

A task's head is the end of what it waits for before the window and the moment at which its stream is free; its tail is
the longest path behind it in the graph of arcs and streams, outside of the window. What minimises the greatest start +
duration + tail then minimises the makespan of the whole order with the rest of it kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.planners.cpsat.no_overlap import Block, solve_block
from lagom_overlap.planners.deadline import OPERATOR_STEPS, Deadline
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph
from lagom_overlap.planners.schedule.incumbent import Incumbent
from lagom_overlap.planners.schedule.simulate import decode, simulate


def stream_tails(graph: TaskGraph, order: Sequence[int]) -> list[int]:
    """The longest path behind each task in the graph of arcs and in-order streams (ticks)."""
    after = [0] * len(graph)
    behind = [0] * len(graph.resources)
    ticks, resource, succs = graph.ticks, graph.resource, graph.succs
    for task in reversed(order):
        longest = behind[resource[task]]
        for succ in succs[task]:
            longest = max(longest, after[succ] + ticks[succ])
        after[task] = longest
        behind[resource[task]] = longest + ticks[task]
    return after


@dataclass(slots=True)
class Ordered:
    """An order of issue with its schedule and the paths behind each task."""

    graph: TaskGraph
    order: list[int]
    schedule: Schedule
    after: list[int]

    @classmethod
    def of(cls, graph: TaskGraph, order: Sequence[int]) -> "Ordered":
        """The order with what follows from it."""
        return cls(graph, list(order), simulate(graph, order), stream_tails(graph, order))

    def is_critical(self, begin: int, end: int) -> bool:
        """A longest path runs through a task of this part of the order."""
        starts, ticks = self.schedule.starts, self.graph.ticks
        return any(starts[t] + ticks[t] + self.after[t] == self.schedule.makespan for t in self.order[begin:end])

    def block(self, begin: int, end: int) -> tuple[Block, int]:
        """The window as a block with times from its own start, and that start."""
        graph, starts, order = self.graph, self.schedule.starts, self.order
        tasks = order[begin:end]
        inside = set(tasks)
        free = self._free_before(begin)
        behind = self._needed_after(end)
        release, tails = {}, {}
        for task in tasks:
            ends = [starts[pred] + graph.ticks[pred] for pred in graph.preds[task] if pred not in inside]
            release[task] = max([free[graph.resource[task]], *ends])
            paths = [self.after[succ] + graph.ticks[succ] for succ in graph.succs[task] if succ not in inside]
            tails[task] = max([behind[graph.resource[task]], *paths])
        base, rest = min(release.values()), min(tails.values())
        block = Block(
            tasks=tuple(tasks),
            upper=self.schedule.makespan - base - rest,
            release={task: value - base for task, value in release.items()},
            tails={task: value - rest for task, value in tails.items()},
            hint={task: starts[task] - base for task in tasks},
        )
        return block, base

    def _free_before(self, begin: int) -> list[int]:
        free = [0] * len(self.graph.resources)
        left = set(range(len(free)))
        for place in range(begin - 1, -1, -1):
            task = self.order[place]
            if self.graph.resource[task] in left:
                left.remove(self.graph.resource[task])
                free[self.graph.resource[task]] = self.schedule.starts[task] + self.graph.ticks[task]
                if not left:
                    break
        return free

    def _needed_after(self, end: int) -> list[int]:
        needed = [0] * len(self.graph.resources)
        left = set(range(len(needed)))
        for place in range(end, len(self.order)):
            task = self.order[place]
            if self.graph.resource[task] in left:
                left.remove(self.graph.resource[task])
                needed[self.graph.resource[task]] = self.after[task] + self.graph.ticks[task]
                if not left:
                    break
        return needed


def solve_window(ordered: Ordered, begin: int, end: int, *, deadline: Deadline, seed: int = 0) -> Ordered | None:
    """The order with this part of it solved anew: as short or shorter, or None."""
    block, base = ordered.block(begin, end)
    solved = solve_block(ordered.graph, block, deadline=deadline, seed=seed)
    if solved is None:
        return None
    deadline.spend(OPERATOR_STEPS * len(ordered.order))
    order = list(ordered.order)
    order[begin:end] = ordered_by_start(ordered.graph, block.tasks, {t: s + base for t, s in solved.starts.items()})
    reordered = Ordered.of(ordered.graph, order)
    return reordered if reordered.schedule.makespan <= ordered.schedule.makespan else None


def ordered_by_start(graph: TaskGraph, tasks: Sequence[int], starts: dict[int, int]) -> list[int]:
    """Tasks by start, communications first, ties in the order given."""
    place = {task: number for number, task in enumerate(tasks)}
    return sorted(tasks, key=lambda task: (starts[task], graph.resource[task] == 0, place[task]))


_MAX_SIZE: Final = 150
"""Operators of the largest window. Chosen, not measured."""
_WINDOW_S: Final = 1.0
"""For the solution of one window. Chosen, not measured."""


def improve_by_windows(
    graph: TaskGraph,
    incumbent: Incumbent,
    *,
    size: int = 60,
    seed: int = 0,
) -> None:
    """Window after window over the whole order, until time is up or nothing is left to gain (tier T3).

    Rounds are offset by half a window; windows grow by half when two rounds brought nothing. Windows through which no
    longest path runs are left out.
    """
    ordered = Ordered.of(graph, decode(graph, incumbent.best))
    incumbent.offer(ordered.schedule, "decoded")
    offset, dull = 0, 0
    while not incumbent.is_done:
        before = ordered.schedule.makespan
        ordered = _one_round(ordered, incumbent, offset=offset, size=size, seed=seed)
        dull = 0 if ordered.schedule.makespan < before else dull + 1
        if dull >= 2 and size >= min(_MAX_SIZE, len(graph)):
            return
        if dull >= 2:
            size, dull = min(_MAX_SIZE, size * 3 // 2), 0
        offset = 0 if offset else size // 2
        seed += 1


def _one_round(ordered: Ordered, incumbent: Incumbent, *, offset: int, size: int, seed: int) -> Ordered:
    for begin in range(-offset, len(ordered.order), size):
        if incumbent.is_done:
            break
        first, last = max(0, begin), begin + size
        if not ordered.is_critical(first, last):
            continue
        solved = solve_window(ordered, first, last, deadline=incumbent.deadline.within(_WINDOW_S), seed=seed)
        if solved is not None:
            ordered = solved
            incumbent.offer(solved.schedule, f"windows of {size}")
    return ordered
