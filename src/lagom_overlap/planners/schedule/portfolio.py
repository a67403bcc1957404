"""A portfolio of priorities: critical path and program order in several blends, each improved forward and backward.

Spec, planners section 5.3, tier T1. Which blend wins depends on the graph: critical path alone runs microbatches and
gathers far ahead, program order alone leaves gaps where a branch waits.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.schedule.bounds import tails
from lagom_overlap.planners.schedule.generation import Kind, ScheduleGeneration
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph
from lagom_overlap.planners.schedule.incumbent import Incumbent

_MEMBERS: Final[tuple[tuple[str, Kind, Kind, float], ...]] = (
    ("insertion, critical path", Kind.SERIAL, Kind.SERIAL, 0.0),
    ("lists, blend 0.1", Kind.PARALLEL, Kind.SERIAL, 0.1),
    ("lists both ways, blend 0.1", Kind.PARALLEL, Kind.PARALLEL, 0.1),
    ("insertion, blend 0.5", Kind.SERIAL, Kind.SERIAL, 0.5),
    ("lists, blend 0.5", Kind.PARALLEL, Kind.SERIAL, 0.5),
    ("insertion and lists, blend 0.3", Kind.SERIAL, Kind.PARALLEL, 0.3),
    ("lists, blend 0.8", Kind.PARALLEL, Kind.SERIAL, 0.8),
    ("insertion, blend 0.9", Kind.SERIAL, Kind.SERIAL, 0.9),
    ("insertion, program order", Kind.SERIAL, Kind.SERIAL, 1.0),
    ("lists, critical path", Kind.PARALLEL, Kind.SERIAL, 0.0),
    ("lists, program order", Kind.PARALLEL, Kind.SERIAL, 1.0),
)


def blended(graph: TaskGraph, after: Sequence[int], blend: float) -> NDArray[np.float64]:
    """Priorities between the critical path (0) and program order (1), both scaled to [0, 1]; `after` are the tails."""
    path = np.asarray(after, np.float64) + np.asarray(graph.ticks, np.float64)
    place = np.arange(len(graph)) / max(1, len(graph))
    priority: NDArray[np.float64] = blend * place - (1.0 - blend) * path / path.max(initial=1.0)
    return priority


def run_portfolio(
    graph: TaskGraph,
    incumbent: Incumbent,
    deadline: Deadline,
    *,
    max_rounds: int = 20,
    num_improved: int = len(_MEMBERS),
) -> list[Schedule]:
    """Offers each member's schedule, then improves them, the shortest first, until the target or the deadline.

    Members are made past the deadline too: all of them take less than making the graph did, and which of them is short
    depends on the graph. Returns what was made, the shortest first.
    """
    generation = ScheduleGeneration(graph)
    after = tails(graph)
    ranked: list[tuple[int, int, Schedule]] = []
    for number, (name, ahead, _, blend) in enumerate(_MEMBERS):
        schedule = generation.schedule(ahead, blended(graph, after, blend), deadline=deadline)
        incumbent.offer(schedule, name)
        ranked.append((schedule.makespan, number, schedule))
        if incumbent.is_reached:
            break
    ranked.sort(key=lambda entry: entry[:2])
    schedules = [schedule for _, _, schedule in ranked]
    for place, (_, number, schedule) in enumerate(ranked[:num_improved]):
        if incumbent.is_done or deadline.left_s <= 0:
            break
        name, ahead, back, _ = _MEMBERS[number]
        schedules[place] = generation.improved(
            schedule, (ahead, back), max_rounds=max_rounds, target=incumbent.target, deadline=deadline
        )
        incumbent.offer(schedules[place], f"{name}, improved")
    return sorted(schedules, key=lambda schedule: schedule.makespan)
