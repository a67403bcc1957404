"""`lagom diff A B`: two run folders of any verb, or two traces: settings, times, and whether the times differ.

What a run set is read from what it left (`settings.json`, `configs.toml`, `plan.toml`) and from its job and request in
run.json; its times are the figures in seconds of its result, and the steps of a training job (`steps.json`). For those
the interval is a moving-block bootstrap of the ratio of medians (Kuensch, Annals of Statistics 17, 1989): neighbouring
steps of a job resemble each other, so blocks are drawn, not steps. It holds what differs between these two runs'
steps; whether another start of the same job would differ as much, two runs cannot tell, and the result says so.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from lagom_overlap.collective import CommConfig
from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.errors import BundleError
from lagom_overlap.export.saved import SETTINGS_NAME, read_saved
from lagom_overlap.jobfile.run_folder import RECORD, RunFolder, RunKind, SavedRun, job_command
from lagom_overlap.record import read_regular
from lagom_overlap.report.proof import read_proof
from lagom_overlap.results.conclusion import UNKNOWN, Conclusion
from lagom_overlap.results.diff import ChangedSetting, ComparedTime, DiffResult
from lagom_overlap.results.proof import ProofResult
from lagom_overlap.results.step_times import read_step_times
from lagom_overlap.toml_tables import parse_toml
from lagom_overlap.units import format_bytes, format_percent
from lagom_overlap.verbs.export import MAX_CONFIGS_BYTES
from lagom_overlap.verbs.given import GivenKind
from lagom_overlap.verbs.run import provable
from lagom_overlap.verbs.saved_runs import figures

_NUM_RESAMPLES: Final = 2000
"""Enough for the ends of a 95 % interval to be stable to a few per cent of its length."""
_CONFIDENCE: Final = (2.5, 97.5)
"""Percentiles: the ends of a 95 % interval."""
MIN_STEPS: Final = 20
"""Settled steps of each run from which an interval is told: fewer make no blocks."""
_TOML: Final = ("configs.toml", "plan.toml")
_NO_TIMES: Final = ("duration_s", "solve_s")
"""How long we took ourselves, which is no time of the job."""
_THE_STEP: Final = "the step"
_STEP_KEYS: Final = MappingProxyType(
    {
        RunKind.TUNE: ("tuned_step_s", "step_s", "best.makespan_s"),
        RunKind.PLAN: ("iteration_s.after",),
        RunKind.SIMULATE: ("iteration_s",),
        RunKind.SIMULATE_CAPTURE: ("iteration_s",),
        RunKind.LAYOUTS: ("rows.0.iteration_s",),
    }
)
"""Where a result has the step with what the run chose (of a tuned job without a priced step, its groups): the first."""


@dataclass(frozen=True, slots=True)
class _Side:
    """What one run tells: settings in words by name, single times and the steps of a job, in seconds."""

    run: SavedRun
    settings: Mapping[str, str]
    has_settings: bool
    times: Mapping[str, float]
    steps_s: tuple[float, ...]


def is_run(path: Path) -> bool:
    """Whether it is a run folder; a trace or a folder of them otherwise."""
    return (path / RECORD).is_file()


def run_diff(first: Path, second: Path, *, seed: int = 0) -> DiffResult:
    """Two run folders compared.

    Raises:
        JobError: if one is no run folder.
        BundleError: if one is damaged.
    """
    one, two = _side(first), _side(second)
    times = tuple(_times(one, two, seed))
    settings = tuple(_changed(one.settings, two.settings))
    places = (({**side.run.record.machine, **side.run.record.versions}) for side in (one, two))
    where = tuple(row for row in _changed(*places) if row.name != "load_1min")
    emulated = (side.run.record.machine.get("emulated_by", "") for side in (two, one))
    return DiffResult(
        first=first,
        second=second,
        kinds=(one.run.kind, two.run.kind),
        settings=settings,
        where=where,
        times=times,
        conclusion=_conclusion(one, two, settings, times).under(next(filter(None, emulated), "")),
    )


def _side(path: Path) -> _Side:
    run = RunFolder.read(path)
    steps = read_step_times(path)
    return _Side(
        run=run,
        settings=dict(_settings(run)),
        has_settings=SETTINGS_NAME in run.files and bool(read_saved(path / SETTINGS_NAME).settings),
        times=_times_of(run),
        steps_s=() if steps is None else steps.settled_s,
    )


def _settings(run: SavedRun) -> Iterator[tuple[str, str]]:
    yield from _flat(run.record.request, "request")
    yield from _flat(run.record.job, "job")
    if SETTINGS_NAME in run.files:
        yield from map(_site, read_saved(run.path / SETTINGS_NAME).settings)
    for name in _TOML:
        if name in run.files:
            yield from _flat(_table(run.path / name), name.partition(".")[0])
        elif (run.path / name).exists():
            raise BundleError(f"{str(run.path / name)!r} is no regular file")


def _site(setting: SiteSetting) -> tuple[str, str]:
    call = setting.site.call
    order = f" #{call.creation_order}" if call.creation_order else ""
    where = f"{call.kind} {format_bytes(call.num_bytes)}, {call.description}{order} of {call.num_ranks} ranks"
    return f"{where}, call {setting.site.occurrence + 1}", _config(setting.config)


def _config(config: CommConfig) -> str:
    known = {name: value for name, value in msgspec.to_builtins(config).items() if value is not None}
    return ", ".join(f"{name} {value}" for name, value in known.items())


def _table(path: Path) -> object:
    try:
        return parse_toml(read_regular(path, MAX_CONFIGS_BYTES))
    except OSError as error:
        raise BundleError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BundleError(f"{str(path)!r} is damaged: {error}") from None


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    """The leaves of plain JSON or TOML by their dotted names; a list is one leaf unless it holds tables."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from _flat(inner, f"{name}.{key}")
        case list() if any(isinstance(inner, dict) for inner in value):
            for number, inner in enumerate(value):
                yield from _flat(inner, f"{name}[{number}]")
        case list() if name == "request.command":
            yield name, shlex.join(map(str, value))
        case None:
            return
        case _:
            yield name, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _times_of(run: SavedRun) -> dict[str, float]:
    """The times of a run by their names (s), first of them the step with what the run chose."""
    if (proof := read_proof(run.path)) is not None:
        return _proven(proof)
    result, step = run.record.result, dict[str, float]()
    keys = _STEP_KEYS.get(run.kind, ())
    chosen = next((key for key in keys if isinstance(value := _at(result, key), int | float) and value > 0), None)
    if chosen is not None:
        step[_THE_STEP] = float(_at(result, chosen))
    elif run.kind is RunKind.ANALYZE and (spans := _spans(result)):
        step[_THE_STEP] = sum(spans) / len(spans)
    every = {name: value for name, unit, value in figures(result) if unit == "_s" and value > 0}
    return step | {name: value for name, value in every.items() if name.rpartition(".")[2] not in _NO_TIMES}


def _at(value: Any, name: str) -> Any:  # any JSON value
    """What stands under a dotted name, of a list by its number; None where nothing does."""
    for part in name.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return value


def _spans(result: object) -> list[float]:
    """The mean step of each rank of an analysis (s)."""
    ranks = _at(result, "ranks")
    pairs = [(_at(rank, "span_s"), _at(rank, "steps")) for rank in ranks] if isinstance(ranks, list) else []
    typed = [(span, steps) for span, steps in pairs if isinstance(span, float) and isinstance(steps, int)]
    return [span / max(1, steps) for span, steps in typed if span > 0]  # a flight recorder has no spans


def _proven(proof: ProofResult) -> dict[str, float]:
    """The steps of both sides of a proof (s)."""
    both = {_THE_STEP: proof.configured_s, "the default's step": proof.default_s}
    return {name: median(times) for name, times in both.items() if times}


def _changed(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[ChangedSetting]:
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            yield ChangedSetting(name=name, first=first.get(name), second=second.get(name))


def _times(one: _Side, two: _Side, seed: int) -> Iterator[ComparedTime]:
    if one.steps_s and two.steps_s:
        first_s, second_s = median(one.steps_s), median(two.steps_s)
        bounds = ratio_interval(one.steps_s, two.steps_s, seed=seed)
        low, high = bounds or (None, None)
        name = f"step, median of {len(one.steps_s)} and {len(two.steps_s)}"
        yield ComparedTime(name=name, first_s=first_s, second_s=second_s, ratio=first_s / second_s, low=low, high=high)
    for name, first_s in one.times.items():
        if name in two.times:
            yield ComparedTime(name=name, first_s=first_s, second_s=two.times[name], ratio=first_s / two.times[name])


def ratio_interval(first_s: Sequence[float], second_s: Sequence[float], *, seed: int = 0) -> tuple[float, float] | None:
    """The 95 % interval of the ratio of medians, first over second; None below `MIN_STEPS` steps of either."""
    if min(len(first_s), len(second_s)) < MIN_STEPS:
        return None
    random = np.random.default_rng(seed)
    medians = [_resampled_medians(np.array(each, float), random) for each in (first_s, second_s)]
    low, high = np.percentile(medians[0] / medians[1], _CONFIDENCE)
    return float(low), float(high)


def _resampled_medians(
    values: np.ndarray[tuple[int], np.dtype[np.float64]], random: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Medians of resamples made of blocks of 3 n^(1/3) neighbours, which overlap.

    The rate is Kuensch's; the factor is chosen for steps that resemble their neighbours by 0.7 (see the tests).
    """
    length = min(len(values) // 2, ceil(3 * len(values) ** (1 / 3)))
    num_blocks = ceil(len(values) / length)
    starts = random.integers(0, len(values) - length + 1, size=(_NUM_RESAMPLES, num_blocks))
    picks = (starts[:, :, None] + np.arange(length)).reshape(_NUM_RESAMPLES, -1)[:, : len(values)]
    medians: np.ndarray[tuple[int], np.dtype[np.float64]] = np.median(values[picks], axis=1)
    return medians


def _conclusion(
    one: _Side, two: _Side, settings: Sequence[ChangedSetting], times: Sequence[ComparedTime]
) -> Conclusion:
    """The first time of all decides: of a training job its steps, else what its verb puts first."""
    command = next((line for side in (two, one) if (line := job_command(side.run.path)) != UNKNOWN), UNKNOWN)
    if not times:
        kinds = " and ".join(f"a run of lagom {side.run.kind.words}" for side in (one, two))
        why = f"{kinds} have no time in common"
        if RunKind.RUN in (one.run.kind, two.run.kind):
            why += ": a training job's steps are kept once it has settled"
        return Conclusion("the times cannot be compared", why, f"lagom run --observe -- {command}    # times the steps")
    first = times[0]
    several = f"{len(settings)} settings differ" if len(settings) > 1 else "one setting differs"
    differ = several if settings else "nothing was set otherwise"
    if first.verdict:
        is_open = first.verdict == "not measurably different"
        sentence = "the runs are not measurably different" if is_open else f"the second run is {first.verdict}"
        why = f"{first.words}; {differ}. One run each: what differs from start to start is not known"
        return Conclusion(sentence, why, _proof_line(command, two, one))
    way = "shorter" if first.ratio > 1 else "longer"
    sentence = f"{first.name} is {format_percent(abs(first.second_s / first.first_s - 1))} {way} in the second run"
    if first.ratio == 1:
        sentence = f"{first.name} is the same"
    return Conclusion(
        sentence, f"{differ}; one figure each: no interval", f"lagom run --online -- {command}    # measures it"
    )


def _proof_line(command: str, *sides: _Side) -> str:
    """What proves the settings of a run against the default: the first side that leaves some which can be proven."""
    for side in sides:
        has_some = any(name in side.run.files for name in _TOML) or side.has_settings
        config = side.settings.get("request.config")
        for subject in ([side.run.path] if has_some else []) + ([Path(config)] if config else []):
            if (kind := provable(subject)) is not None:
                words = "in turns in one job" if kind is GivenKind.SETTINGS else "by restarts of the job"
                return f"lagom run --prove {shlex.quote(str(subject))} -- {command}    # {words}"
    return f"lagom run --online -- {command}    # neither run left settings that can be proven"
