"""What `lagom tune` and `lagom compare` print with --json: typed, stable, in SI units. Format: docs/formats.md."""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from lagom_overlap.backends.base import Assignment, Measurement, Outcome
from lagom_overlap.collective import CommConfig, LaunchConfig, launch_of
from lagom_overlap.report.model import CompareRow
from lagom_overlap.tune.base import Problems
from lagom_overlap.tune.journal import Entry, StepKind
from lagom_overlap.tune.verdict import PairedRatio, Verdict


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one iteration: `makespan_s` and `comp_s` summed over groups x count, `comm_s` per call by name."""

    makespan_s: float
    comp_s: float
    comm_s: dict[str, float]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline's makespan over the tuned one's."""

    median_ratio: float
    q25: float
    q75: float


class VerdictJson(msgspec.Struct, frozen=True, kw_only=True):
    """The paired A/B."""

    pairs: int
    median_ratio: float
    q25: float
    q75: float
    wins: int
    adopted: bool
    over_engine_default: Ratio | None
    over_best_fixed: Ratio | None
    best_fixed: str | None


class ConfigJson(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration; null is a knob that the engine lacks or that is left alone."""

    algorithm: str | None
    protocol: str | None
    transport: str | None
    num_channels: int | None
    num_threads: int | None
    chunk_bytes: int | None


class LaunchJson(msgspec.Struct, frozen=True, kw_only=True):
    """How a group's computation is launched; null is left alone."""

    sm_carveout: int | None
    order: str | None
    priority: str | None


class TuneJson(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `lagom tune`; `launches` is absent where nothing of the computation's side could be tried."""

    tool: str
    version: str
    seed: int
    backend: str
    tuner: str
    guarded: bool
    job: str
    interrupted: bool
    num_measurements: int
    default: Times | None
    best: Times | None
    configs: dict[str, dict[str, ConfigJson]]
    launches: dict[str, LaunchJson] | msgspec.UnsetType = msgspec.UNSET
    verdict: VerdictJson | None
    notes: list[str]
    files: list[str]


class CompareJson(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `lagom compare`; `partial` (else absent) says that the user ended it: what was there by then."""

    job: str
    rows: list[CompareRow]
    notes: list[str]
    partial: bool | msgspec.UnsetType = msgspec.UNSET


def config_json(config: CommConfig) -> ConfigJson:
    """A configuration as it is printed."""
    return ConfigJson(
        algorithm=config.algorithm,
        protocol=config.protocol,
        transport=config.transport,
        num_channels=config.num_channels,
        num_threads=config.num_threads,
        chunk_bytes=config.chunk_bytes,
    )


def configs_json(problems: Problems, assignments: Mapping[str, Assignment]) -> dict[str, dict[str, ConfigJson]]:
    """Group -> collective -> configuration."""
    return {
        problem.group.name: {
            name: config_json(config)
            for name, config in zip(problem.group.comm_names, assignments[problem.group.name], strict=True)
        }
        for problem in problems
    }


def launch_json(launch: LaunchConfig) -> LaunchJson:
    """A launch as it is printed."""
    return LaunchJson(sm_carveout=launch.sm_carveout, order=launch.order, priority=launch.priority)


def launches_json(
    problems: Problems, assignments: Mapping[str, Assignment]
) -> dict[str, LaunchJson] | msgspec.UnsetType:
    """Group -> how its computation is launched, for groups in which something could be tried; unset without any."""
    found = {
        problem.group.name: launch_json(launch_of(assignments[problem.group.name]))
        for problem in problems
        if not problem.launches.is_untouched
    }
    return found or msgspec.UNSET


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


def times_of_assignment(
    problems: Problems, entries: Sequence[Entry], arm: str, assignments: Mapping[str, Assignment]
) -> Times | None:
    """The times of a verdict arm; without a verdict, of the search's runs of the same assignments."""
    judged = [entry for entry in entries if entry.step.kind is StepKind.VERDICT and entry.step.arm == arm]
    runs: dict[str, list[Outcome]] = {problem.group.name: [] for problem in problems}
    if judged:
        for entry in judged:
            for name, outcome in entry.outcomes.items():
                runs[name].append(outcome)
    else:
        for entry in entries:
            for name, outcome in entry.outcomes.items():
                if entry.step.assignments[name] == assignments[name]:
                    runs[name].append(outcome)
    return times_of(problems, runs)


def _ratio(ratio: PairedRatio | None) -> Ratio | None:
    if ratio is None:
        return None
    return Ratio(median_ratio=ratio.median_ratio, q25=ratio.q25, q75=ratio.q75)


def verdict_json(verdict: Verdict | None) -> VerdictJson | None:
    """A verdict as it is printed."""
    if verdict is None:
        return None
    over = verdict.over_default
    return VerdictJson(
        pairs=over.num_pairs,
        median_ratio=over.median_ratio,
        q25=over.q25,
        q75=over.q75,
        wins=over.num_wins,
        adopted=verdict.adopted,
        over_engine_default=_ratio(verdict.over_baselines.get("engine_default")),
        over_best_fixed=_ratio(verdict.over_baselines.get(verdict.best_fixed)) if verdict.best_fixed else None,
        best_fixed=verdict.best_fixed,
    )
