"""The joint planner: order and settings by turns, each for what the other gave.

    1. times := alone, settings := default
    2. plan under the times; keep the order if it is shorter under contention with the settings
    3. tune the settings for the order by simulation
    4. times := what each operator took beside what ran beside it; again from 2 until nothing gains

Spec, planners section 5.8. Step 2 is any planner's; step 3 costs a simulation per setting tried. The bound covers every
order and every setting, so that the distance to it is the most that anything could still gain.
"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.joint.bound import contended_bound_s
from lagom_overlap.joint.contended import Contended, Settings
from lagom_overlap.joint.settings import Choices, choices_of, tuned_settings
from lagom_overlap.plan.base import Plan, Planner, PlanProblem
from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.ours import Ours
from lagom_overlap.plan.predict import predict
from lagom_overlap.plan.schedule import lower_bound, task_graph
from lagom_overlap.plan.times import ModelTimes, NamedTimes
from lagom_overlap.units import format_bytes

MOST_ROUNDS: Final = 6
LEAST_GAIN: Final = 1e-4
"""A round that gains less is the last."""
_PLAN_SHARE: Final = 0.25
"""Share of what is left of the budget for one call of the planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """A plan with its settings; all times in seconds, under contention.

    `default_s` is the unplanned step with default settings, `bound_s` bounds every order and setting, `rounds_s` the
    makespan after each round.
    """

    plan: Plan
    settings: Settings
    makespan_s: float
    default_s: float
    bound_s: float
    rounds_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Joint:
    """Alternates a planner and a search over settings; `planner` makes the orders."""

    planner: Planner = field(default_factory=Ours)

    def plan(self, problem: PlanProblem) -> Plan:
        """The order of `solve`, with the settings and what both gain under contention as notes: see `Planner`."""
        found = self.solve(problem)
        notes = [
            f"under contention {1e3 * found.makespan_s:.4g} ms with the settings below, {1e3 * found.default_s:.4g} ms"
            f" unplanned with the default's; no order and setting gets below {1e3 * found.bound_s:.4g} ms"
        ]
        for kind, config in found.settings.items():
            chunk = "default" if config.chunk_bytes is None else format_bytes(config.chunk_bytes)
            phase = f", {kind.phase}" if kind.phase else ""
            notes.append(
                f"{kind.communicator} {kind.collective.kind} of {format_bytes(kind.collective.num_bytes)}{phase}:"
                f" {config.num_channels} channels, chunk {chunk}"
            )
        return replace(
            found.plan,
            planner="joint",
            lower_bound_s=lower_bound_s(problem),
            is_optimal=False,
            notes=(*found.plan.notes, *notes),
        )

    def solve(self, problem: PlanProblem) -> JointPlan:
        """The best order and settings found within the problem's budget; never worse than a step that fits as it is.

        Raises:
            JobError: if the problem's times are not the cost model's (contention is not known then), or the planner
                finds no schedule.
        """
        times = problem.times
        if not isinstance(times, ModelTimes):
            raise JobError("joint planning needs the cost model's times: measured ones say nothing of contention")
        deadline = Deadline(problem.budget_s)
        contended = Contended(problem.iteration, times.model)
        choices = choices_of(contended)
        default_s = contended.makespan_s(problem.iteration, {})
        state = _State(contended, choices, problem, default_s)
        for _ in range(MOST_ROUNDS):
            before_s = state.best_s
            state.replan(self.planner, deadline)
            state.retune(deadline)
            state.rounds_s.append(state.best_s)
            if deadline.left_s <= 0 or state.best_s > before_s * (1 - LEAST_GAIN):
                break
        return JointPlan(
            plan=state.plan,
            settings=state.settings,
            makespan_s=state.best_s,
            default_s=default_s,
            bound_s=contended_bound_s(contended, choices),
            rounds_s=tuple(state.rounds_s),
        )


def lower_bound_s(problem: PlanProblem) -> float:
    """Seconds that no schedule of the unsplit step beats without contention."""
    graph = task_graph(problem)
    return graph.seconds(lower_bound(graph))


def _fits_unplanned(problem: PlanProblem) -> bool:
    limit = problem.memory_limit_bytes
    return limit is None or predict(problem).peak_bytes <= limit


class _State:
    """The best order and settings so far."""

    def __init__(self, contended: Contended, choices: Choices, problem: PlanProblem, default_s: float) -> None:
        self._contended, self._choices, self._problem = contended, choices, problem
        self.plan = Plan(planner="none", rewrites=(), iteration=problem.iteration, lower_bound_s=0.0)
        self.settings: Settings = {}
        self.best_s = default_s if _fits_unplanned(problem) else inf
        self.rounds_s: list[float] = []

    def replan(self, planner: Planner, deadline: Deadline) -> None:
        """Plans for the times that the operators took; keeps the plan if it is shorter under contention."""
        stretched = self._contended.stretched_s(self.plan.iteration, self.settings)
        times = self._problem.times
        problem = PlanProblem(
            iteration=self._problem.iteration,
            cluster=self._problem.cluster,
            times=NamedTimes(stretched, self._problem.iteration, times),
            groups=self._problem.groups,
            memory_limit_bytes=self._problem.memory_limit_bytes,
            prefetch=self._problem.prefetch,
            exact=self._problem.exact,
            budget_s=max(0.05, _PLAN_SHARE * deadline.left_s),
            seed=self._problem.seed,
        )
        plan = planner.plan(problem)
        planned_s = self._contended.makespan_s(plan.iteration, self.settings)
        if planned_s < self.best_s:
            self.plan, self.best_s = plan, planned_s

    def retune(self, deadline: Deadline) -> None:
        """Settings for the order that is kept."""
        self.settings, self.best_s = tuned_settings(
            self._contended, self.plan.iteration, self._choices, self.settings, deadline
        )
