"""A portfolio of priorities: critical path and program order in several blends, each improved forward and backward.

Spec, planners section 5.3, tier T1. Which blend wins depends on the graph: critical path alone runs microbatches and
gathers far ahead, program order alone leaves gaps where a branch waits.
"""

from collections.abc import Sequence
from typing import Final

from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.schedule.bounds import tails
from lagom_overlap.plan.schedule.generation import Generator, Side, improved, parallel, serial
from lagom_overlap.plan.schedule.graph import Schedule, TaskGraph
from lagom_overlap.plan.schedule.incumbent import Incumbent

_MEMBERS: Final[tuple[tuple[str, Generator, Generator, float], ...]] = (
    ("insertion, critical path", serial, serial, 0.0),
    ("lists, blend 0.1", parallel, serial, 0.1),
    ("lists both ways, blend 0.1", parallel, parallel, 0.1),
    ("insertion, blend 0.5", serial, serial, 0.5),
    ("lists, blend 0.5", parallel, serial, 0.5),
    ("insertion and lists, blend 0.3", serial, parallel, 0.3),
    ("lists, blend 0.8", parallel, serial, 0.8),
    ("insertion, blend 0.9", serial, serial, 0.9),
    ("insertion, program order", serial, serial, 1.0),
    ("lists, critical path", parallel, serial, 0.0),
    ("lists, program order", parallel, serial, 1.0),
)


def blended(graph: TaskGraph, after: Sequence[int], blend: float) -> list[float]:
    """Priorities between the critical path (0) and program order (1), both scaled to [0, 1]; `after` are the tails."""
    longest = max((tail + ticks for tail, ticks in zip(after, graph.ticks, strict=True)), default=1)
    return [
        blend * task / len(graph) - (1.0 - blend) * (after[task] + ticks) / longest
        for task, ticks in enumerate(graph.ticks)
    ]


QUICK: Final = 4
"""So many members are the first of each kind: enough to compare variants of a graph."""


def run_portfolio(
    graph: TaskGraph,
    incumbent: Incumbent,
    deadline: Deadline,
    *,
    max_rounds: int = 20,
    num_members: int = len(_MEMBERS),
    num_improved: int = len(_MEMBERS),
) -> None:
    """Offers each member's schedule, then improves them, the shortest first, until the target or the deadline.

    The first is always made.
    """
    forward, backward = Side.forward(graph), Side.backward(graph)
    after = tails(graph)
    made: list[tuple[int, int, Schedule]] = []
    for number, (name, ahead, _, blend) in enumerate(_MEMBERS[:num_members]):
        schedule = ahead(forward, blended(graph, after, blend))
        incumbent.offer(schedule, name)
        if incumbent.is_done or deadline.left_s <= 0:
            return
        made.append((schedule.makespan, number, schedule))
    for _, number, schedule in sorted(made, key=lambda entry: entry[:2])[:num_improved]:
        name, ahead, back, _ = _MEMBERS[number]
        better = improved(
            schedule,
            forward,
            backward,
            generators=(ahead, back),
            max_rounds=max_rounds,
            target=incumbent.target,
            deadline=deadline,
        )
        incumbent.offer(better, f"{name}, improved")
        if incumbent.is_done or deadline.left_s <= 0:
            return
