"""Predicted against measured iteration times, for any file in the formats of the shared validation data.

    python benchmarks/iteration_time.py FILE.csv [--json]

Formats, told apart by their columns: vTrain (single node, or with a leading "Parameters (billion)"), the tables of
Narayanan et al. (SC'21, arXiv 2104.04473) and of arXiv 2201.11990, Table 5 of arXiv 2205.05198 (two measured times a
row), and published steps of torchtitan, Megatron-Bridge, NeMo and Megatron-LM (`training_steps`). Rows that a constant
was fitted on are marked; what was fitted on what: docs/accuracy.md.

Every measured value is either predicted or named under `not_simulated` with file, line and reason; `num_rows` counts
both. Wrong rows (`bad_rows`) are named on standard error as well; those that the models do not cover are not wrong. A
file that is no table, or of which no row can be predicted, ends with one line and exit code 2. What a cell may hold:
`measured_rows.py`; no measured step may be shorter than its products at twice the GPU's rate, or longer than a day.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from measured_rows import Named, Row, check_columns, exit_code_of, read, report_named, tried
from training_steps.case import COLUMNS as STEP_COLUMNS
from training_steps.judge import bad_rows, evaluate_steps, refusal
from training_steps.tables import Case, builders_of, checked, columns_of, predict, renamed


def evaluate(path: Path) -> dict[str, object]:
    """The JSON object of a file.

    Raises:
        BadFileError: if the file is no such table.
    """
    return _evaluated(path)[0]


def _evaluated(path: Path) -> tuple[dict[str, object], list[Named]]:
    """The JSON object, and the lines that are not judged."""
    header, table, bad = read(path)
    if {"framework", "gpu_type"} & set(header):  # no other format has these; what it lacks is said
        check_columns(path, header, STEP_COLUMNS)
        return evaluate_steps(path, table, bad)
    columns = columns_of(path, header)
    numbers = {line: number for number, line in enumerate(sorted(one.line for one in (*table, *bad)), start=1)}
    rows: list[dict[str, object]] = []
    refused = [refusal(path, one, row=numbers[one.line]) for one in bad]
    named = list(bad)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in map(renamed, table):
        for what, build in builders_of(columns, row):
            found = tried(row, partial(_judged, build=build))
            if isinstance(found, Named):
                named.append(found)
                refused.append(refusal(path, found, what, numbers[row.line]))
                continue
            case, predicted_s = found
            error_pct = 100.0 * (predicted_s / case.measured_s - 1.0)
            errors[case.fitted].append(abs(error_pct))
            rows.append(
                {
                    "row": numbers[row.line],
                    "line": row.line,
                    "what": case.what,
                    "measured_s": case.measured_s,
                    "predicted_s": predicted_s,
                    "error_pct": error_pct,
                    "fitted": case.fitted,
                }
            )
    result: dict[str, object] = {
        "num_rows": len(rows) + len(refused),
        "mean_abs_error_pct": _mean([*errors[True], *errors[False]]),
        "mean_abs_error_not_fitted_pct": _mean(errors[False]),
        "num_fitted": len(errors[True]),
        "rows": rows,
        "not_simulated": sorted(refused, key=lambda one: int(str(one["line"]))),
        "bad_rows": bad_rows(path, named),
    }
    return result, named


def _judged(row: Row, build: Callable[[Row], Case]) -> tuple[Case, float]:
    case = checked(build(row))
    return case, predict(case)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison; exit code 2 for a file of which nothing can be judged."""
    return exit_code_of("iteration_time", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args(argv)
    result, named = _evaluated(arguments.file)
    report_named(arguments.file, named, num_judged=len(result["rows"]))  # type: ignore[arg-type]  # as below
    if arguments.json:
        print(json.dumps(result))
        return 0
    for row in result["rows"]:  # type: ignore[attr-defined]  # the object is for JSON, its values are of many types
        mark = "  (fitted on)" if row["fitted"] else ""
        print(
            f"row {row['row']:>4} {row['what']:<18} measured {row['measured_s']:>9.4f} s  "
            f"predicted {row['predicted_s']:>9.4f} s  {row['error_pct']:+6.1f} %{mark}"
        )
    for row in result["not_simulated"]:  # type: ignore[attr-defined]  # as above
        if row["is_wrong"]:
            continue  # named on standard error
        print(f"row {row['row']:>4} {row['what']:<18} not simulated: {row['why']}")
    for kind in ("groups", "families"):
        for name, found in result.get(kind, {}).items():  # type: ignore[attr-defined]  # as above
            print(
                f"{name}: {found['num_rows']} rows, {found['mean_abs_error_pct']:.1f} % mean, "
                f"worst {found['worst_pct']:+.1f} %, bias {found['bias_pct']:+.1f} %"
            )
    for key in ("torchtitan_without_compile", "release_floor_pct"):
        if key in result:
            print(f"{key}: {result[key]}")
    for key in ("num_rows", "num_fitted", "mean_abs_error_pct", "mean_abs_error_not_fitted_pct"):
        print(f"{key}: {result[key]}")
    num_wrong = len(result["bad_rows"])  # type: ignore[arg-type]  # as above
    also = f", {num_wrong} of them wrong rows, named on standard error" if num_wrong else ""
    print(f"not simulated: {len(result['not_simulated'])}{also}")  # type: ignore[arg-type]  # as above
    return 0


if __name__ == "__main__":
    sys.exit(main())
