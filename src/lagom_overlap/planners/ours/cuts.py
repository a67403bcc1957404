"""Cuts of operators into pieces: what they do to a graph, at once, and as rewrites.

A coarse operator cannot fill a short wait: that is why the preemptive bound is out of reach (spec, planners section
5.6). A chain across a collective, cut along one dimension, is a pipeline: what makes its input, or reads its output,
runs during it (`chain_types`). Operators of one type (the same place in every layer) are cut alike. The pieces are
those of `workload.rewrite`, with a join that copies them where they lie side by side and adds them where they add up.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.exact import adds_numbers
from lagom_overlap.planners.resources import Resource
from lagom_overlap.planners.schedule.graph import TaskGraph
from lagom_overlap.planners.schedule.of_problem import RESOURCES, TICK_S
from lagom_overlap.workload import CommOp, CompOp, Iteration, Op, Reduce
from lagom_overlap.workload.rewrite.pieces import check_axis, joined, piece
from lagom_overlap.workload.rewrite.steps import ChainLink, Split

FACTORS: Final = (2, 4, 8)
"""Numbers of pieces that are tried."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How an operator is cut: in `num` pieces along a shard axis, together with operators `before` and `after` it."""

    axis: int
    num: int
    before: tuple[ChainLink, ...] = ()
    after: tuple[ChainLink, ...] = ()

    def axes(self, name: str) -> dict[str, int]:
        """The operators that are cut, `name` itself included, each with its axis."""
        return {link.op: link.axis for link in self.before} | {name: self.axis} | {k.op: k.axis for k in self.after}


@dataclass(frozen=True, slots=True, eq=False)
class OpType:
    """Operators that are cut alike: numbers in program order, and of each what a cut in one piece would be."""

    name: str
    tasks: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @property
    def is_chain(self) -> bool:
        """Others are cut with them."""
        return bool(self.cuts[0].before or self.cuts[0].after)


def op_types(iteration: Iteration, *, exact: bool) -> tuple[OpType, ...]:
    """The types of operators that can be cut; with `exact` none whose reduction would run in another order.

    Preferred is an axis whose pieces lie side by side: a copy costs less than additions. A program's products may all
    have one name: what can be cut in 8 and what can be cut in 4 are of two types.
    """
    types: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for task, op in enumerate(iteration.ops):
        axis = _axis(op, exact)
        if axis is not None:
            assert op.shards is not None, op.name
            types[f"{type_name(op)} in {gcd(op.shards.sizes[axis], FACTORS[-1])}"].append((task, axis))
    return tuple(
        OpType(name, tuple(task for task, _ in rows), tuple(Cut(axis, 1) for _, axis in rows))
        for name, rows in types.items()
    )


def type_name(op: Op) -> str:
    """Equal for the same place in every layer and microbatch."""
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
    if aside:
        return aside[0]
    return summed[0] if isinstance(op, CompOp) and summed and not exact else None


class Cutter:
    """Cuts operators of a problem's graphs; prices of pieces are looked up once."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._ops = {op.name: op for op in problem.iteration.ops}
        self._followers: dict[str, list[str]] = {name: [] for name in self._ops}
        for op in problem.iteration.ops:
            for dep in op.deps:
                self._followers[dep].append(op.name)
        self._pieces: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self._joins: dict[tuple[str, int], int] = {}
        self._can: dict[object, bool] = {}

    def pieces(self, name: str, axis: int, num: int) -> tuple[int, ...]:
        """Ticks of the pieces of an operator.

        Raises:
            JobError: if it cannot be cut so.
        """
        key = (name, axis, num)
        if key not in self._pieces:
            parts = [piece(self._ops[name], axis, (Fraction(k, num), Fraction(k + 1, num))) for k in range(num)]
            self._pieces[key] = tuple(
                self._ticks(replace(part, name=f"{name}#{number}")) for number, part in enumerate(parts)
            )
        return self._pieces[key]

    def _join(self, name: str, num_sums: int) -> int:
        """Ticks of what makes one of an operator's pieces: a copy, or additions where `num_sums` pieces add up."""
        if (name, num_sums) not in self._joins:
            op = self._ops[name]
            self._joins[name, num_sums] = self._ticks(joined(op, (), op.stream, num_sums=num_sums))
        return self._joins[name, num_sums]

    def _ticks(self, op: Op) -> int:
        return max(1, round(self._problem.times.seconds(op) / TICK_S))

    def gain(self, name: str, cut: Cut) -> int:
        """Ticks that two pieces hide of a collective, nothing else at work, less what pieces and joins take more."""
        axes = cut.axes(name)
        whole = {member: self._ticks(self._ops[member]) for member in axes}
        more = {member: sum(self.pieces(member, axis, 2)) - whole[member] for member, axis in axes.items()}
        # Nothing is summed in a chain (`context`).
        joins = sum(self._join(member, 0) for member in axes if not axes.keys() >= set(self._followers[member]))
        beside = sum(whole.values()) - whole[name]
        return min(whole[name], beside) // 2 - sum(more.values()) - joins

    def _is_summed(self, name: str, axis: int) -> bool:
        shards = self._ops[name].shards
        assert shards is not None, name
        return isinstance(shards.combine[axis], Reduce)

    def graph(self, graph: TaskGraph, cuts: Mapping[str, Cut]) -> TaskGraph:
        """The graph with operators cut, by name; tasks in program order."""
        chain_of = {member: name for name, cut in cuts.items() for member in cut.axes(name)}
        axis_of = {member: axis for name, cut in cuts.items() for member, axis in cut.axes(name).items()}
        drawing = _Drawing()
        for task, name in enumerate(graph.names):
            chain = chain_of.get(name)
            if chain is None:
                drawing.parts[task] = [drawing.add(name, graph.ticks[task], graph.resource[task])]
                drawing.waiting += [(drawing.parts[task][0], pred, None) for pred in graph.preds[task]]
                continue
            axis, parts = axis_of[name], drawing.parts.setdefault(task, [])
            num = cuts[chain].num
            num_sums = num if self._is_summed(name, axis) else 0
            for number, length in enumerate(self.pieces(name, axis, num)):
                parts.append(drawing.add(f"{name}#{number}", length, graph.resource[task]))
                for pred in graph.preds[task]:
                    beside = number if chain_of.get(graph.names[pred]) == chain else None
                    drawing.waiting.append((parts[-1], pred, beside))
            if num_sums or any(chain_of.get(follower) != chain for follower in self._followers[name]):
                on = RESOURCES.index(Resource.COMPUTE)
                drawing.join[task] = drawing.add(f"{name}#join", self._join(name, num_sums), on, parts)
        return drawing.graph(graph)

    def can(self, kind: OpType, num: int) -> bool:
        """All operators of a type can be cut in that many pieces."""
        ops = self._problem.iteration.ops
        return all(self.can_cut(ops[task].name, cut, num) for task, cut in zip(kind.tasks, kind.cuts, strict=True))

    def can_cut(self, name: str, cut: Cut, num: int) -> bool:
        """An operator can be cut in that many pieces, with those that are cut with it."""
        return all(self._has_pieces(member, axis, num) for member, axis in cut.axes(name).items())

    def _has_pieces(self, name: str, axis: int, num: int) -> bool:
        op = self._ops[name]
        what = op.collective if isinstance(op, CommOp) else op.work
        axes = None if op.shards is None else (op.shards.sizes, op.shards.combine, op.shards.inputs[:1])
        key = (what, axes, axis, num)
        if key not in self._can:
            try:
                check_axis(op, axis, (Fraction(1, num),) * num)
                self.pieces(name, axis, num)
                self._can[key] = True
            except JobError:
                self._can[key] = False
        return self._can[key]

    def can_any(self, kind: OpType) -> bool:
        """They can be cut in some number of pieces."""
        return any(self.can(kind, num) for num in FACTORS)


class _Drawing:
    """A graph in the making: per task of the old one its parts, and the join of them where there is one."""

    def __init__(self) -> None:
        self.parts: dict[int, list[int]] = {}
        self.join: dict[int, int] = {}
        self.waiting: list[tuple[int, int, int | None]] = []  # new task, old one it waits for, which part (None: whole)
        self._names: list[str] = []
        self._ticks: list[int] = []
        self._resource: list[int] = []
        self._preds: list[list[int]] = []

    def add(self, name: str, ticks: int, resource: int, preds: Sequence[int] = ()) -> int:
        """The number of a new task."""
        self._names.append(name)
        self._ticks.append(ticks)
        self._resource.append(resource)
        self._preds.append(list(preds))
        return len(self._names) - 1

    def graph(self, old: TaskGraph) -> TaskGraph:
        """What was drawn; a whole task is its join, or else its last part."""
        for new, pred, part in self.waiting:
            whole = self.join.get(pred, self.parts[pred][-1])
            self._preds[new].append(whole if part is None else self.parts[pred][part])
        return TaskGraph(
            names=tuple(self._names),
            ticks=tuple(self._ticks),
            resource=tuple(self._resource),
            preds=tuple(tuple(sorted(set(tasks))) for tasks in self._preds),
            resources=old.resources,
            tick_s=old.tick_s,
        )


def cuts_of(iteration: Iteration, factors: Mapping[OpType, int]) -> dict[str, Cut]:
    """Operators by name, each with its cut; chains first, and what a chain has is not cut again."""
    cuts: dict[str, Cut] = {}
    taken: set[str] = set()
    for kind, factor in sorted(factors.items(), key=lambda item: not item[0].is_chain):
        if factor < 2:
            continue
        for task, cut in zip(kind.tasks, kind.cuts, strict=True):
            name = iteration.ops[task].name
            members = cut.axes(name).keys()
            if taken.isdisjoint(members):
                taken |= members
                cuts[name] = replace(cut, num=factor)
    return cuts


def splits_of(cuts: Mapping[str, Cut]) -> tuple[Split, ...]:
    """The cuts as rewrites."""
    return tuple(Split(name, cut.axis, cut.num, cut.before, cut.after) for name, cut in cuts.items())
