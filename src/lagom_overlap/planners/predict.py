"""What an iteration is predicted to take: what planners, and plans that were edited, are judged by."""

from dataclasses import dataclass

from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.memory import peak_of
from lagom_overlap.planners.schedule import Schedule, ScheduleOverlap, TaskGraph, overlap_of, simulate, task_graph
from lagom_overlap.workload import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """An iteration on in-order streams, without contention."""

    graph: TaskGraph
    schedule: Schedule
    overlap: ScheduleOverlap
    peak_bytes: int


def predict(problem: PlanProblem, iteration: Iteration | None = None) -> Prediction:
    """The problem's iteration, or another one under its times, as it is issued: in its order, on its streams.

    Operators on one stream, and those on one resource, run one after the other.
    """
    issued = iteration or problem.iteration
    graph = task_graph(problem, issued)
    numbers: dict[str, int] = {}
    streams = [numbers.setdefault(op.stream, len(numbers)) for op in issued.ops]
    schedule = simulate(graph, range(len(graph)), streams)
    return Prediction(
        graph=graph,
        schedule=schedule,
        overlap=overlap_of(graph, schedule),
        peak_bytes=peak_of(issued, graph, schedule),
    )
