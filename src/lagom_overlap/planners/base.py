"""The seam of planning: a problem in, a plan out.

A planner sees one data-flow `Iteration`, what the machine is and how long things take alone on it; it answers with
rewrites (`workload.rewrite`). Planners are pure but for the time they are given; a seed is an argument.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from lagom_overlap.collective import CommConfig
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.planners.deadline import Deadline, SearchBudget
from lagom_overlap.planners.effects import SwitchAdvice
from lagom_overlap.planners.megatron.settings import MegatronSettings
from lagom_overlap.workload import Iteration, Op
from lagom_overlap.workload.fsdp2.reissue import reissued
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.rewrite.steps import Rewrite


class OpTimes(Protocol):
    """How long an operator takes running alone: measured, or from the cost model."""

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone; more than 0."""


class StepTotals(NamedTuple):
    """Seconds of a step, and the most bytes that a GPU holds."""

    step_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """What is to be planned.

    `groups` are the global ranks of each communicator, by description. `memory_limit_bytes` bounds resident memory plus
    live buffers on one GPU. `prefetch` is how many gathered parameter groups may be held at once, the one in use
    included (None: no limit). `exact` forbids what changes the order of a reduction. `work` takes the place of
    `budget_s`.

    `issued` is the step as it runs before any plan: the same operators with the framework's waits (None: as
    `iteration` stands). `framework` names whose step it is, and then plans keep what that one waits for
    (`framework_waits`); None is a free program, which may run in any order that its data flow allows. `pipeline` is
    the depth of the pipeline whose stage this is, `num_micro_batches` what an iteration runs through it (None: what the
    step has, which may be one that stands for all). `together` is, by collective, the progress of it and of
    computations while both run, relative to running alone, where that was measured (`planners.simulated`).
    `is_blocking`: every operator ends before the next is issued, as under FSDP2 on CPU ranks, which have no streams.
    `settings` are FSDP2's that a job of a named model has by its own keys, and `told` is the step that the job has with
    others (None: a step that was captured, which is issued again with them). `whole` are the figures of its whole
    iteration with settings, all stages and micro-batches, where the step is not that (None: it is).
    `until` is when a planner must end whom another one asks: it takes the place of `budget_s` and `work`.
    """

    iteration: Iteration
    cluster: Cluster
    times: OpTimes
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    memory_limit_bytes: int | None = None
    prefetch: int | None = 3
    exact: bool = False
    budget_s: float = 10.0
    work: SearchBudget | None = None
    seed: int = 0
    issued: Iteration | None = None
    framework: str | None = None
    pipeline: int = 1
    num_micro_batches: int | None = None
    together: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    is_blocking: bool = False
    told: Callable[[Fsdp2Settings], Iteration] | None = field(default=None, compare=False, repr=False)
    whole: Callable[[Fsdp2Settings], StepTotals] | None = field(default=None, compare=False, repr=False)
    settings: Fsdp2Settings | None = None
    until: Deadline | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.iteration.is_dataflow:
            raise JobError(f"iteration {self.iteration.name!r} does not hold its data flow: it cannot be reordered")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 1:
            raise JobError(f"memory_limit is {self.memory_limit_bytes} bytes, must be at least 1")
        if self.prefetch is not None and self.prefetch < 1:
            raise JobError(f"prefetch is {self.prefetch}, must be at least 1")
        if self.pipeline < 1:
            raise JobError(f"pipeline is {self.pipeline}, must be at least 1")
        if not 0 < self.budget_s < float("inf"):
            raise JobError(f"budget is {self.budget_s} s, must be positive and finite")

    @property
    def unplanned(self) -> Iteration:
        """The step as it runs before any plan."""
        return self.issued or self.iteration

    def with_settings(self, settings: Fsdp2Settings) -> Iteration:
        """The step as FSDP2 issues it with those settings."""
        if self.told is not None:
            return self.told(settings)
        return reissued(self.iteration, self.unplanned, settings)

    def ending(self, deadline: Deadline) -> "PlanProblem":
        """The problem for a planner that must end so."""
        return replace(self, until=deadline)

    def deadline(self) -> Deadline:
        """The end of planning, which begins now."""
        if self.until is not None:
            return self.until
        return Deadline(self.budget_s) if self.work is None else Deadline.of_work(self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule: the rewrites in order, and the iteration that they make.

    Without rewrites it is the step as it runs before any plan. `lower_bound_s` bounds every schedule of the problem's
    unsplit graph from below (seconds); `is_optimal` says that the planner proved its own schedule shortest under
    `times`, without contention. `configs` are the settings of collectives that the plan was made for, by name in
    `iteration`; what is missing runs untouched.
    Of a framework's settings whose whole iteration was simulated there is no bound (None).

    `settings` are a framework's own, which make the step without a rewrite; `effects` is what each of them brings, and
    `not_advised` what others would, that were tried and left out.
    """

    planner: str
    rewrites: tuple[Rewrite, ...]
    iteration: Iteration
    lower_bound_s: float | None
    is_optimal: bool = False
    notes: tuple[str, ...] = ()
    configs: Mapping[str, CommConfig] = field(default_factory=lambda: MappingProxyType({}))
    settings: Fsdp2Settings | MegatronSettings | None = None
    effects: tuple[SwitchAdvice, ...] = ()
    not_advised: tuple[SwitchAdvice, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        """Whether the step runs as it does before any plan."""
        return not self.rewrites and self.settings is None


class Planner(Protocol):
    """Turns a problem into a plan."""

    def plan(self, problem: PlanProblem) -> Plan:
        """The best plan found within the problem's budget.

        Raises:
            JobError: if no schedule fits the memory limit; says by how much.
        """
