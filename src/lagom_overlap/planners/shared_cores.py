"""A step on ranks whose collectives take time of the cores that compute: who runs when, at measured rates.

Operators wait for what they need, for their stream and for their link, in the order of issue. While a collective and a
computation run, both progress at the measured rate, else at their own speed; several collectives slow a computation one
by one.
"""

from collections.abc import Mapping
from math import prod

from lagom_overlap.planners.schedule import TaskGraph
from lagom_overlap.planners.times import origin_name
from lagom_overlap.sim.iteration import timeline_of
from lagom_overlap.timeline import Timeline
from lagom_overlap.workload import CommOp, Iteration


def rate_of(name: str, rates: Mapping[str, float]) -> float:
    """The rate of a collective and of what computes next to it.

    A piece has its whole's, what was not measured the mean.
    """
    rate = rates.get(origin_name(name, rates))
    return sum(rates.values()) / len(rates) if rate is None else rate


def timeline_on_cores(iteration: Iteration, graph: TaskGraph, rates: Mapping[str, float]) -> Timeline:
    """The iteration as it is issued; `graph` holds its operators' times alone and their links."""
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
