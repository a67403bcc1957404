"""In-order streams, one per resource: what becomes of an order of issue; and the check of a schedule.

It is another thing than `sim.core`: durations are fixed whole ticks that nothing stretches, so that a planner's inner
search compares orders exactly and in C. What a plan takes under contention is said by the simulation.

Spec, planners section 0.4: a task starts once its stream is free and what it waits for has ended. Planners are judged
by this simulator, and schedules by `check`, which shares no code with what makes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph


def simulate(graph: TaskGraph, order: Sequence[int], streams: Sequence[int] | None = None) -> Schedule:
    """The schedule of an order of issue; `streams` numbers a stream per task where several share a resource.

    A stream starts its tasks in the order of issue, and so does a resource.

    Raises:
        ValueError: if the order is no topological order of all tasks: streams would wait for each other for ever.
    """
    starts = [-1] * len(graph)
    ends = [0] * len(graph)
    free = [0] * len(graph.resources)
    stream_free = [0] * (max(streams, default=-1) + 1 if streams else 0)
    for task in order:
        start = free[graph.resource[task]]
        if streams:
            start = max(start, stream_free[streams[task]])
        for pred in graph.preds[task]:
            if starts[pred] < 0:
                raise ValueError(f"{graph.names[task]!r} is issued before {graph.names[pred]!r}, which it waits for")
            start = max(start, ends[pred])
        if starts[task] >= 0:
            raise ValueError(f"{graph.names[task]!r} is issued twice")
        starts[task] = start
        ends[task] = free[graph.resource[task]] = start + graph.ticks[task]
        if streams:
            stream_free[streams[task]] = ends[task]
    if len(order) != len(graph):
        raise ValueError(f"the order issues {len(order)} of {len(graph)} tasks")
    return Schedule(tuple(starts), max(ends, default=0))


def decode(graph: TaskGraph, schedule: Schedule) -> tuple[int, ...]:
    """An order of issue that runs like the schedule or better (spec, planners section 1.4).

    By start; a communication that starts within a computation is issued before it: all SMs would be taken else. The
    first resource is that of computations.
    """
    starts, ticks = schedule.starts, graph.ticks
    place = {task: number for number, task in enumerate(graph.topological)}
    by_start = sorted(range(len(graph)), key=lambda task: (starts[task], graph.resource[task] == 0, place[task]))
    order: list[int] = []
    running: int | None = None  # the computation that still waits for communications within it
    for task in by_start:
        if graph.resource[task] != 0:
            if running is not None and starts[task] >= starts[running] + ticks[running]:
                order.append(running)
                running = None
            order.append(task)
            continue
        if running is not None:
            order.append(running)
        running = task
    if running is not None:
        order.append(running)
    return tuple(order)


def check(graph: TaskGraph, schedule: Schedule) -> None:
    """Passes if the schedule keeps every arc and runs one task at a time on each resource.

    Raises:
        ValueError: if it does not; names the tasks.
    """
    starts, names = schedule.starts, graph.names
    if len(starts) != len(graph):
        raise ValueError(f"the schedule has {len(starts)} of {len(graph)} tasks")
    for task, preds in enumerate(graph.preds):
        for pred in preds:
            if starts[pred] + graph.ticks[pred] > starts[task]:
                raise ValueError(f"{names[task]!r} starts before {names[pred]!r} has ended")
    for resource, name in enumerate(graph.resources):
        tasks = sorted((starts[t], t) for t in range(len(graph)) if graph.resource[t] == resource)
        if tasks and tasks[0][0] < 0:
            raise ValueError(f"{names[tasks[0][1]]!r} starts before time 0")
        for (start, task), (next_start, next_task) in pairwise(tasks):
            if start + graph.ticks[task] > next_start:
                raise ValueError(f"{names[task]!r} and {names[next_task]!r} overlap on {name}")
    last = max((start + ticks for start, ticks in zip(starts, graph.ticks, strict=True)), default=0)
    if last != schedule.makespan:
        raise ValueError(f"the last task ends at {last}, the schedule says {schedule.makespan}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOverlap:
    """How well a schedule hides communication (s): exposed time is the makespan less the busy time of computations."""

    makespan_s: float
    computation_s: float
    communication_s: float

    @property
    def exposed_s(self) -> float:
        """Time in which no computation runs."""
        return self.makespan_s - self.computation_s


def overlap_of(graph: TaskGraph, schedule: Schedule) -> ScheduleOverlap:
    """The overlap of a schedule; the first resource is that of computations."""
    busy = [0] * len(graph.resources)
    for resource, ticks in zip(graph.resource, graph.ticks, strict=True):
        busy[resource] += ticks
    return ScheduleOverlap(
        makespan_s=graph.seconds(schedule.makespan),
        computation_s=graph.seconds(busy[0]),
        communication_s=graph.seconds(sum(busy[1:])),
    )
