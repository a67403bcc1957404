"""What `lagom plan` planned. Format of its JSON: docs/formats_plan.md."""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import ClassVar

from lagom_overlap.planners.base import Plan
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.planners.effects import SwitchAdvice
from lagom_overlap.planners.megatron.settings import EnvironmentRule, MegatronSettings, NotModelled
from lagom_overlap.planners.megatron.switch_search import SwitchEffect
from lagom_overlap.results.base import Drawn, Row
from lagom_overlap.results.plan_decisions import PlanDecision
from lagom_overlap.timeline import Timeline
from lagom_overlap.tuners.sequential import Judgement
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedIteration:
    """Predicted makespans (s): as the framework issues it, as planned, and a bound of the unsplit graph's schedules.

    The bound assumes no contention; there is none (None) of a whole iteration with a framework's settings.
    """

    before: float
    after: float
    lower_bound: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """A quantity before and after the plan."""

    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Most bytes held, and the most that are allowed (null: no limit)."""

    before: int
    after: int
    limit: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and quartiles."""

    median: float
    q25: float
    q75: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExecution:
    """The plan run against the program on real ranks, in interleaved rounds; times are the slowest rank's (s).

    `max_error` is the largest difference of an output relative to the largest value of that output on any rank; 0 is
    equal bit for bit. `speedup` is the ratio of the two in the same round, `judgement` whether the sequential test of
    every verdict tells the plan from the program. Of a framework's step run with settings, losses of every step and
    parameters at the end are compared (losses alone where the plan rounds gradients), `order_digest` is the settings',
    and the exposed time is unknown.
    """

    backend: str
    num_ranks: int
    rounds: int
    max_error: float
    is_bitwise_equal: bool
    order_digest: str
    iteration_s: Mapping[str, Spread]
    exposed_comm_s: Mapping[str, Spread]
    predicted_iteration_s: BeforeAfter
    predicted_exposed_comm_s: BeforeAfter
    speedup: Spread
    judgement: Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTimes:
    """How many operators there are, for how many a time was measured, and those's share of all their time."""

    num: int
    num_measured: int
    share_of_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesOrigin:
    """Where the times come from: `source` is "trace" or "ranks".

    Of a trace: its file, its steps (0: it marks none), and whether times are those of GPU kernels; `num_in_order` were
    matched in the order of the step, the rest of those measured by shape. `scale` is, per sort of operator, the factor
    on the model's time of what was not measured. `num_pieces` are the shapes of pieces that were measured too.
    """

    source: str
    computations: HeldTimes
    collectives: HeldTimes
    file: str | None = None
    num_steps: int = 0
    is_gpu: bool = False
    num_in_order: int = 0
    scale: Mapping[str, float] = field(default_factory=dict)
    num_pieces: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronEffects:
    """Megatron-LM's overlap switches for a job: what a launch says, and what each switch does to the whole iteration.

    `arguments` are all that the advised launch says of overlap, `settings` the same as keys of `[parallel]`, `changes`
    those of them that differ from the job's. `default_s` is the iteration (s) with Megatron-LM's own defaults on the
    job's degrees and schedule. `environment` are the variables that the launch wants, `not_modelled` the arguments that
    no prediction here knows.
    """

    num_gpus: int
    arguments: tuple[str, ...]
    settings: MegatronSettings
    changes: Mapping[str, bool | int | str]
    environment: tuple[EnvironmentRule, ...]
    default_s: float
    before_s: float
    after_s: float
    switches: tuple[SwitchEffect, ...]
    not_modelled: tuple[NotModelled, ...]

    @property
    def baseline(self) -> str:
        """What "before" is, in words."""
        return "Megatron-LM's defaults" if self.before_s == self.default_s else "the job's own switches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Effects:
    """FSDP2's settings that pay on this step (null: the job's own), what each brings, and what is not advised."""

    settings: Fsdp2Settings | None
    switches: tuple[SwitchAdvice, ...]
    not_advised: tuple[SwitchAdvice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The plan and its timelines, by "before" and "after": as simulated, and as measured where it ran.

    `is_whole`: the simulated ones hold the slots of all stages of an iteration, which are no operators.
    """

    plan: Plan
    timelines: Mapping[str, Timeline]
    is_whole: bool = False
    measured: Mapping[str, Timeline] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlanResult(Drawn):
    """One run of `lagom plan`; `planned` is found again as `step`.

    `baseline` is what "before" is, `simulation` whether the figures know contention, `is_optimal` that no schedule of
    these operators is shorter (without contention). `carrier` is who runs the plan (None: nobody does). `advice` is the
    plan as settings, by framework. `times` says which of the step's times were measured (None: none), `execution` how
    the plan ran (None: it did not); `fsdp2` and `megatron` are what a framework's settings bring, where its planner was
    asked.
    """

    verb: ClassVar[str] = "plan"

    tool: str = "lagom plan"
    job: str
    num_ranks: int
    planner: str
    carrier: Carrier | None
    baseline: str
    simulation: str
    num_ops: int
    num_comms: int
    iteration_s: PlannedIteration
    exposed_comm_s: BeforeAfter
    peak_memory_bytes: PeakMemory
    is_optimal: bool
    decisions: tuple[PlanDecision, ...]
    solve_s: float
    times: TimesOrigin | None
    fsdp2: Fsdp2Effects | None
    megatron: MegatronEffects | None
    execution: PlanExecution | None = None
    advice: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    planned: InitVar[PlannedStep]

    def __post_init__(self, planned: PlannedStep) -> None:
        object.__setattr__(self, "_step", planned)

    @property
    def step(self) -> PlannedStep:
        """The plan itself and its timelines."""
        step: PlannedStep = self.behind("_step", "plan to be simulated again; plan.toml in the folder holds it")
        return step

    def table(self) -> list[Row]:
        """One row per decision: a collective that is treated differently, or a computation that is cut alone."""
        return [
            {
                "operator": decision.comm,
                "substitution": decision.substitution,
                "mesh": None if decision.groups is None else " x ".join(map(str, decision.groups.mesh)),
                "split_dim": decision.split_dim,
                "num_chunks": decision.num_chunks,
                "num_fused_with": len(decision.fused_with),
                "prefetch": decision.prefetch,
                "is_computation": decision.is_computation,
            }
            for decision in self.decisions
        ]
