"""A schedule as a rewrite: the order of issue, a stream per resource, and the waits that memory arcs are."""

from collections import defaultdict

from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph
from lagom_overlap.planners.schedule.simulate import decode
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.rewrite.steps import Reorder


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
