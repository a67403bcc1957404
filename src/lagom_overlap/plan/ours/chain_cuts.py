"""Cuts across a collective: what makes its input, or reads its output, cut with it into pieces that follow each other.

The chains are those of Concerto and Centauri (`plan.context`; spec, planners sections 1.6 and 2.3), as long as it takes
to cover the collective. Which of them pay is decided with the cuts of single operators, by schedules.
"""

from collections import defaultdict
from typing import Final

from lagom_overlap.plan.base import PlanProblem
from lagom_overlap.plan.context import context_of, divisible
from lagom_overlap.plan.exact import adds_numbers
from lagom_overlap.plan.ours.cuts import FACTORS, Cut, Cutter, OpType, type_name
from lagom_overlap.plan.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Gather, Gemm
from lagom_overlap.workload.rewrite.steps import ChainLink

_MAX_TYPES: Final = 8


def chain_types(problem: PlanProblem, cutter: Cutter) -> tuple[OpType, ...]:
    """Collectives with the chain before them or after them: those where two pieces hide the most, all layers together.

    Per side of a collective the whole chain, or that up to the first product, whichever hides more.
    """
    index = StepIndex(problem.iteration)
    found: dict[str, list[tuple[int, Cut]]] = defaultdict(list)
    for task, op in enumerate(problem.iteration.ops):
        if not isinstance(op, CommOp) or (problem.exact and adds_numbers(op)):
            continue
        for cut in _cuts(problem, index, op):
            side = "before" if cut.before else "after"
            name = f"{type_name(op)} {side}, {cut.axis}, {len(cut.before) + len(cut.after)}"
            found[name].append((task, cut))
    gains = {name: len(rows) * _gain(problem, cutter, *rows[len(rows) // 2]) for name, rows in found.items()}
    best: dict[str, str] = {}
    for name in sorted(found, key=lambda name: -gains[name]):
        best.setdefault(name.rpartition(", ")[0], name)
    return tuple(
        OpType(name, tuple(task for task, _ in found[name]), tuple(cut for _, cut in found[name]))
        for name in list(best.values())[:_MAX_TYPES]
        if gains[name] > 0
    )


def _gain(problem: PlanProblem, cutter: Cutter, task: int, cut: Cut) -> int:
    return cutter.gain(problem.iteration.ops[task].name, cut)


def _cuts(problem: PlanProblem, index: StepIndex, op: CommOp) -> list[Cut]:
    """Per side the cuts along the first axis that has a chain."""
    shards, seconds = op.shards, problem.times.seconds
    found: dict[str, list[Cut]] = {}
    for axis, combine in enumerate(shards.combine if shards is not None else ()):
        assert shards is not None, op.name
        if not isinstance(combine, Gather) or len(found) == 2 or shards.sizes[axis] % FACTORS[0]:
            continue
        context = context_of(index, op, axis, seconds, seconds(op))
        before = divisible(index, context.before, FACTORS[0], from_end=True)
        after = divisible(index, context.after, FACTORS[0], from_end=False)
        if before:
            found.setdefault("before", [Cut(axis, 1, before=links) for links in _long_and_short(index, before, True)])
        if after:
            found.setdefault("after", [Cut(axis, 1, after=links) for links in _long_and_short(index, after, False)])
    return [cut for cuts in found.values() for cut in cuts]


def _long_and_short(index: StepIndex, links: tuple[ChainLink, ...], from_end: bool) -> list[tuple[ChainLink, ...]]:
    """All links, and those next to the collective up to the first product, if they are fewer."""
    outward = links[::-1] if from_end else links
    for number, link in enumerate(outward[:-1], 1):
        op = index.ops[link.op]
        if isinstance(op, CompOp) and isinstance(op.work, Gemm):
            short = outward[:number]
            return [links, short[::-1] if from_end else short]
    return [links]
