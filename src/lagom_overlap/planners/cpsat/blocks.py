"""Odd-even blocks (Concerto, ASPLOS 2025, section 4.4.2; spec, planners section 1.3).

The order of issue is cut in blocks of b consecutive tasks, at multiples of b in even rounds and half a block later in
odd ones; each block is solved, its order replaced.

Departures: the paper gives no b (50 was best of 50, 100, 200). Isolated blocks may make the whole order worse, so the
best order of all rounds is returned. `HEADS_TAILS` is not the paper's: a block knows when its surroundings are ready
for it and what follows, and no block makes the order worse.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Final

from lagom_overlap.planners.cpsat.no_overlap import Block, solve_block
from lagom_overlap.planners.cpsat.windows import Ordered, ordered_by_start, solve_window
from lagom_overlap.planners.deadline import OPERATOR_STEPS, Deadline
from lagom_overlap.planners.schedule.graph import TaskGraph
from lagom_overlap.planners.schedule.simulate import simulate

BLOCK_SIZE = 50
"""Tasks of a block."""
_BLOCK_S: Final = 1.0
"""For the solution of one block; a block without one keeps its order. Chosen, not measured."""


class BlockMode(StrEnum):
    """What a block knows of its surroundings."""

    ISOLATED = "isolated"
    HEADS_TAILS = "heads_tails"


def odd_even(
    graph: TaskGraph,
    order: Sequence[int],
    *,
    mode: BlockMode = BlockMode.ISOLATED,
    block_size: int = BLOCK_SIZE,
    num_rounds: int = 4,
    deadline: Deadline,
    seed: int = 0,
    on_round: Callable[[int], None] | None = None,
) -> tuple[int, ...]:
    """The best order of issue of all rounds, the first included; `on_round` is told each round's makespan (ticks)."""
    one_round = _isolated_round if mode is BlockMode.ISOLATED else _heads_tails_round
    current, best = list(order), list(order)
    shortest = simulate(graph, order).makespan
    for number in range(num_rounds):
        offset = 0 if number % 2 == 0 else block_size // 2
        cuts = [0, *range(offset or block_size, len(current), block_size), len(current)]
        current = one_round(graph, current, cuts, deadline=deadline, seed=seed + number)
        makespan = simulate(graph, current).makespan
        deadline.spend(OPERATOR_STEPS * len(graph))
        if on_round is not None:
            on_round(makespan)
        if makespan < shortest:
            best, shortest = current, makespan
        if deadline.left_s <= 0:
            break
    return tuple(best)


def _isolated_round(
    graph: TaskGraph, order: list[int], cuts: Sequence[int], *, deadline: Deadline, seed: int
) -> list[int]:
    placed: list[int] = []
    for begin, end in pairwise(cuts):
        tasks = order[begin:end]
        if deadline.left_s > 0 and len(tasks) > 1:
            hint, upper = _in_order(graph, tasks)
            block = Block(tasks=tuple(tasks), upper=upper, hint=hint)
            solved = solve_block(graph, block, deadline=deadline.within(_BLOCK_S), seed=seed)
            if solved is not None:
                tasks = ordered_by_start(graph, tasks, dict(solved.starts))
        placed += tasks
    return placed


def _in_order(graph: TaskGraph, tasks: Sequence[int]) -> tuple[dict[int, int], int]:
    """Starts of a block issued alone in its order, and its makespan."""
    free = [0] * len(graph.resources)
    ends: dict[int, int] = {}
    starts: dict[int, int] = {}
    for task in tasks:
        start = max([free[graph.resource[task]], *(ends[pred] for pred in graph.preds[task] if pred in ends)])
        starts[task] = start
        ends[task] = free[graph.resource[task]] = start + graph.ticks[task]
    return starts, max(free)


def _heads_tails_round(
    graph: TaskGraph, order: list[int], cuts: Sequence[int], *, deadline: Deadline, seed: int
) -> list[int]:
    ordered = Ordered.of(graph, order)
    for begin, end in pairwise(cuts):
        if deadline.left_s <= 0:
            break
        if end - begin > 1 and ordered.is_critical(begin, end):
            ordered = solve_window(ordered, begin, end, deadline=deadline.within(_BLOCK_S), seed=seed) or ordered
    return ordered.order
