"""Errors of a table of published steps: by row, by group, by left-out family, and how far equal jobs lie apart.

Constants were fitted on the dense Megatron rows (`fit_steps.py`) and on Qwen3-30B-A3B (`fit_mixtures.py`); no fit saw
the others. Rows that run the same job under several releases bound what a model without the release can reach:
`release_floor_pct` is the mean error of the best single number for each such job.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lagom_overlap.sim.training import TrainingTimes
from measured_rows import Named, Row, tried
from training_steps.case import StepCase
from training_steps.jobs import case_of
from training_steps.predict import predicted

FITTED_GROUP: Final = "dense Megatron"
"""A100 and H100 with HBM2e have no constant from a step; the others' come from this group (`fit_steps.py`)."""
FITTED_DENSE: Final = ("gpt-5b", "gpt-20b", "llama-2-7b", "llama-2-70b", "llama-3-8b", "nemotron-3-8b")
"""The families of that group that the shared rows have."""
FITTED_FAMILY: Final = "qwen3-30b-a3b"
"""The mixture of experts that launches and rearranging kernels were fitted on (`fit_mixtures.py`)."""


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _summary(errors: Sequence[float]) -> dict[str, object]:
    sizes = [abs(error) for error in errors]
    return {
        "num_rows": len(errors),
        "mean_abs_error_pct": _mean(sizes),
        "worst_pct": max(errors, key=abs, default=None),
        "bias_pct": _mean(errors),
    }


def refusal(path: Path, one: Named, what: str = "", row: int | None = None) -> dict[str, object]:
    """A line that is not judged, as the JSON object has it; `row` where the format counts from its first row."""
    return {
        "row": one.line if row is None else row,
        "what": what,
        "why": f"{path.name}:{one.line}: {one.why}",
        "file": str(path),
        "line": one.line,
        "is_wrong": one.is_wrong,
    }


def bad_rows(path: Path, named: Sequence[Named]) -> list[dict[str, object]]:
    """The wrong ones among the lines that are not judged, as the JSON object of every format has them."""
    return [{"file": str(path), "line": one.line, "why": one.why} for one in named if one.is_wrong]


def _judged(row: Row) -> tuple[StepCase, TrainingTimes]:
    case = case_of(row)
    return case, predicted(case)


def evaluate_steps(path: Path, lines: Sequence[Row], broken: Sequence[Named]) -> tuple[dict[str, object], list[Named]]:
    """The JSON object of a table of steps, and the lines that are not judged.

    It has the same keys as of every other table, and errors by group and family.
    """
    rows: list[dict[str, object]] = []
    refused = [refusal(path, one) for one in broken]
    named = list(broken)
    every: dict[bool, list[float]] = {True: [], False: []}
    errors: dict[str, list[float]] = defaultdict(list)
    families: dict[str, list[float]] = defaultdict(list)
    peers: list[float] = []
    same: dict[object, list[float]] = defaultdict(list)
    for row in lines:
        found = tried(row, _judged)
        if isinstance(found, Named):
            named.append(found)
            refused.append(refusal(path, found, row.text("model")[:40]))
            continue
        case, times = found
        error_pct = 100.0 * (times.iteration_s / case.measured_s - 1.0)
        is_dense = case.group == FITTED_GROUP and case.family in FITTED_DENSE
        fitted = is_dense or case.family == FITTED_FAMILY
        every[fitted].append(error_pct)
        errors[case.group].append(error_pct)
        families[f"{case.group}, {case.family}, {case.cluster.name}"].append(error_pct)
        if case.framework == "torchtitan":
            peers.append(error_pct)
        same[case.job].append(case.measured_s)
        stage = times.stages[0]
        exposed_s = sum(comm.exposed_s + comm.stretched_s for comm in stage.comms.values())
        rows.append(
            {
                "row": case.line,
                "what": f"{case.group}: {case.what}",
                "measured_s": case.measured_s,
                "predicted_s": times.iteration_s,
                "error_pct": error_pct,
                "fitted": fitted,
                "computation_s": stage.compute_s,
                "communication_s": exposed_s,
                "bubble_s": stage.bubble_s,
            }
        )
    result: dict[str, object] = {
        "num_rows": len(rows) + len(refused),
        "mean_abs_error_pct": _mean([abs(error) for error in (*every[True], *every[False])]),
        "mean_abs_error_not_fitted_pct": _mean([abs(error) for error in every[False]]),
        "num_fitted": len(every[True]),
        "groups": {name: _summary(found) for name, found in sorted(errors.items())},
        "families": {name: _summary(found) for name, found in sorted(families.items())},
        "torchtitan_without_compile": _summary(peers),
        "release_floor_pct": _floor(same),
        "rows": rows,
        "not_simulated": refused,
        "bad_rows": bad_rows(path, named),
    }
    return result, named


def _floor(same: dict[object, list[float]]) -> float | None:
    """Mean distance (percent) of jobs that were measured more than once to the median of their measurements."""
    found = [
        100.0 * abs(statistics.median(times) / time - 1.0)
        for times in same.values()
        if len(times) > 1 and max(times) > min(times)
        for time in times
    ]
    return _mean(found)
