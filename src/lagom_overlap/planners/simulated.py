"""The figure that people are shown of a step: simulated as it is issued, with contention where it is priced.

Planners search without contention (`predict`); no gain is offered on that. Every step, before and after a plan, is
simulated here by one event simulation (`sim.IterationSimulator`): streams run at the same time, what runs together
shares the machine, and a communicator runs one collective at a time, in the order of issue, whatever the stream.
Where collectives block the host (`PlanProblem.is_blocking`) nothing runs together: a step is the sum of its operators.
Of measured times contention is known where the ranks also ran collectives next to computations (`timeline_on_cores`);
else a step is simulated without, and says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Final

from lagom_overlap.collective import CommConfig
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.memory import peak_of_spans
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import TaskGraph, task_graph
from lagom_overlap.planners.times import ModelTimes, origin_name
from lagom_overlap.sim.iteration import timeline_of
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.timeline.metrics import merge_intervals
from lagom_overlap.workload import CommOp, Iteration, Op
from lagom_overlap.workload.streams import COMPUTE

NO_CONFIGS: Final[Mapping[str, CommConfig]] = MappingProxyType({})


class Simulation(StrEnum):
    """What a simulation knows of operators that run at the same time."""

    CONTENTION = "with contention"
    MEASURED = "with contention as measured"
    ALONE = "without contention"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """Who runs when, and the most bytes held (resident memory included).

    `makespan_s` are seconds of the step, `exposed_s` those in which the stream of computations stands still.
    """

    timeline: Timeline
    peak_bytes: int
    simulation: Simulation
    makespan_s: float
    exposed_s: float


def stands_still_s(timeline: Timeline) -> float:
    """Seconds in which the stream of computations stands still; copies on streams of their own do not count as work."""
    computing = timeline.of(SpanKind.COMP)
    own = [span for span in computing if span.stream == COMPUTE] or computing
    return timeline.makespan_s - sum(end - start for start, end in merge_intervals(own))


def simulation_of(problem: PlanProblem) -> Simulation:
    """With contention if the problem's times are the cost model's, or rates were measured."""
    if isinstance(problem.times, ModelTimes):
        return Simulation.CONTENTION
    return Simulation.MEASURED if problem.together else Simulation.ALONE


def simulated(
    problem: PlanProblem, iteration: Iteration, configs: Mapping[str, CommConfig] = NO_CONFIGS
) -> SimulatedPlan:
    """An iteration under a problem's times, in its order and on its streams; `configs` by name of its collectives.

    Raises:
        SpaceError: if a setting cannot run.
    """
    times = problem.times
    if isinstance(times, ModelTimes):
        own = {op.name: times.configs.get(origin_name(op.name, times.configs)) for op in iteration.comms}
        given = {name: config for name, config in own.items() if config is not None}
        simulator = times.price.simulator(one_at_a_time(iteration))
        timeline = simulator.timeline({**given, **configs})
    elif problem.is_blocking:
        timeline = _one_after_the_other(problem, iteration)
    elif problem.together:
        timeline = timeline_on_cores(iteration, task_graph(problem, iteration), problem.together)
    else:
        timeline = _alone(problem, iteration)
    spans = {span.name: (span.start_s, span.end_s) for span in timeline.spans}
    return SimulatedPlan(
        timeline=timeline,
        peak_bytes=peak_of_spans(iteration, spans),
        simulation=simulation_of(problem),
        makespan_s=timeline.makespan_s,
        exposed_s=stands_still_s(timeline),
    )


def one_at_a_time(iteration: Iteration) -> Iteration:
    """The iteration with every collective waiting for the one issued before it on its communicator."""
    last: dict[str, str] = {}

    def waiting(op: Op) -> Op:
        if not isinstance(op, CommOp):
            return op
        before = last.get(op.communicator)
        last[op.communicator] = op.name
        return op if before is None or before in op.deps else replace(op, deps=(*op.deps, before))

    return replace(iteration, ops=tuple(waiting(op) for op in iteration.ops))


def _one_after_the_other(problem: PlanProblem, iteration: Iteration) -> Timeline:
    ends = list(accumulate(problem.times.seconds(op) for op in iteration.ops))
    return timeline_of(iteration, [0.0, *ends[:-1]], ends)


def _alone(problem: PlanProblem, iteration: Iteration) -> Timeline:
    predicted = predict(problem, iteration)
    graph = predicted.graph
    starts = predicted.schedule.starts
    ends = [start + ticks for start, ticks in zip(starts, graph.ticks, strict=True)]
    return timeline_of(iteration, [graph.seconds(tick) for tick in starts], [graph.seconds(tick) for tick in ends])


def rate_of(name: str, rates: Mapping[str, float]) -> float:
    """The rate of a collective and of what computes next to it.

    A piece has its whole's, what was not measured the mean.
    """
    rate = rates.get(origin_name(name, rates))
    return sum(rates.values()) / len(rates) if rate is None else rate


def timeline_on_cores(iteration: Iteration, graph: TaskGraph, rates: Mapping[str, float]) -> Timeline:
    """The iteration on ranks whose collectives take time of the cores that compute: who runs when.

    `graph` holds its operators' times alone and their links. Operators wait for what they need, for their stream and
    for their link, in the order of issue. While a collective and a computation run, both progress at the measured rate,
    else at their own speed; several collectives slow a computation one by one.
    """
    waits = _waits(iteration, graph)
    followers: list[list[int]] = [[] for _ in waits]
    for task, needed in enumerate(waits):
        for before in needed:
            followers[before].append(task)
    shared = {number: rate_of(op.name, rates) for number, op in enumerate(iteration.ops) if isinstance(op, CommOp)}
    open_waits = [len(needed) for needed in waits]
    left_s = {task: graph.seconds(graph.ticks[task]) for task, count in enumerate(open_waits) if not count}
    starts, ends, now_s = dict.fromkeys(left_s, 0.0), {}, 0.0
    while left_s:
        carried = [shared[task] for task in left_s if task in shared]
        computes = len(carried) < len(left_s)
        slowed = prod(carried)
        rate = {task: (shared[task] if computes else 1.0) if task in shared else slowed for task in left_s}
        passed_s = min(seconds / rate[task] for task, seconds in left_s.items())
        now_s += passed_s
        done = [task for task, seconds in left_s.items() if seconds <= passed_s * rate[task] * (1.0 + 1e-9)]
        left_s = {task: seconds - passed_s * rate[task] for task, seconds in left_s.items() if task not in done}
        for task in done:
            ends[task] = now_s
            for follower in followers[task]:
                open_waits[follower] -= 1
                if not open_waits[follower]:
                    starts[follower] = now_s
                    left_s[follower] = graph.seconds(graph.ticks[follower])
    numbers = range(len(iteration.ops))
    return timeline_of(iteration, [starts[number] for number in numbers], [ends[number] for number in numbers])


def _waits(iteration: Iteration, graph: TaskGraph) -> list[set[int]]:
    """What each operator waits for: its inputs, and the one before it on its stream and on its resource."""
    last_of: dict[str | int, int] = {}
    waits = []
    for number, (op, preds, resource) in enumerate(zip(iteration.ops, graph.preds, graph.resource, strict=True)):
        before = {last_of[key] for key in (op.stream, resource) if key in last_of}
        waits.append({*preds, *before})
        last_of[op.stream] = last_of[resource] = number
    return waits
