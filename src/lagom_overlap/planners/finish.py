"""From an order of issue to a plan: extra waits, streams, the memory check, the bound."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.framework_waits import framework_arcs
from lagom_overlap.planners.memory import depth_arcs, limit_arcs, refuse_beyond
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import lower_bound, task_graph
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Reorder, Rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """How an iteration is issued: order of names, streams by name, extra waits (operator, earlier one)."""

    order: tuple[str, ...]
    streams: Mapping[str, str]
    waits: tuple[tuple[str, str], ...] = ()

    @property
    def rewrite(self) -> Reorder:
        """The same as a rewrite."""
        return Reorder(self.order, tuple(self.streams.items()), self.waits)


def order_by(iteration: Iteration, rank: Mapping[str, float], waits: Sequence[tuple[str, str]] = ()) -> tuple[str, ...]:
    """The topological order in which, of what may be issued, the lowest rank goes first; ties in program order.

    Raises:
        JobError: if the waits and the data flow go round in a circle.
    """
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    deps = {op.name: set(op.deps) for op in iteration.ops}
    for name, earlier in waits:
        deps[name].add(earlier)
    followers: dict[str, list[str]] = {name: [] for name in place}
    for name, needed in deps.items():
        for dep in needed:
            followers[dep].append(name)
    left = {name: len(needed) for name, needed in deps.items()}
    ready = [(rank.get(name, place[name]), place[name], name) for name, count in left.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        name = heapq.heappop(ready)[2]
        order.append(name)
        for follower in followers[name]:
            left[follower] -= 1
            if not left[follower]:
                heapq.heappush(ready, (rank.get(follower, place[follower]), place[follower], follower))
    if len(order) < len(place):
        stuck = next(name for name, count in left.items() if count)
        raise JobError(f"the plan's waits go round in a circle through {stuck!r}")
    return tuple(order)


def kept_waits(problem: PlanProblem, iteration: Iteration) -> tuple[tuple[str, str], ...]:
    """The waits that keep the framework's rules, the prefetch depth and the memory limit in a rewritten iteration.

    Raises:
        JobError: if nothing fits in the limit; says by how much.
    """
    arcs = framework_arcs(iteration) if problem.framework is not None else []
    if problem.prefetch is not None:
        arcs += depth_arcs(iteration, problem.prefetch)
    if problem.memory_limit_bytes is not None:
        arcs += limit_arcs(iteration, problem.memory_limit_bytes)
    return tuple(dict.fromkeys((target, source) for source, target in arcs))


def finished(
    problem: PlanProblem, planner: str, rewrites: Sequence[Rewrite], issue: Issue, notes: Sequence[str] = ()
) -> Plan:
    """The plan of rewrites and an order of issue.

    Raises:
        JobError: if it needs more memory than the limit; says by how much.
    """
    steps = (*rewrites, issue.rewrite)
    iteration = rewritten(problem.iteration, steps)
    graph = task_graph(problem)
    bound = lower_bound(graph)
    predicted = predict(problem, iteration)
    refuse_beyond(f"{planner}'s plan", predicted.peak_bytes, problem.memory_limit_bytes)
    return Plan(
        planner=planner,
        rewrites=steps,
        iteration=iteration,
        lower_bound_s=graph.seconds(bound),
        is_optimal=not rewrites and predicted.schedule.makespan == bound,
        notes=tuple(notes),
    )
