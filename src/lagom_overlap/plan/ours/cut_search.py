"""Which types of operators to cut, and in how many pieces: tried on a short version of the step.

First all promising types alike, then type by type: coordinate descent, in which a cut that does not pay is taken back.
"""

from collections.abc import Mapping
from typing import Final

from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.ours.contraction import short_version
from lagom_overlap.plan.ours.cuts import FACTORS, Cutter, OpType, cuts_of, op_types
from lagom_overlap.plan.schedule.bounds import heads, lower_bound, tails
from lagom_overlap.plan.schedule.graph import TaskGraph
from lagom_overlap.plan.schedule.incumbent import Incumbent
from lagom_overlap.plan.schedule.portfolio import QUICK, run_portfolio
from lagom_overlap.workload import Iteration

_MAX_TYPES: Final = 8
_LEAST_GAIN: Final = 0.0005
"""A cut that shortens the short version by less than this share is not made."""
_EVALUATION_S: Final = 0.4


def search_cuts(
    iteration: Iteration, graph: TaskGraph, cutter: Cutter, *, exact: bool, deadline: Deadline
) -> dict[str, tuple[int, int]]:
    """Operators to cut: name -> (axis, number of pieces); empty if no cut shortens the short version."""
    short, _ = short_version(iteration, graph)
    kinds = [kind for kind in _by_promise(iteration, graph, exact) if any(cutter.can(kind, n) for n in FACTORS)]
    if not kinds:
        return {}
    inside = set(short.names)
    bound = lower_bound(short)

    def makespan(factors: Mapping[OpType, int]) -> int:
        cuts = {name: cut for name, cut in cuts_of(iteration, factors).items() if name in inside}
        limit = deadline.within(_EVALUATION_S)
        incumbent = Incumbent(bound, limit)
        run_portfolio(cutter.graph(short, cuts), incumbent, limit, max_rounds=2, num_members=QUICK, num_improved=2)
        return incumbent.best.makespan

    factors: dict[OpType, int] = {}
    best = makespan(factors)
    for factor in FACTORS:
        alike = {kind: factor for kind in kinds if cutter.can(kind, factor)}
        tried = makespan(alike)
        if tried < best * (1.0 - _LEAST_GAIN):
            best, factors = tried, alike
    for _ in range(2):
        before = best
        for kind in kinds:
            for factor in (1, *FACTORS):
                if factor == factors.get(kind, 1) or (factor > 1 and not cutter.can(kind, factor)):
                    continue
                if deadline.left_s <= 0 or best <= bound:
                    return cuts_of(iteration, factors)
                tried = makespan({**factors, kind: factor})
                if tried < best * (1.0 - _LEAST_GAIN) or (factor == 1 and tried <= best):
                    best, factors = tried, {**factors, kind: factor}
        if best == before:
            break
    return cuts_of(iteration, factors)


def _by_promise(iteration: Iteration, graph: TaskGraph, exact: bool) -> list[OpType]:
    """The types with the longest operators that have time to spare; cutting a critical one only adds overhead."""
    before, after = heads(graph), tails(graph)
    path = max((h + t + a for h, t, a in zip(before, graph.ticks, after, strict=True)), default=0)

    def spare(kind: OpType) -> float:
        slack = sum(path - before[t] - graph.ticks[t] - after[t] for t in kind.tasks) / len(kind.tasks)
        return slack / path

    def weight(kind: OpType) -> int:
        return sum(graph.ticks[task] for task in kind.tasks)

    found = [kind for kind in op_types(iteration, exact=exact) if spare(kind) > 0.0]
    return sorted(found, key=weight, reverse=True)[:_MAX_TYPES]
