"""What `lagom tune` found. Format of its JSON: docs/formats.md."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import ClassVar, Final

from lagom_overlap.collective import CommConfig, LaunchConfig, launch_of
from lagom_overlap.results.base import Cell, Drawn, Row
from lagom_overlap.timeline import Timeline
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.journal import Entry, StepKind
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.tuners.verdict import DEFAULT_ARM, TUNED_ARM, PairedRatio, Verdict

ENGINE_DEFAULT: Final = "engine_default"
"""The arm that runs our engine with no knob set; only where the default is another engine."""
PREDICTED: Final = "predicted_from_trace"
"""The backend's name in a run whose times a model fitted to a trace gave."""

_MODELLED: Final = ("simulated", "fake_nccl")
"""Backends that run the contention model in place of a machine."""
_ARM_WORDS: Final = {
    DEFAULT_ARM: "the untouched default",
    TUNED_ARM: "tuned",
    ENGINE_DEFAULT: "the engine's whole-message setting",
    "fixed_min": "all knobs minimal",
    "fixed_max": "all knobs maximal",
}


def is_modelled(backend: str, description: str) -> bool:
    """Whether a backend's times are a model's, also where it replays a recording of a model."""
    return backend in (*_MODELLED, PREDICTED) or description.startswith("replayed: simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of one iteration: `makespan_s` and `comp_s` summed over groups x count, `comm_s` per call by name."""

    makespan_s: float
    comp_s: float
    comm_s: Mapping[str, float]


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
class MeasuredSearch:
    """All that a run measured: the groups, every step in order, and what the tuner stands by at the end."""

    problems: Problems
    entries: tuple[Entry, ...]
    recommended: Mapping[str, Assignment]

    def __post_init__(self) -> None:
        if not self.problems:
            raise ValueError("a search needs at least one group")
        for problem in self.problems:
            num_comms, assignment = len(problem.group.comms), self.tuned_of(problem)
            if len(assignment) != num_comms:
                raise ValueError(
                    f"{problem.group.name!r}: {len(assignment)} recommended configurations for {num_comms} collectives"
                )

    @property
    def num_measurements(self) -> int:
        """Steps of the search; the verdict's are counted apart."""
        return sum(entry.step.kind is StepKind.SEARCH for entry in self.entries)

    def tuned_of(self, problem: GroupProblem) -> Assignment:
        """What the tuner recommends for a group; its default where it says nothing."""
        return self.recommended.get(problem.group.name, problem.default)

    def times_under(self, arm: str) -> Times | None:
        """The times of the default or the tuned arm; without a verdict, of the search's runs of the same settings."""
        judged = [e for e in self.entries if e.step.kind is StepKind.VERDICT and e.step.arm == arm]
        runs: dict[str, list[Outcome]] = {problem.group.name: [] for problem in self.problems}
        wanted = {p.group.name: p.default if arm == DEFAULT_ARM else self.tuned_of(p) for p in self.problems}
        for entry in judged or self.entries:
            for name, outcome in entry.outcomes.items():
                if judged or entry.step.assignments[name] == wanted[name]:
                    runs[name].append(outcome)
        return times_of(self.problems, runs)

    def timelines_under(self, arm: str) -> dict[str, Timeline]:
        """The last timeline of every group in an arm of the verdict."""
        timelines: dict[str, Timeline] = {}
        for entry in self.entries:
            if entry.step.kind is StepKind.VERDICT and entry.step.arm == arm:
                for name, outcome in entry.outcomes.items():
                    if isinstance(outcome, Measurement) and outcome.timeline is not None:
                        timelines[name] = outcome.timeline
        return timelines


def times_of(problems: Problems, runs: Mapping[str, Sequence[Outcome]]) -> Times | None:
    """Medians over the runs of every group, summed to an iteration; None if a group has no successful run."""
    makespan_s = comp_s = 0.0
    comm_s: dict[str, float] = {}
    for problem in problems:
        group = problem.group
        good = [run for run in runs.get(group.name, ()) if isinstance(run, Measurement)]
        if not good:
            return None
        makespan_s += group.count * median(run.makespan_s for run in good)
        comp_s += group.count * median(run.comp_s for run in good)
        for index, name in enumerate(group.comm_names):
            comm_s[name] = median(run.comm_s[index] for run in good)
    return Times(makespan_s=makespan_s, comp_s=comp_s, comm_s=comm_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedGain:
    """What settings would save of a traced step of `step_s`, and how far the model was off on the groups they change.

    `error_s` is the model's error on windows of the trace that it was not fitted to, `num_held_out` of them, summed
    over the groups that change; all in seconds per step of the average rank. Where `is_held_out` is false, one of those
    groups ran too seldom to leave windows out: its error is on what the model was fitted to, and there is no interval.
    `is_emulated`: the trace is of emulated GPUs, where what was predicted is tried, too.
    """

    step_s: float
    saving_s: float
    error_s: float
    num_held_out: int
    is_held_out: bool
    is_emulated: bool = False

    @property
    def is_beyond_error(self) -> bool:
        """Whether the saving is larger than the model's own error; below it nothing is recommended."""
        return self.saving_s > self.error_s

    @property
    def limits(self) -> tuple[float, float] | None:
        """The least and the most of the step that would be saved, as shares; None where no interval is claimed."""
        if not self.is_held_out:
            return None
        return (self.saving_s - self.error_s) / self.step_s, (self.saving_s + self.error_s) / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FitErrors:
    """How a model that was fitted to a trace reproduces it: a step of the average rank, and by group.

    `error_s` is how far one occurrence of a group is off: the largest of the errors of predicting each half of its
    windows by a fit to the other, and of the difference between its earlier and later steps. Where `num_held_out` is 0
    the group ran too seldom for halves, and it is how far the model is off on what it was fitted to. `per_step` is how
    often a group occurs in a step.
    """

    step_s: float
    per_step: Mapping[str, float]
    error_s: Mapping[str, float]
    num_held_out: Mapping[str, int]
    is_emulated: bool = False

    @property
    def share(self) -> float:
        """The errors of all groups, added up without regard to sign, as a share of the step."""
        return sum(self.per_step[name] * error_s for name, error_s in self.error_s.items()) / self.step_s

    @property
    def num_seen(self) -> int:
        """Groups that ran too seldom to be predicted from others of their windows."""
        return sum(not num for num in self.num_held_out.values())

    def gain(self, savings_s: Mapping[str, float]) -> PredictedGain:
        """The gain of changes that save so much of an occurrence, by group."""
        return PredictedGain(
            step_s=self.step_s,
            saving_s=sum(self.per_step[name] * saving_s for name, saving_s in savings_s.items()),
            error_s=sum(self.per_step[name] * self.error_s[name] for name in savings_s),
            num_held_out=sum(self.num_held_out[name] for name in savings_s),
            is_held_out=all(self.num_held_out[name] for name in savings_s),
            is_emulated=self.is_emulated,
        )


@dataclass(frozen=True, kw_only=True)
class TuneResult(Drawn):
    """One tuning run.

    `configs` is what the tuner stands by, by group and collective, and what the verdict's `"tuned"` arm ran; whether it
    is adopted is the verdict's word. `step_s` is the whole step untouched, as `lagom simulate` and `lagom plan` predict
    it; None where the job has no model that is priced. `tuned_step_s` is that step with `configs` (None also where the
    computation's side is set, which is priced in groups only), `group_steps_s` with those of one group alone, by group
    that changes. `num_stages` are those of the job's pipeline. `launches` are the groups in which the computation's
    side could be tried. `predicted` is the gain with its interval where a trace was all there was.
    `verdict` is None when the run ended before the A/B. `backend_description` says in one line what was run
    (`"gloo, 2 ranks on this machine, loopback"`); an emulated link is named in it. `arm_words` says what the contenders
    are, by arm name: `"default"` is what a reader compares with (`"the native PyTorch call"`). `notes` are caveats, one
    sentence each. `files` is the run folder's content. `measured` is the journal behind it all,
    found again as `search`.
    """

    verb: ClassVar[str] = "tune"

    tool: str = "lagom tune"
    seed: int
    backend: str
    backend_description: str
    tuner: str
    guarded: bool
    job: str
    interrupted: bool = False
    num_measurements: int = field(init=False)
    default: Times | None = field(init=False)
    best: Times | None = field(init=False)
    configs: Mapping[str, Mapping[str, CommConfig]] = field(init=False)
    launches: Mapping[str, LaunchConfig] = field(init=False)
    verdict: Verdict | None
    arm_words: Mapping[str, str] = field(default_factory=dict)
    repeats: int
    step_s: float | None = None
    tuned_step_s: float | None = None
    group_steps_s: Mapping[str, float] = field(default_factory=dict)
    num_stages: int = 1
    predicted: PredictedGain | None = None
    date: str
    duration_s: float
    machine: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    measured: InitVar[MeasuredSearch]

    def __post_init__(self, measured: MeasuredSearch) -> None:
        search = measured
        derived = {
            "_search": search,
            "num_measurements": search.num_measurements,
            "default": search.times_under(DEFAULT_ARM),
            "best": search.times_under(TUNED_ARM),
            "configs": {
                problem.group.name: dict(zip(problem.group.comm_names, search.tuned_of(problem), strict=True))
                for problem in search.problems
            },
            "launches": {
                problem.group.name: launch_of(search.tuned_of(problem))
                for problem in search.problems
                if not problem.launches.is_untouched
            },
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def search(self) -> MeasuredSearch:
        """The journal behind it; `measurements.jsonl` holds it, the JSON does not."""
        search: MeasuredSearch = self.behind("_search", "journal that can be read (measurements.jsonl)")
        return search

    @property
    def folder(self) -> Path | None:
        """The run folder."""
        return self.files[0].parent if self.files else None

    def words_for(self, arm: str) -> str:
        """What an arm is, in words; its name where nobody said."""
        return self.arm_words.get(arm) or _ARM_WORDS.get(arm) or arm

    @property
    def is_prediction(self) -> bool:
        """Whether a model stood in for the machine: the verdict compares its own predictions, nothing was run."""
        return self.backend == PREDICTED

    @property
    def is_simulated(self) -> bool:
        """Whether the times are a model's, also those of a recording: what they favour is predicted, not adopted."""
        return is_modelled(self.backend, self.backend_description)

    @property
    def changes_nothing(self) -> bool:
        """Whether the tuner recommends the default for every group."""
        return all(self.search.tuned_of(problem) == problem.default for problem in self.search.problems)

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

    def table(self) -> list[Row]:
        """One row per measured group and step: what was tried, why, and its times (None where it could not run).

        A knob's column is named COLLECTIVE.KNOB; there is one for every knob that was set anywhere.
        """
        tried = [
            (f"{comm}.{knob}", value)
            for entry in self.search.entries
            for problem in self.search.problems
            for comm, config in _configs(entry, problem)
            for knob, value in config.items()
        ]
        columns = dict.fromkeys(name for name, value in tried if value is not None)
        return [
            _row(entry, problem, columns)
            for entry in self.search.entries
            for problem in self.search.problems
            if problem.group.name in entry.outcomes
        ]


def _configs(entry: Entry, problem: GroupProblem) -> list[tuple[str, dict[str, Cell]]]:
    """The collectives of a group with what was tried of each."""
    tried = entry.step.assignments.get(problem.group.name, ())
    return [(name, asdict(config)) for name, config in zip(problem.group.comm_names, tried, strict=False)]


def _row(entry: Entry, problem: GroupProblem, columns: Mapping[str, None]) -> Row:
    name, step = problem.group.name, entry.step
    outcome = entry.outcomes[name]
    ran = None if isinstance(outcome, Failure) else outcome
    knobs = {f"{comm}.{knob}": value for comm, config in _configs(entry, problem) for knob, value in config.items()}
    return {
        "number": step.number,
        "kind": step.kind.value,
        "arm": step.arm,
        "round": step.round,
        "group": name,
        "makespan_s": None if ran is None else ran.makespan_s,
        "comp_s": None if ran is None else ran.comp_s,
        "comm_s": None if ran is None else ran.total_comm_s,
        "failure": outcome.reason if isinstance(outcome, Failure) else None,
        "reason": step.reasons.get(name, ""),
        **{column: knobs.get(column) for column in columns},
    }
