"""The joint planner: cuts, prefetch depth, order and settings as one problem, searched by turns under contention.

    1. plan under the operators' times alone, then tune the settings for that order by simulation: plan-then-tune is
       the first candidate, so that nothing that follows ends behind it
    2. times := what each operator took under contention; plan again, with every prefetch depth up to the
       problem's, with cuts and without; orders near the best under contention get settings near the best's; the
       best is kept and tuned; again from 2 until nothing gains
    3. cut one type of operator otherwise, replan, tune
    4. settings of runs of calls instead of whole classes

Spec, planners section 5.8. The bound covers every order, cut and setting, so that the distance to it is the most that
anything could still gain.

The orders to try are what the planner makes of other prefetch depths, with cuts and without, and of other cuts. A
planner knows of contention only what the times it is given say: here what each operator took during what ran during it.
Which of several good orders suffers least is for the simulation to tell.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Plan, Planner, PlanProblem
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.joint.bound import JointBound, joint_bound
from lagom_overlap.planners.joint.contended import CommClass, Contended, Issued, Settings
from lagom_overlap.planners.joint.settings import Choices, choices_of, nearby_settings, tuned_calls, tuned_settings
from lagom_overlap.planners.ours import Ours
from lagom_overlap.planners.ours.cuts import FACTORS, Cutter, OpType, cuts_of, op_types, splits_of
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import lower_bound, task_graph
from lagom_overlap.planners.times import NamedTimes
from lagom_overlap.units import format_bytes
from lagom_overlap.workload.gathers import parameter_gathers
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
    if isinstance(planner, Ours):  # the other planners' plans were starts of the first plan
        planner = replace(planner, starts=False)
        planners = [planner, replace(planner, split=False)] if planner.split else [planner]
    for depth in (most, *shallower):
        for each in planners:
            yield Variant(depth, each)


def recut(problem: PlanProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with one type of operator cut otherwise, in the plan's order as far as that goes; to be replanned."""
    cutter, ops = Cutter(problem), problem.iteration.ops
    if any(not isinstance(step, Split | Reorder) for step in plan.rewrites):
        return  # made by a planner that does more than cut
    splits = [step for step in plan.rewrites if isinstance(step, Split)]
    now = {step.comm: (step.num_chunks, step.before, step.after) for step in splits}
    kinds = op_types(problem.iteration, exact=problem.exact)

    def weight(kind: OpType) -> float:
        return sum(problem.times.seconds(ops[task]) for task in kind.tasks)

    for kind in sorted(kinds, key=weight, reverse=True)[:MOST_TYPES]:
        alike = cuts_of(problem.iteration, {kind: FACTORS[0]})
        members = {member for name, cut in alike.items() for member in cut.axes(name)}
        rest = [step for step in splits if members.isdisjoint(_members(step))]
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


MOST_ROUNDS: Final = 4
"""Of settings and order in turn, if they do not settle before. Bounds the computation."""
LEAST_GAIN: Final = 1e-4
"""A round that gains less is the last."""
NEAR: Final = 1.02
"""An order that is this much longer than the best under the best's settings is not tuned."""
PLAN_SHARE: Final = 0.25
"""Share of the budget for the first plan."""
_QUICK_SHARE: Final = 0.05
"""Share of what is left for one more plan."""
_VARIANTS_SHARE, _CUTS_SHARE = 0.5, 0.3
"""Shares of what is left for all other plans, and for other cuts."""


@dataclass(frozen=True, slots=True)
class JointStep:
    """What one kind of move led to: the makespan (s) after it."""

    name: str
    makespan_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """A plan with its settings; all times in seconds, under contention.

    `default_s` is the unplanned step with default settings, `bound` bounds every order and setting, `history` the
    makespan after each kind of move, `prefetch` the depth that was planned with (None: no limit).
    """

    plan: Plan
    settings: Settings
    prefetch: int | None
    makespan_s: float
    default_s: float
    bound: JointBound
    history: tuple[JointStep, ...]


@dataclass(frozen=True, slots=True)
class Joint:
    """Searches the order of operations and the collectives' settings together; `planner` makes the orders."""

    planner: Planner = field(default_factory=Ours)

    def plan(self, problem: PlanProblem) -> Plan:
        """The order of `solve`, with the settings and what both gain under contention as notes: see `Planner`."""
        solved = self.solve(problem)
        depth = "without limit" if solved.prefetch is None else f"{solved.prefetch} groups"
        notes = [
            f"under contention {1e3 * solved.makespan_s:.4g} ms with the settings below, "
            f"{1e3 * solved.default_s:.4g} ms unplanned with the default's; "
            f"no order and setting gets below {1e3 * solved.bound.seconds:.4g} ms",
            f"parameters are gathered ahead: {depth}",
            *_setting_notes(solved),
        ]
        return replace(
            solved.plan,
            planner="joint",
            lower_bound_s=lower_bound_s(problem),
            is_optimal=False,
            notes=(*solved.plan.notes, *notes),
            configs=Contended.of(problem).issued(solved.plan.iteration).configs(solved.settings),
        )

    def solve(self, problem: PlanProblem, plans: Sequence[Plan] = ()) -> JointPlan:
        """The best order and settings found within the problem's budget.

        Never worse than a step that fits as it is, nor than any of `plans` (made for this problem; without any the
        planner makes one first) with the settings that tuning finds for it.

        Raises:
            JobError: if the problem's times are not the cost model's (contention is not known then), or the planner
                finds no schedule.
        """
        if problem.work is not None:
            raise JobError("joint counts no work: its simulations are bounded by the clock; give budget_s alone")
        contended, deadline = Contended.of(problem), Deadline(problem.budget_s)
        search = _Search(problem, contended)
        default_s = search.offer_unplanned()
        for plan in plans or (self.planner.plan(replace(problem, budget_s=PLAN_SHARE * problem.budget_s)),):
            search.tune_plan(plan, deadline)
        search.note("planned, then tuned")
        search.try_variants(self.planner, deadline.within(_VARIANTS_SHARE * deadline.left_s))
        search.note("planned again under contention")
        if isinstance(self.planner, Ours) and self.planner.split:
            search.try_cuts(self.planner, deadline.within(_CUTS_SHARE * deadline.left_s))
            search.note("other cuts")
        search.tune_calls(deadline)
        search.note("settings of single calls")
        best = search.best
        return JointPlan(
            plan=best.plan,
            settings=best.settings,
            prefetch=best.prefetch,
            makespan_s=best.makespan_s,
            default_s=default_s,
            bound=joint_bound(problem, search.choices),
            history=tuple(search.history),
        )


def _setting_notes(joint_plan: JointPlan) -> list[str]:
    notes = []
    for kind, config in joint_plan.settings.items():
        if isinstance(kind, CommClass):
            chunk = "default" if config.chunk_bytes is None else format_bytes(config.chunk_bytes)
            phase = f", {kind.phase}" if kind.phase else ""
            notes.append(
                f"{kind.communicator} {kind.collective.kind} of {format_bytes(kind.collective.num_bytes)}{phase}:"
                f" {config.num_channels} channels, chunk {chunk}"
            )
    apart = [
        f"{name} {config.num_channels} channels"
        for name, config in joint_plan.settings.items()
        if isinstance(name, str)
    ]
    return [*notes, f"{len(apart)} calls apart: {', '.join(apart)}"] if apart else notes


def lower_bound_s(problem: PlanProblem) -> float:
    """Seconds that no schedule of the unsplit step beats without contention."""
    graph = task_graph(problem)
    return graph.seconds(lower_bound(graph))


@dataclass(frozen=True, slots=True)
class _Found:
    """An order with settings and what they take under contention (s)."""

    plan: Plan
    issued: Issued
    prefetch: int | None
    settings: Settings
    makespan_s: float


class _Search:
    """The best order and settings so far."""

    def __init__(self, problem: PlanProblem, contended: Contended) -> None:
        self._problem, self._contended = problem, contended
        self.choices: Choices = choices_of(contended)
        plan = Plan(planner="none", rewrites=(), iteration=problem.unplanned, lower_bound_s=0.0)
        self.best = _Found(plan, contended.issued(problem.unplanned), problem.prefetch, {}, inf)
        self._seen = {problem.iteration.ops}
        self.history: list[JointStep] = []

    def note(self, name: str) -> None:
        """Keeps what has been reached."""
        self.history.append(JointStep(name, self.best.makespan_s))

    def offer_unplanned(self) -> float:
        """The step as it is, untouched: a candidate if it fits; its makespan (s)."""
        default_s = self.best.issued.makespan_s({})
        limit = self._problem.memory_limit_bytes
        if limit is None or predict(self._problem, self._problem.unplanned).peak_bytes <= limit:
            self.best = replace(self.best, makespan_s=default_s)
        return default_s

    def tune_plan(self, plan: Plan, deadline: Deadline) -> None:
        """Tunes a plan from the default settings on; keeps it if it is shorter."""
        self._seen.add(plan.iteration.ops)
        issued = self._contended.issued(plan.iteration)
        settings, found_s = tuned_settings(issued, self.choices, {}, deadline)
        self._keep(_Found(plan, issued, self._problem.prefetch, settings, found_s))

    def try_variants(self, planner: Planner, deadline: Deadline) -> None:
        """Plans for the times that the operators took, in several ways, until nothing gains."""
        for _ in range(MOST_ROUNDS):
            before_s, problem = self.best.makespan_s, self._stretched()
            for variant in variants_of(planner, problem):
                if deadline.left_s <= 0:
                    break
                timed = replace(problem, budget_s=max(0.05, _QUICK_SHARE * deadline.left_s))
                with suppress(JobError):  # what was planned first fits the memory; a variant need not
                    self._offer(variant.plan(timed), variant.prefetch, deadline)
            self._tune_best(deadline)
            if deadline.left_s <= 0 or self.best.makespan_s > before_s * (1 - LEAST_GAIN):
                return

    def try_cuts(self, planner: Ours, deadline: Deadline) -> None:
        """Cuts types of operators otherwise."""
        problem, before = replace(self._stretched(), prefetch=self.best.prefetch), self.best
        for changed in recut(problem, before.plan):
            if deadline.left_s <= 0:
                break
            timed = replace(problem, budget_s=max(0.05, _QUICK_SHARE * deadline.left_s))
            with suppress(JobError):
                self._offer(planner.replan(timed, changed), before.prefetch, deadline)
        if self.best is not before:
            self._tune_best(deadline)

    def tune_calls(self, deadline: Deadline) -> None:
        """Settings of runs of calls for the order that is kept."""
        best = self.best
        settings, found_s = tuned_calls(best.issued, self.choices, best.settings, deadline)
        self._keep(replace(best, settings=settings, makespan_s=found_s))

    def _offer(self, plan: Plan, prefetch: int | None, deadline: Deadline) -> None:
        """Keeps a plan that with settings near the best's is shorter."""
        if plan.iteration.ops in self._seen:
            return
        self._seen.add(plan.iteration.ops)
        issued, settings = self._contended.issued(plan.iteration), self.best.settings
        if issued.makespan_s(settings) < NEAR * self.best.makespan_s:
            settings, found_s = nearby_settings(issued, self.choices, settings, deadline)
            self._keep(_Found(plan, issued, prefetch, settings, found_s))

    def _tune_best(self, deadline: Deadline) -> None:
        best = self.best
        settings, found_s = tuned_settings(best.issued, self.choices, best.settings, deadline)
        self._keep(replace(best, settings=settings, makespan_s=found_s))

    def _keep(self, candidate: _Found) -> None:
        if candidate.makespan_s < self.best.makespan_s:
            self.best = candidate

    def _stretched(self) -> PlanProblem:
        """The problem with the times that the operators take in the best so far."""
        took_s = self.best.issued.stretched_s(self.best.settings)
        return replace(self._problem, times=NamedTimes(took_s, self._problem.iteration, self._problem.times))
