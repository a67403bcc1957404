"""`lagom runs` and `lagom open`: the run folders that there are, and the page of one."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.run_folder import RUNS_FOLDER, RunFolder, RunKind, SavedRun, list_runs
from lagom_overlap.results.listing import ListedRun, RunsResult
from lagom_overlap.results.tune import is_modelled

REPORT: Final = "report.html"
_UNITS: Final = ("_per_s", "_s", "_bytes", "mfu")
"""Ends of the keys that are figures."""
_DEPTH: Final = 3
"""Tables in tables whose figures are looked at: below lie those of single collectives and ranks."""


def verdict_words(result: object) -> str:
    """What a run of `lagom tune` concluded, from its run.json; "" where it has no verdict."""
    verdict = result.get("verdict") if isinstance(result, dict) else None
    if not isinstance(result, dict) or not isinstance(verdict, dict) or "adopted" not in verdict:
        return ""
    if verdict["adopted"] is not True:
        return "not adopted, the default stays"
    if is_modelled(str(result.get("backend")), str(result.get("backend_description"))):
        return "faster by the model, not measured: only an A/B on the machine can adopt it"
    return "adopted"


def figures(result: object, place: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, str, float]]:
    """The figures of a result as run.json has it: dotted names, the end that tells the unit, and the values."""
    if not isinstance(result, dict):
        return
    for key, value in result.items():
        name = f"{place}.{key}" if place else key
        unit = next((end for end in _UNITS if key.endswith(end)), "")
        if isinstance(value, dict) and depth > 1:
            # Of a pair such as iteration_s = {before, after} the outer name has the unit.
            inner = {f"{inner}{unit}": number for inner, number in value.items()} if unit else value
            yield from figures(inner, name.removesuffix(unit), depth - 1)
        elif unit and isinstance(value, int | float) and not isinstance(value, bool):
            yield name, unit, float(value)


def run_runs(below: Path | None = None) -> RunsResult:
    """The runs in a folder (None: this one) and in its `lagom-runs`, the latest first.

    Raises:
        JobError: if a folder was named that is none.
    """
    if below is not None and not below.is_dir():
        raise JobError(f"{str(below)!r} {'is no folder' if below.exists() else 'does not exist'}")
    folder = below or Path()
    return RunsResult(below=folder, runs=tuple(map(_listed, list_runs(folder))))


def report_of(run: Path | None = None) -> Path:
    """The page of a run; without one named, of the latest here or in `lagom-runs` that has a page.

    Raises:
        JobError: if there is no such run, or it has no page.
        BundleError: if its record cannot be read.
    """
    if run is None:
        found = next((listed.report for listed in run_runs().runs if listed.report is not None), None)
        if found is None:
            raise JobError(
                f"no run in this folder or in {RUNS_FOLDER} has a report; name a run folder, or see: lagom runs FOLDER"
            )
        return found
    saved = RunFolder.read(run)
    if REPORT not in saved.files:
        remedy = f"; lagom resume {shlex.quote(str(run))} writes one" if saved.kind is RunKind.TUNE else ""
        has = ", ".join(saved.files)
        raise JobError(f"{str(run)!r} is a run of lagom {saved.kind.words} without a report; it has {has}{remedy}")
    return run / REPORT


def _listed(saved: SavedRun) -> ListedRun:
    job = saved.record.job
    table = job.get("job") if isinstance(job, dict) else None
    name = table.get("name") if isinstance(table, dict) else None
    return ListedRun(
        folder=saved.path,
        kind=saved.kind,
        job=name if isinstance(name, str) else "",
        date=saved.record.date,
        report=saved.path / REPORT if REPORT in saved.files else None,
    )
