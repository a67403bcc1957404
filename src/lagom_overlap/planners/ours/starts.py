"""Where the search begins besides the step itself: what the other planners here make of it.

The frameworks' fixed rules first, which are quick, then the papers' planners, which cut groups and chains, fuse, and
launch micro-batches together. Each of these has its share of the time that is left. Without `split` the operators stay
what they are: the papers' planners order only, and rules that rewrite are no start.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Plan, Planner, PlanProblem
from lagom_overlap.planners.centauri.planner import Centauri
from lagom_overlap.planners.centauri.planner import paper as centauri_paper
from lagom_overlap.planners.concerto.planner import Concerto
from lagom_overlap.planners.concerto.planner import paper as concerto_paper
from lagom_overlap.planners.deadline import OPERATOR_STEPS, Deadline
from lagom_overlap.planners.framework_waits import FSDP2
from lagom_overlap.planners.fsdp2 import Fsdp2
from lagom_overlap.planners.megatron import baselines
from lagom_overlap.planners.megatron.planner import Megatron
from lagom_overlap.workload.rewrite.steps import Reorder

_RULE_STEPS: Final = 8 * OPERATOR_STEPS
"""Per operator, of one plan by fixed rules: an index, two rewrites, an order, a prediction."""
_PAPER_SHARE: Final = 0.9
"""Of the time left, for one of the papers' planners: they stop sooner, by themselves, where there is enough."""
_SLOWEST: Final = 40
"""A planner that is asked takes up to as many times what making the step's graph takes before it looks at the clock:
measured on 10,000 operators, where rules take 7 to 30 times and the papers' planners 8 to 36."""


def other_plans(problem: PlanProblem, *, split: bool, deadline: Deadline, graph_s: float) -> Iterator[Plan]:
    """The plans of the other planners, those that fit the memory, until the deadline.

    `graph_s` is what making the step's graph took: a planner that could not end in time is not asked.
    """
    papers: tuple[Planner, ...] = (
        (centauri_paper(), Centauri(), Concerto(), concerto_paper())
        if split
        else (Centauri(primitive=False, group=False, workload=False), Concerto(decompose=False, fuse=False))
    )
    rules: tuple[Planner, ...] = (
        Megatron(),
        baselines.ddp(),
        baselines.zero1(),
        baselines.zero2(),
        baselines.zero3(),
        baselines.OutOfOrder(),
    )
    for planner in rules:
        if deadline.left_s <= _SLOWEST * graph_s:
            return
        plans = list(_planned(problem, planner, deadline))
        deadline.spend(_RULE_STEPS * len(problem.iteration.ops))
        yield from (plan for plan in plans if split or all(isinstance(step, Reorder) for step in plan.rewrites))
    for planner in papers:
        if deadline.left_s <= _SLOWEST * graph_s:
            return
        share = 1.0 if planner is papers[-1] else _PAPER_SHARE
        yield from _planned(problem, planner, deadline.within(share * deadline.left_s))


def settings_plan(problem: PlanProblem, deadline: Deadline) -> Plan | None:
    """FSDP2's settings for its own step, which an order does not reach: they save bytes, and FSDP2 runs them."""
    if problem.framework != FSDP2:
        return None
    plan = next(_planned(problem, Fsdp2(), deadline), None)
    return None if plan is None or plan.settings is None else plan


def _planned(problem: PlanProblem, planner: Planner, deadline: Deadline) -> Iterator[Plan]:
    with suppress(JobError):  # it does not fit the memory, or its rules are for another kind of step
        yield planner.plan(problem.ending(deadline))
