"""`lagom_overlap.load(RUN)`: the typed result of a run folder, whichever verb wrote it."""

from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

import msgspec

from lagom_overlap.collective import UNTOUCHED_LAUNCH, launched
from lagom_overlap.errors import BundleError, LagomError, MissingDependencyError, UnknownNameError, in_words
from lagom_overlap.jobfile.run_folder import RECORD, RunFolder, RunKind, SavedRun
from lagom_overlap.record import read_regular
from lagom_overlap.registry import RESULTS
from lagom_overlap.registry import load as load_registered
from lagom_overlap.report.proof import read_proof
from lagom_overlap.results.base import Result, decoded
from lagom_overlap.results.tune import MeasuredSearch, TuneResult
from lagom_overlap.trace.chrome_writer import read_timelines
from lagom_overlap.verbs.own_trace import read_own_run
from lagom_overlap.verbs.run_files import read_run

_HOMES: Final = MappingProxyType(
    {
        RunKind.ANALYZE: "analyze:AnalyzeResult",
        RunKind.COMPARE: "compare:CompareResult",
        RunKind.COMPARE_PLANNERS: "compare:ComparePlannersResult",
        RunKind.LAYOUTS: "layouts:LayoutsResult",
        RunKind.PLAN: "plan:PlanResult",
        RunKind.SELFTEST: "selftest:SelfTestResult",
        RunKind.SIMULATE: "simulate:SimulateResult",
        RunKind.SIMULATE_CAPTURE: "simulate:SimulateCaptureResult",
        RunKind.TUNE: "tune:TuneResult",
    }
)
"""Module of `results` and class; each is imported only when such a run is loaded."""
_MAX_BYTES: Final = 1 << 30
"""Chosen: the journal of a long search has some MB."""


def load_run(path: Path) -> Result:
    """The result that the verb returned, with what else of it the folder holds.

    Raises:
        JobError: if it is no run folder.
        BundleError: if it is damaged, the run has not ended, or its verb has no result that can be typed.
        MissingDependencyError: if its verb is another distribution's that is not installed.
    """
    saved = RunFolder.read(path)
    if saved.kind is RunKind.RUN:
        return read_proof(path) or read_run(saved)
    if saved.kind is RunKind.REPRODUCE:
        raise BundleError(
            f"{str(path)!r} is a run of lagom reproduce, whose figures have no typed result: read 'result' in {RECORD}"
        )
    if saved.record.result is None:
        raise BundleError(f"{str(path)!r} is a run of lagom {saved.kind.words} that has not ended, or was cut off")
    result = _decoded(saved)
    _attach(result, saved)
    return result


def _class_of(saved: SavedRun) -> type[Result]:
    home = _HOMES.get(saved.kind)
    if home is not None:
        module, _, name = home.partition(":")
        return cast("type[Result]", getattr(import_module(f"lagom_overlap.results.{module}"), name))
    try:
        return cast("type[Result]", load_registered(RESULTS, "result", saved.kind))
    except UnknownNameError:
        raise MissingDependencyError(
            f"{str(saved.path)!r} is a run of lagom {saved.kind.words}, which is not installed here"
        ) from None


def _decoded(saved: SavedRun) -> Result:
    try:
        return decoded(_class_of(saved), saved.record.result)
    except (msgspec.ValidationError, ValueError, LagomError) as error:
        made_by = saved.record.versions.get("lagom-overlap", "?")
        raise BundleError(
            f"run folder {str(saved.path)!r}, written by version {made_by}, cannot be typed: {in_words(str(error))}"
        ) from None


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise BundleError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def _attach(result: Result, saved: SavedRun) -> None:
    """Gives a result back what stands behind it, where the folder holds it; `Result.behind` says what is missing."""
    if isinstance(result, TuneResult) and saved.record.from_trace is None:
        run = read_own_run(saved.path)
        recommended = {
            problem.group.name: launched(
                (result.configs[problem.group.name][name] for name in problem.group.comm_names),
                result.launches.get(problem.group.name, UNTOUCHED_LAUNCH),
            )
            for problem in run.problems
        }
        search = MeasuredSearch(problems=run.problems, entries=run.entries, recommended=recommended)
        object.__setattr__(result, "_search", search)
    elif hasattr(type(result), "timeline") and "timeline.json" in saved.files:
        timelines = read_timelines(_content(saved.path / "timeline.json"))
        if len(timelines) == 1:
            object.__setattr__(result, "_timeline", next(iter(timelines.values())))
