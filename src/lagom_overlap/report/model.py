"""Everything that the report of one tuning run shows; nothing here is looked up elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from lagom_overlap.backends.base import Assignment, GroupProblem
from lagom_overlap.timeline import Timeline
from lagom_overlap.tune.journal import Entry
from lagom_overlap.tune.verdict import DEFAULT_ARM, TUNED_ARM, PairedRatio, Verdict

ENGINE_DEFAULT: Final = "engine_default"
"""The arm that runs our engine with no knob set; only where the default is another engine."""

_ARM_WORDS: Final = {
    DEFAULT_ARM: "the untouched default",
    TUNED_ARM: "tuned",
    ENGINE_DEFAULT: "the engine's whole-message setting",
    "fixed_min": "all knobs minimal",
    "fixed_max": "all knobs maximal",
}


PREDICTED: Final = "predicted_from_trace"
"""The backend's name in a run whose times a model fitted to a trace gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShare:
    """The gain over the default split in two: `whole` = engine and tuning, `tuning` alone, `engine` alone.

    `engine` and `tuning` are None where there is no `engine_default` arm (then the default is already the engine's own
    and the whole difference is tuning) or where that arm failed.
    """

    whole: PairedRatio
    tuning: PairedRatio | None
    engine: PairedRatio | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """One tuning run for people.

    `recommended` is what the tuner stands by and what the verdict's `"tuned"` arm ran; whether it is adopted is the
    verdict's word. `verdict` is None when the run ended before the A/B. `backend_description` is one line that says
    what was really run (`"gloo, 2 ranks on this machine, loopback"`, `"simulated: 8 x A40, profile plausible"`); an
    emulated link is named in it. `arm_words` says in words what the contenders are, by arm name: `"default"` is what a
    reader compares with (`"the native PyTorch call"`). `machine` and `versions` are facts to print as they are,
    `notes` honest caveats, one sentence each.
    """

    job: str
    backend: str
    backend_description: str
    tuner: str
    guarded: bool
    seed: int
    problems: tuple[GroupProblem, ...]
    entries: tuple[Entry, ...]
    recommended: Mapping[str, Assignment]
    verdict: Verdict | None
    date: str
    duration_s: float
    repeats: int
    timelines_before: Mapping[str, Timeline] = field(default_factory=lambda: MappingProxyType({}))
    timelines_after: Mapping[str, Timeline] = field(default_factory=lambda: MappingProxyType({}))
    machine: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    arm_words: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    def __post_init__(self) -> None:
        if not self.problems:
            raise ValueError("a report needs at least one group")
        for problem in self.problems:
            assignment = self.recommended.get(problem.group.name, problem.default)
            if len(assignment) != len(problem.group.comms):
                raise ValueError(
                    f"{problem.group.name!r}: {len(assignment)} recommended configurations "
                    f"for {len(problem.group.comms)} collectives"
                )

    def words_for(self, arm: str) -> str:
        """What an arm is, in words; its name where nobody said."""
        return self.arm_words.get(arm) or _ARM_WORDS.get(arm) or arm

    def tuned_of(self, problem: GroupProblem) -> Assignment:
        """What the tuner recommends for a group; its default where it says nothing."""
        return self.recommended.get(problem.group.name, problem.default)

    @property
    def is_prediction(self) -> bool:
        """Whether a model stood in for the machine: the verdict compares its own predictions, nothing was run."""
        return self.backend == PREDICTED

    @property
    def changes_nothing(self) -> bool:
        """Whether the tuner recommends the default for every group."""
        return all(self.tuned_of(problem) == problem.default for problem in self.problems)

    @property
    def engine_share(self) -> EngineShare | None:
        """What part of the gain is engine and what part is tuning; None where the verdict has no pairs."""
        if self.verdict is None or self.verdict.over_default.num_pairs == 0:
            return None
        tuning = self.verdict.over_baselines.get(ENGINE_DEFAULT)
        default_s = self.verdict.makespans_s.get(DEFAULT_ARM, ())
        engine_s = self.verdict.makespans_s.get(ENGINE_DEFAULT, ())
        pairs = tuning is not None and len(default_s) == len(engine_s) > 1 and min(engine_s) > 0
        engine = PairedRatio.of(default_s, engine_s) if pairs else None
        return EngineShare(whole=self.verdict.over_default, tuning=tuning, engine=engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One tuner of `lagom compare`: `regret_over_best` is makespan over the best tuner's, minus 1.

    `speedup_interval` is the 95 % interval of `speedup_over_default`, None where there are too few pairs for one. All
    but the measurements are None where the user ended the comparison before the results were measured side by side.
    """

    tuner: str
    num_measurements: int
    makespan_s: float | None
    speedup_over_default: float | None
    speedup_interval: tuple[float, float] | None
    regret_over_best: float | None
