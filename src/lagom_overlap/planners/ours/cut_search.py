"""Which types of operators to cut, and in how many pieces: tried on a short version of the step.

First single operators, then chains next to them: all promising types alike, then type by type, a coordinate descent in
which a cut that does not pay is taken back. The best few are tried on the whole step: the short version is not it.

The short version of a graph has a few layers of the first microbatches. Tasks that are left out hand on what they wait
for, so that the layers kept follow each other as the whole ones do.

A cut across a collective cuts what makes its input, or reads its output, with it into pieces that follow each other.
The chains are those of Concerto and Centauri (`planners.context`; spec, planners sections 1.6 and 2.3), as long as it
takes to cover the collective. Which of them pay is decided with the cuts of single operators, by schedules.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.context import context_of, divisible
from lagom_overlap.planners.deadline import OPERATOR_STEPS, Deadline
from lagom_overlap.planners.exact import adds_numbers
from lagom_overlap.planners.ours.cuts import FACTORS, Cut, Cutter, OpType, cuts_of, op_types, type_name
from lagom_overlap.planners.schedule.bounds import heads, lower_bound, tails
from lagom_overlap.planners.schedule.graph import TaskGraph
from lagom_overlap.planners.schedule.incumbent import Incumbent
from lagom_overlap.planners.schedule.portfolio import run_portfolio
from lagom_overlap.planners.schedule.window_search import WindowSearch
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Gather, Gemm, Iteration
from lagom_overlap.workload.rewrite.steps import ChainLink

_MAX_CHAIN_TYPES: Final = 8
"""Types of collectives whose cuts through neighbours are tried. Bounds the search."""


def chain_types(problem: PlanProblem, cutter: Cutter) -> tuple[OpType, ...]:
    """Collectives with the chain before them or after them: those where two pieces hide the most, all layers together.

    Per side of a collective the whole chain, or that up to the first product, whichever hides more.
    """
    index = StepIndex(problem.iteration)
    types: dict[str, list[tuple[int, Cut]]] = defaultdict(list)
    for task, op in enumerate(problem.iteration.ops):
        if not isinstance(op, CommOp) or (problem.exact and adds_numbers(op)):
            continue
        for cut in _cuts(problem, index, op):
            if not cutter.can_cut(op.name, cut, FACTORS[0]):
                continue
            side = "before" if cut.before else "after"
            name = f"{type_name(op)} {side}, {cut.axis}, {len(cut.before) + len(cut.after)}"
            types[name].append((task, cut))
    gains = {name: len(rows) * _gain(problem, cutter, *rows[len(rows) // 2]) for name, rows in types.items()}
    best: dict[str, str] = {}
    for name in sorted(types, key=lambda name: -gains[name]):
        best.setdefault(name.rpartition(", ")[0], name)
    return tuple(
        OpType(name, tuple(task for task, _ in types[name]), tuple(cut for _, cut in types[name]))
        for name in list(best.values())[:_MAX_CHAIN_TYPES]
        if gains[name] > 0
    )


def _gain(problem: PlanProblem, cutter: Cutter, task: int, cut: Cut) -> int:
    return cutter.gain(problem.iteration.ops[task].name, cut)


def _cuts(problem: PlanProblem, index: StepIndex, op: CommOp) -> list[Cut]:
    """Per side the cuts along the first axis that has a chain."""
    shards, seconds = op.shards, problem.times.seconds
    cuts_by_place: dict[str, list[Cut]] = {}
    for axis, combine in enumerate(shards.combine if shards is not None else ()):
        assert shards is not None, op.name
        if not isinstance(combine, Gather) or len(cuts_by_place) == 2 or shards.sizes[axis] % FACTORS[0]:
            continue
        context = context_of(index, op, axis, seconds, seconds(op))
        before = divisible(index, context.before, FACTORS[0], from_end=True)
        after = divisible(index, context.after, FACTORS[0], from_end=False)
        if before:
            cuts_by_place.setdefault(
                "before", [Cut(axis, 1, before=links) for links in _long_and_short(index, before, True)]
            )
        if after:
            cuts_by_place.setdefault(
                "after", [Cut(axis, 1, after=links) for links in _long_and_short(index, after, False)]
            )
    return [cut for cuts in cuts_by_place.values() for cut in cuts]


def _long_and_short(index: StepIndex, links: tuple[ChainLink, ...], from_end: bool) -> list[tuple[ChainLink, ...]]:
    """All links, and those next to the collective up to the first product, if they are fewer."""
    outward = links[::-1] if from_end else links
    for number, link in enumerate(outward[:-1], 1):
        op = index.ops[link.op]
        if isinstance(op, CompOp) and isinstance(op.work, Gemm):
            short = outward[:number]
            return [links, short[::-1] if from_end else short]
    return [links]


MAX_LAYERS: Final = 8
"""Layers of the shortened step in which cuts are compared; the best are tried on the whole one."""
NUM_MICROBATCHES: Final = 3
"""The same of micro-batches."""
ENOUGH_TASKS: Final = 2000
"""Layers beyond those that make this many tasks are left out, but for two."""


def contracted(graph: TaskGraph, keep: Collection[int]) -> tuple[TaskGraph, tuple[int, ...]]:
    """The graph of the tasks kept, in program order, and their numbers in the whole one."""
    kept = tuple(sorted(keep))
    inside = set(kept)
    place = {task: number for number, task in enumerate(kept)}
    ahead: dict[int, frozenset[int]] = {}  # of a task left out: the last tasks kept before it
    preds: dict[int, frozenset[int]] = {}
    for task in graph.topological:
        tasks: set[int] = set()
        for pred in graph.preds[task]:
            tasks |= {pred} if pred in inside else ahead[pred]
        (preds if task in inside else ahead)[task] = frozenset(tasks)
    short = TaskGraph(
        names=tuple(graph.names[task] for task in kept),
        ticks=tuple(graph.ticks[task] for task in kept),
        resource=tuple(graph.resource[task] for task in kept),
        preds=tuple(tuple(sorted(place[pred] for pred in preds[task])) for task in kept),
        resources=graph.resources,
        tick_s=graph.tick_s,
    )
    return short, kept


def short_version(iteration: Iteration, graph: TaskGraph) -> tuple[TaskGraph, tuple[int, ...]]:
    """The first layers and microbatches of a graph, with everything that belongs to no layer but computes."""
    sizes = Counter(op.origin.layer for op in iteration.ops if op.origin.microbatch < NUM_MICROBATCHES)
    layers: list[int] = []
    for layer in sorted(layer for layer in sizes if layer is not None)[:MAX_LAYERS]:
        if len(layers) < 2 or sum(sizes[known] for known in layers) < ENOUGH_TASKS:
            layers.append(layer)
    keep = [
        task
        for task, op in enumerate(iteration.ops)
        if op.origin.microbatch < NUM_MICROBATCHES and (op.origin.layer is None or op.origin.layer in layers)
    ]
    return contracted(graph, keep)


_MAX_TYPES: Final = 8
"""Types of operators whose cuts are tried, those that promise most first. Bounds the search."""
_LEAST_GAIN: Final = 0.0005
"""A cut that shortens the short version by less than this share is not made."""
_NUM_WHOLE: Final = 2
"""This many of the best on the short version are tried on the whole step, besides the uncut one."""
_NUM_IMPROVED: Final = 3
"""Orders that a trial improves; the whole search improves more."""
_SINGLES_SHARE: Final = 0.4
"""Of the time for cuts: single operators first, which alone are worth the most."""
_CHAINS_SHARE: Final = 0.4
"""Of the time left that chains of cuts may take before single ones are tried."""
_WINDOW: Final = 120
"""Operators of a window in a trial: smaller than in the search, because a trial only compares."""
_NUM_TRIES: Final = 20
"""Windows that a trial of a chain, or of the whole step, tries to shorten."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """Factors by type and the makespan (ticks) they lead to."""

    makespan: int
    factors: Mapping[OpType, int]


def search_cuts(problem: PlanProblem, graph: TaskGraph, cutter: Cutter, *, deadline: Deadline) -> dict[str, Cut]:
    """Operators to cut, by name; empty if no cut shortens the short version."""
    iteration = problem.iteration
    singles = [kind for kind in _by_promise(iteration, graph, problem.exact) if cutter.can_any(kind)]
    chains = [kind for kind in chain_types(problem, cutter) if cutter.can_any(kind)]
    if not singles and not chains:
        return {}
    short, _ = short_version(iteration, graph)
    trial = _Trial(iteration, short, cutter)
    alone = _descended(trial, singles, cutter, {}, deadline.within(_SINGLES_SHARE * deadline.left_s))
    trial = _Trial(iteration, short, cutter, num_tries=_NUM_TRIES)
    begun_s = deadline.left_s
    trial.makespan({}, deadline)
    taken_s = (begun_s - deadline.left_s) * len(graph) / len(short)  # what a trial of the whole step takes, about
    base = alone[0].factors
    chained = _descended(trial, chains, cutter, base, deadline.within(_CHAINS_SHARE * deadline.left_s))
    better = [*_shorter(alone, {})[:_NUM_WHOLE], *_shorter(chained, base)[:1]]
    if not better or len(short) == len(graph):
        return cuts_of(iteration, better[-1].factors) if better else {}
    whole = _Trial(iteration, graph, cutter, num_tries=_NUM_TRIES)
    gains: list[tuple[int, int]] = []
    tries = [one.factors for one in (better[-1], better[0], _Tried(0, {}), *better[1:-1])]
    for number, factors in enumerate(tries):
        begun_s = deadline.left_s
        if begun_s < taken_s:  # no time for another one
            break
        gains.append((whole.makespan(factors, deadline), number))
        taken_s = begun_s - deadline.left_s
    return cuts_of(iteration, tries[min(gains)[1]] if len(gains) > 1 else better[0].factors)


def _shorter(tried: Sequence[_Tried], base: Mapping[OpType, int]) -> list[_Tried]:
    """What is shorter than the factors begun with."""
    begun = next(one.makespan for one in tried if one.factors == base)
    return [one for one in tried if one.makespan < begun * (1.0 - _LEAST_GAIN)]


class _Trial:
    """Makespans that cuts lead to on one graph."""

    def __init__(self, iteration: Iteration, graph: TaskGraph, cutter: Cutter, *, num_tries: int = 0) -> None:
        self._iteration, self._graph, self._cutter, self._num_tries = iteration, graph, cutter, num_tries
        self._inside = set(graph.names)
        self.bound = lower_bound(graph)

    def makespan(self, factors: Mapping[OpType, int], deadline: Deadline) -> int:
        """The makespan (ticks) of the portfolio's best; with tries, after a sweep each way."""
        every = cuts_of(self._iteration, factors)
        cuts = {name: cut for name, cut in every.items() if self._inside.issuperset(cut.axes(name))}
        graph = self._cutter.graph(self._graph, cuts)
        deadline.spend(OPERATOR_STEPS * len(graph))
        schedules = run_portfolio(
            graph, Incumbent(self.bound, deadline), deadline, max_rounds=4, num_improved=_NUM_IMPROVED
        )[0]
        search = WindowSearch(graph)
        for is_backward in (False, True):
            if self._num_tries and deadline.left_s > 0:
                schedules = search.swept(
                    schedules,
                    size=_WINDOW,
                    num_tries=self._num_tries,
                    seed=0,
                    deadline=deadline,
                    is_backward=is_backward,
                )
        return schedules.makespan


def _descended(
    trial: _Trial, kinds: Sequence[OpType], cutter: Cutter, base: Mapping[OpType, int], deadline: Deadline
) -> list[_Tried]:
    """What coordinate descent from some factors tried, the shortest first."""
    known: dict[frozenset[tuple[OpType, int]], _Tried] = {}

    def tried(factors: Mapping[OpType, int]) -> _Tried:
        cut = {kind: factor for kind, factor in factors.items() if factor > 1}
        key = frozenset(cut.items())
        if key not in known:
            known[key] = _Tried(trial.makespan(cut, deadline), cut)
        return known[key]

    best = tried(base)
    for factor in FACTORS:
        if deadline.left_s > 0:
            alike = dict.fromkeys((kind for kind in kinds if cutter.can(kind, factor)), factor)
            best = min(best, tried({**base, **alike}), key=lambda one: one.makespan)
    for _ in range(3):
        before = best
        for kind in kinds:
            if deadline.left_s <= 0 or best.makespan <= trial.bound:
                break
            best = _moved(best, kind, [f for f in FACTORS if cutter.can(kind, f)], tried)
        if best is before or deadline.left_s <= 0:
            break
    return sorted(known.values(), key=lambda one: (one.makespan, sum(one.factors.values())))


def _moved(
    best: _Tried, kind: OpType, factors: Sequence[int], tried: Callable[[Mapping[OpType, int]], _Tried]
) -> _Tried:
    """The best with one type cut finer as long as that pays, or else coarser."""
    steps = (1, *factors)
    at = steps.index(best.factors.get(kind, 1))
    for finer in steps[at + 1 :]:
        other = tried({**best.factors, kind: finer})
        if other.makespan >= best.makespan:
            break
        best = other
    if best.factors.get(kind, 1) == steps[at]:
        for coarser in reversed(steps[:at]):
            other = tried({**best.factors, kind: coarser})
            if other.makespan > best.makespan:
                break
            best = other
    return best


def _by_promise(iteration: Iteration, graph: TaskGraph, exact: bool) -> list[OpType]:
    """The types with the longest operators that have time to spare; cutting a critical one only adds overhead."""
    before, after = heads(graph), tails(graph)
    path = max((h + t + a for h, t, a in zip(before, graph.ticks, after, strict=True)), default=0)

    def spare(kind: OpType) -> float:
        slack = sum(path - before[t] - graph.ticks[t] - after[t] for t in kind.tasks) / len(kind.tasks)
        return slack / path

    def weight(kind: OpType) -> int:
        return sum(graph.ticks[task] for task in kind.tasks)

    kinds = [kind for kind in op_types(iteration, exact=exact) if spare(kind) > 0.0]
    return sorted(kinds, key=weight, reverse=True)[:_MAX_TYPES]
