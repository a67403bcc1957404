"""Cuts of single operators into pieces: what they do to a graph, at once, and as rewrites.

A coarse operator cannot fill a short wait: that is why the preemptive bound is out of reach (spec, planners section
5.6). Operators of one type (the same place in every layer) are cut alike. The pieces are those of `workload.rewrite`:
where they add up, one waits for the other and the last is the result; where they lie side by side a join copies them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.plan.base import PlanProblem
from lagom_overlap.plan.exact import adds_numbers
from lagom_overlap.plan.resources import Resource
from lagom_overlap.plan.schedule.graph import TaskGraph
from lagom_overlap.plan.schedule.of_problem import RESOURCES, TICK_S
from lagom_overlap.workload import CommOp, CompOp, Iteration, Op, Reduce
from lagom_overlap.workload.rewrite.pieces import joined, piece
from lagom_overlap.workload.rewrite.steps import Split

FACTORS: Final = (2, 4, 8)
"""Numbers of pieces that are tried."""


@dataclass(frozen=True, slots=True)
class OpType:
    """Operators that are cut alike: numbers in program order, and the shard axis of each."""

    name: str
    tasks: tuple[int, ...]
    axes: tuple[int, ...]


def op_types(iteration: Iteration, *, exact: bool) -> tuple[OpType, ...]:
    """The types of operators that can be cut; with `exact` none whose reduction would run in another order.

    Preferred is an axis whose pieces are summed, since that needs no join.
    """
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for task, op in enumerate(iteration.ops):
        axis = _axis(op, exact)
        if axis is not None:
            found[_type_name(op)].append((task, axis))
    return tuple(
        OpType(name, tuple(task for task, _ in rows), tuple(axis for _, axis in rows)) for name, rows in found.items()
    )


def _type_name(op: Op) -> str:
    origin = op.origin
    module = re.sub(r"\d+", "*", origin.module or op.name)
    return f"{origin.phase} {module} {origin.kernel} {'comp' if isinstance(op, CompOp) else op.collective.kind}"


def _axis(op: Op, exact: bool) -> int | None:
    if op.shards is None or (exact and isinstance(op, CommOp) and adds_numbers(op)):
        return None
    finest = [gcd(size, FACTORS[-1]) for size in op.shards.sizes]
    fits = [axis for axis, parts in enumerate(finest) if parts >= FACTORS[0]]
    fits.sort(key=lambda axis: -finest[axis])
    summed = [axis for axis in fits if isinstance(op.shards.combine[axis], Reduce)]
    aside = [axis for axis in fits if axis not in summed]
    if isinstance(op, CompOp) and summed and not exact:
        return summed[0]
    return aside[0] if aside else None


class Cutter:
    """Cuts operators of a problem's graphs; prices of pieces are looked up once."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._ops = {op.name: op for op in problem.iteration.ops}
        self._followed = {dep for op in problem.iteration.ops for dep in op.deps}
        self._known: dict[tuple[str, int, int], tuple[tuple[int, ...], int]] = {}

    def pieces(self, op: Op, axis: int, num: int) -> tuple[tuple[int, ...], int]:
        """Ticks of the pieces, and of the join (0 if none is needed).

        Raises:
            JobError: if the operator cannot be cut so.
        """
        assert op.shards is not None, op.name
        key = (op.name, axis, num)
        if key not in self._known:
            seconds = self._problem.times.seconds
            parts = [piece(op, axis, (Fraction(k, num), Fraction(k + 1, num))) for k in range(num)]
            parts = [replace(part, name=f"{op.name}#{k}") for k, part in enumerate(parts)]
            needs_join = not isinstance(op.shards.combine[axis], Reduce) and op.name in self._followed
            join = joined(op, tuple(part.name for part in parts), op.stream)
            self._known[key] = (
                tuple(max(1, round(seconds(part) / TICK_S)) for part in parts),
                max(1, round(seconds(join) / TICK_S)) if needs_join else 0,
            )
        return self._known[key]

    def graph(self, graph: TaskGraph, cuts: Mapping[str, tuple[int, int]]) -> TaskGraph:
        """The graph with operators cut: name -> (axis, number of pieces); tasks in program order."""
        names: list[str] = []
        ticks: list[int] = []
        resource: list[int] = []
        preds: list[list[int]] = []
        result: dict[int, int] = {}
        waiting: list[tuple[int, int]] = []  # (new task, old task that it waits for)

        def add(name: str, length: int, on: int, before: Sequence[int] = ()) -> int:
            names.append(name)
            ticks.append(length)
            resource.append(on)
            preds.append(list(before))
            return len(names) - 1

        for task, name in enumerate(graph.names):
            if name not in cuts:
                result[task] = add(name, graph.ticks[task], graph.resource[task])
                waiting += [(result[task], pred) for pred in graph.preds[task]]
                continue
            op, (axis, num) = self._ops[name], cuts[name]
            lengths, join = self.pieces(op, axis, num)
            assert op.shards is not None, name
            summed = isinstance(op.shards.combine[axis], Reduce)
            parts: list[int] = []
            for number, length in enumerate(lengths):
                parts.append(add(f"{name}#{number}", length, graph.resource[task], parts[-1:] if summed else ()))
                waiting += [(parts[-1], pred) for pred in graph.preds[task]]
            result[task] = parts[-1]
            if join:
                result[task] = add(f"{name}#join", join, RESOURCES.index(Resource.COMPUTE), parts)
        for new, old in waiting:
            preds[new].append(result[old])
        return TaskGraph(
            names=tuple(names),
            ticks=tuple(ticks),
            resource=tuple(resource),
            preds=tuple(tuple(sorted(set(tasks))) for tasks in preds),
            resources=graph.resources,
            tick_s=graph.tick_s,
        )

    def can(self, kind: OpType, num: int) -> bool:
        """The operators of a type can be cut in so many pieces."""
        try:
            self.pieces(self._problem.iteration.ops[kind.tasks[0]], kind.axes[0], num)
        except JobError:
            return False
        return True


def cuts_of(iteration: Iteration, factors: Mapping[OpType, int]) -> dict[str, tuple[int, int]]:
    """Operators by name -> (axis, number of pieces)."""
    return {
        iteration.ops[task].name: (axis, factor)
        for kind, factor in factors.items()
        for task, axis in zip(kind.tasks, kind.axes, strict=True)
        if factor > 1
    }


def splits_of(cuts: Mapping[str, tuple[int, int]]) -> tuple[Split, ...]:
    """The cuts as rewrites."""
    return tuple(Split(name, axis, num) for name, (axis, num) in cuts.items())
