"""The task graph of a planning problem, and a schedule of it as a rewrite of the step."""

from collections import defaultdict
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.resources import Resource, compute_stream, resource_of
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph
from lagom_overlap.planners.schedule.simulate import decode
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.rewrite.steps import Reorder

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


def reorder_of(iteration: Iteration, graph: TaskGraph, schedule: Schedule) -> Reorder:
    """The order of issue that runs like the schedule; `graph` has the iteration's operators as tasks.

    Arcs of the graph that are no dependence of the iteration become waits.
    """
    order = tuple(graph.names[task] for task in decode(graph, schedule))
    waits = [
        (op.name, name)
        for op, preds in zip(iteration.ops, graph.preds, strict=True)
        for name in (graph.names[pred] for pred in preds)
        if name not in op.deps
    ]
    return Reorder(order, _moved(iteration, graph), tuple(waits))


def _moved(iteration: Iteration, graph: TaskGraph) -> tuple[tuple[str, str], ...]:
    """Operators that leave their stream, so that each resource has one of its own.

    A resource keeps the stream of its first operator unless an earlier resource has it; then it is named after the
    resource.
    """
    by_resource: dict[int, list[int]] = defaultdict(list)
    for task, resource in enumerate(graph.resource):
        by_resource[resource].append(task)
    taken: set[str] = set()
    moved: list[tuple[str, str]] = []
    for resource, tasks in sorted(by_resource.items()):
        stream = iteration.ops[tasks[0]].stream
        if stream in taken:
            stream = graph.resources[resource]
        taken.add(stream)
        moved += [(graph.names[task], stream) for task in tasks if iteration.ops[task].stream != stream]
    return tuple(moved)
