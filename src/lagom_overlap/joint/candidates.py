"""Orders to try under contention: what the planner makes of other prefetch depths, with cuts and without, other cuts.

A planner knows of contention only what the times it is given say: here what each operator took beside what ran beside
it. Which of several good orders suffers least is for the simulation to tell.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.plan.base import Plan, Planner, PlanProblem
from lagom_overlap.plan.memory import parameter_gathers
from lagom_overlap.plan.ours import Ours
from lagom_overlap.plan.ours.cuts import FACTORS, Cutter, OpType, cuts_of, op_types, splits_of
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Reorder, Rewrite, Split

DEPTHS: Final = (1, 2, 3, 4, 6, 8)
"""Gathered parameter groups held at once that are tried, none above the problem's own."""
MOST_TYPES: Final = 6
"""Types of operators whose cuts are changed one by one: the longest ones."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to plan: with at most `prefetch` gathered groups (None: no limit), by `planner`."""

    prefetch: int | None
    planner: Planner

    def plan(self, problem: PlanProblem) -> Plan:
        """The plan.

        Raises:
            JobError: if no schedule fits the memory limit.
        """
        return self.planner.plan(replace(problem, prefetch=self.prefetch))


def variants_of(planner: Planner, problem: PlanProblem) -> Iterator[Variant]:
    """The problem's own prefetch depth, then shallower ones, the deepest first; our planner also without cuts."""
    most, gathers = problem.prefetch, len(parameter_gathers(problem.iteration))
    shallower = [depth for depth in reversed(DEPTHS) if depth < gathers and (most is None or depth < most)]
    planners = [planner]
    if isinstance(planner, Ours) and planner.split:
        planners.append(replace(planner, split=False))
    for depth in (most, *shallower):
        for each in planners:
            yield Variant(depth, each)


def recut(problem: PlanProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with one type of operator cut otherwise, in the plan's order as far as that goes; to be replanned."""
    cutter, ops = Cutter(problem), problem.iteration.ops
    if any(not isinstance(step, Split | Reorder) for step in plan.rewrites):
        return  # made by a planner that does more than cut
    held = [step for step in plan.rewrites if isinstance(step, Split)]
    now = {step.comm: (step.num_chunks, step.before, step.after) for step in held}
    kinds = op_types(problem.iteration, exact=problem.exact)

    def weight(kind: OpType) -> float:
        return sum(problem.times.seconds(ops[task]) for task in kind.tasks)

    for kind in sorted(kinds, key=weight, reverse=True)[:MOST_TYPES]:
        alike = cuts_of(problem.iteration, {kind: FACTORS[0]})
        members = {member for name, cut in alike.items() for member in cut.axes(name)}
        rest = [step for step in held if members.isdisjoint(_members(step))]
        for factor in (1, *FACTORS):
            made = {name: replace(cut, num=factor) for name, cut in alike.items()}
            if all(now.get(name, (1, (), ())) == (factor, (), ()) for name in alike):
                continue
            if factor > 1 and not cutter.can(kind, factor):
                continue
            cuts: tuple[Rewrite, ...] = (*rest, *(splits_of(made) if factor > 1 else ()))
            yield replace(plan, rewrites=cuts, iteration=rewritten(problem.iteration, cuts))


def _members(step: Split) -> list[str]:
    return [step.comm, *(link.op for link in (*step.before, *step.after))]
