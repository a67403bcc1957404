"""`lagom watch RUN`: where a run is that goes on, from what it has left so far; the job itself is not touched."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from lagom_overlap.collective import CommConfig
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.run_folder import RUNS_FOLDER, RunFolder, RunKind, SavedRun, list_runs
from lagom_overlap.report.tune.verdict_words import config_text
from lagom_overlap.results.run import Tried
from lagom_overlap.tuners.problem import most_verdict_steps
from lagom_overlap.tuners.registry import search_measurements
from lagom_overlap.units import format_seconds
from lagom_overlap.verbs.run_files import METRICS, num_contenders, read_run, tried_in, whole_lines
from lagom_overlap.verbs.saved_runs import verdict_words

_FOLLOWED: Final = (RunKind.TUNE, RunKind.RUN)
"""Verbs that leave something before they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStand:
    """What was tried of one group of collectives so far: the first makespan, which is the default's, and the smallest.

    Once the run has chosen (`is_final`), `best` is what it chose: of settings that are as fast within the noise a tuner
    takes the cheapest. `metric_h` is Lagom's H of the latest trial that told it, by collective.
    """

    group: str
    num_tried: int
    default_s: float | None
    best_s: float | None
    best: str
    metric_h: dict[str, float]
    is_final: bool = False

    def line(self) -> str:
        """All of it on one line."""
        if self.default_s is None or self.best_s is None:
            return f"{self.group}: {self.num_tried} tried, none ran"
        metric = "; H " + ", ".join(f"{name} {value:.3g}" for name, value in self.metric_h.items())
        word = "chosen" if self.is_final else "best"
        return (
            f"{self.group}: {self.num_tried} tried, first {format_seconds(self.default_s)}, {word} "
            f"{format_seconds(self.best_s)} ({self.best}){metric if self.metric_h else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Where a run is: one line, then one for each group that is tuned; `ending` what came of it once it is over."""

    what: str
    now: str
    groups: tuple[GroupStand, ...]
    ending: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return bool(self.ending)

    def lines(self) -> list[str]:
        """All of it."""
        return [f"{self.what}: {self.now}", *(f"  {group.line()}" for group in self.groups), *self.ending]


def run_to_watch(path: Path | None) -> Path:
    """The run folder that was named, or the latest here or in `lagom-runs`.

    Raises:
        JobError: if there is none.
    """
    if path is not None:
        return path
    runs = [run for run in list_runs(Path()) if run.kind in _FOLLOWED]
    if not runs:
        raise JobError(f"no run of lagom tune or lagom run in this folder or in {RUNS_FOLDER}; name a run folder")
    return runs[0].path


def look(path: Path) -> Watched:
    """Where a run is now.

    Raises:
        JobError: if it is no run folder, or of a verb that writes its folder when it has ended.
        BundleError: if a file of it is damaged.
    """
    saved = RunFolder.read(path)
    if saved.kind is RunKind.RUN:
        return _job(saved)
    if saved.kind is RunKind.TUNE:
        return _search(saved)
    raise JobError(
        f"{str(path)!r} is a run of lagom {saved.kind.words}, which wrote it when it had ended: "
        f"lagom show {shlex.quote(str(path))}"
    )


def _search(saved: SavedRun) -> Watched:
    spec, tried = saved.spec(), tried_in(saved.path)
    searched = len({row.number for row in tried if row.arm is None})
    judged = len({row.number for row in tried if row.arm is not None})
    asked = saved.record.request if isinstance(saved.record.request, dict) else {}
    most = search_measurements(spec.tune.budget.measurements, asked.get("tuner") or spec.tune.tuner)
    now = f"search, {_counted(searched)}, at most {most - searched} more" if searched < most else "search is over"
    if judged:
        left = most_verdict_steps(spec.tune.pairs, num_contenders(saved.path)) - judged
        now = f"verdict, {_counted(judged)}, at most {max(0, left)} more"
    ending: tuple[str, ...] = ()
    name, result = shlex.quote(str(saved.path)), saved.record.result
    if isinstance(result, dict):
        now = "interrupted" if result.get("interrupted") else "ended"
        follow = (
            f"lagom resume {name}" if result.get("interrupted") else f"lagom show {name}    # or: lagom open {name}"
        )
        ending = (f"result: {verdict_words(result) or 'no verdict was reached'}", f"next: {follow}")
    elif saved.has_no_process:
        ending = _cut_off(saved, f"lagom resume {name}")
    return Watched(
        what=f"lagom tune of {spec.job.name!r}", now=now, groups=tuple(_stands(tried, _chosen(result))), ending=ending
    )


def _chosen(result: object) -> Mapping[str, Mapping[str, CommConfig]]:
    """What the run chose, by group and collective; empty before it has."""
    raw = result.get("configs") if isinstance(result, dict) and not result.get("interrupted") else None
    try:
        return msgspec.convert(raw or {}, dict[str, dict[str, CommConfig]])
    except (msgspec.ValidationError, ValueError):
        return {}


def _counted(number: int) -> str:
    return "1 measurement" if number == 1 else f"{number} measurements"


def _cut_off(saved: SavedRun, follow: str) -> tuple[str, ...]:
    process = saved.record.process
    assert process is not None, "only a process that is known can be gone"
    return (f"result: cut off, process {process.pid} is gone; what was measured is kept", f"next: {follow}")


def _job(saved: SavedRun) -> Watched:
    run = read_run(saved)
    now = "no training step was seen yet"
    if run.state is not None:
        left = f", at most {run.state.num_steps_left} steps more" if run.state.num_steps_left else ""
        now = f"{run.state.state}, {run.state.reason}; call sites set: {run.state.num_settings}{left}"
    steps = run.num_steps if run.num_steps is not None else _steps(saved)
    now = f"step {steps}: {now}" if steps is not None else now
    ending: tuple[str, ...] = ()
    name = shlex.quote(str(saved.path))
    if run.conclusion is not None:
        ending = tuple(run.conclusion.lines())
    elif saved.has_no_process:
        ending = _cut_off(saved, f"lagom show {name}")
    return Watched(what=f"lagom run, {run.mode}", now=now, groups=tuple(_stands(run.tried)), ending=ending)


def _steps(saved: SavedRun) -> int | None:
    """Steps of the job so far, as rank 0's gauge says; it is written every 50 steps, and when a state changes."""
    for line in whole_lines(saved.path / METRICS):
        name, _, value = line.rpartition(" ")
        if name.startswith("lagom_steps{"):
            try:
                return int(float(value))
            except ValueError:
                return None
    return None


def _stands(
    tried: Iterable[Tried], chosen: Mapping[str, Mapping[str, CommConfig]] = MappingProxyType({})
) -> Iterable[GroupStand]:
    """By group: only the search's trials count, and a number may fail."""
    groups: dict[str, list[Tried]] = {}
    for row in tried:
        if row.arm is None:
            groups.setdefault(row.group, []).append(row)
    for name, rows in groups.items():
        ran = [row for row in rows if row.makespan_s is not None and row.failure is None]
        as_chosen = [row for row in ran if row.configs == chosen.get(name)]
        best = min(as_chosen or ran, key=lambda row: row.makespan_s or 0.0, default=None)
        metric = next((row.metric_h for row in reversed(rows) if row.metric_h), {})
        configs = {} if best is None else best.configs
        words = sorted({config_text(config) for config in configs.values()})
        yield GroupStand(
            group=name,
            num_tried=len(rows),
            default_s=ran[0].makespan_s if ran else None,
            best_s=None if best is None else best.makespan_s,
            best=words[0] if len(words) == 1 else f"{len(words)} settings",
            metric_h=dict(metric),
            is_final=bool(as_chosen),
        )
