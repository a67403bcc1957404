"""The task graph of a planning problem."""

from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.resources import Resource, compute_stream, resource_of
from lagom_overlap.planners.schedule.graph import TaskGraph
from lagom_overlap.workload import Iteration

TICK_S: Final = 1e-7
"""0.1 us: operators of an accelerator take microseconds (spec, planners section 0.1)."""
RESOURCES: Final = tuple(Resource)
"""The resources of a graph in their order: computations are on the first."""


def task_graph(problem: PlanProblem, iteration: Iteration | None = None) -> TaskGraph:
    """The tasks of a problem's iteration, or of another one under the problem's times; without memory arcs.

    The other one may be rewritten, or hold the waits of a framework on top of its data flow.

    Raises:
        JobError: if a time is no positive number.
    """
    step = iteration or problem.iteration
    ops, compute = step.ops, compute_stream(step)
    place = {op.name: number for number, op in enumerate(ops)}
    ticks = []
    for op in ops:
        seconds = problem.times.seconds(op)
        if not 0 < seconds < float("inf"):
            raise JobError(f"{op.name}: time is {seconds} s, must be positive and finite")
        ticks.append(max(1, round(seconds / TICK_S)))
    return TaskGraph(
        names=tuple(place),
        ticks=tuple(ticks),
        resource=tuple(RESOURCES.index(resource_of(op, problem.cluster, problem.groups, compute)) for op in ops),
        preds=tuple(tuple(sorted({place[dep] for dep in op.deps})) for op in ops),
        resources=tuple(RESOURCES),
        tick_s=TICK_S,
    )
