"""The choice among orders when times are uncertain: least regret under scaled communication.

Spec, planners section 5.9: noise of single operators is harmless, a common error of all collectives is not.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lagom_overlap.plan.schedule.bounds import lower_bound
from lagom_overlap.plan.schedule.graph import Schedule, TaskGraph
from lagom_overlap.plan.schedule.simulate import decode, simulate

COMM_SCALES: Final = (0.85, 1.0, 1.15)
"""Factors on the times of all communications under which an order is judged."""


def scaled(graph: TaskGraph, factor: float) -> TaskGraph:
    """The graph with the durations of all but the first resource's tasks multiplied."""
    ticks = [
        ticks if resource == 0 else max(1, round(ticks * factor))
        for ticks, resource in zip(graph.ticks, graph.resource, strict=True)
    ]
    return replace(graph, ticks=tuple(ticks))


def most_robust(graph: TaskGraph, schedules: Sequence[Schedule]) -> Schedule:
    """The schedule whose order has the least greatest makespan over lower bound under the scales."""
    graphs = [scaled(graph, factor) for factor in COMM_SCALES]
    bounds = [lower_bound(each) for each in graphs]

    def regret(schedule: Schedule) -> float:
        order = decode(graph, schedule)
        return max(simulate(each, order).makespan / bound for each, bound in zip(graphs, bounds, strict=True))

    return min(schedules, key=regret)
