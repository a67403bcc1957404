"""The contention model against measured GPUs, row by row: other people's, and one H100 of ours.

    python benchmarks/contention_points.py FILE.csv [--json] [--rows]

Formats, told apart by their columns: products next to RCCL (`overlap_points_amd*.csv`), products on some of the compute
units (`amd_gemm_vs_cus*.csv`), an all-reduce behind a product (`overlap_surface_nvidia*.csv`), a kernel during an
injector on one GPU (`results/h100_2026-11-22/surface*.csv`). What a timed iteration is stands in `measured_overlap`.
Predicted are the slowdown of the computation, the slowdown of the communication and the makespan, whichever the row
has; what was measured of each side alone is an input. AMD and RCCL are simulated, not tuned.

Wrong rows are named with file, line and reason, on standard error and in the JSON object, and the rest is judged; a
file that is no such table, or of which no row can be judged, ends with one line and exit code 2. What a cell may hold:
`measured_rows.py`; no product may be faster than twice its GPU's rate, no collective than any link (`judged.py`).
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lagom_overlap.cost import Profile, load_profile
from measured_overlap import amd, nvidia, one_gpu
from measured_overlap.judged import Judged
from measured_rows import BadFileError, Named, Row, exit_code_of, read, report_named, tried


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a file."""

    judged: tuple[Judged, ...]
    bad: tuple[Named, ...]
    not_modelled: tuple[Named, ...]

    @property
    def num_rows(self) -> int:
        """Lines of the file."""
        return len({one.line for one in (*self.judged, *self.bad, *self.not_modelled)})


def judge_of(header: Sequence[str], rows: Sequence[Row], profile: Profile, name: str) -> Callable[[Row], list[Judged]]:
    """How rows of a file with these columns are judged.

    Raises:
        BadFileError: if it is none of the formats; what is missing of the nearest is named.
    """
    formats: tuple[tuple[tuple[str, ...], Callable[[Row], list[Judged]]], ...] = (
        (amd.COLUMNS, lambda row: amd.judge(row, profile)),
        (amd.CURVE_COLUMNS, lambda row: amd.judge_curve(row, rows, profile)),
        (nvidia.COLUMNS, lambda row: nvidia.judge(row, rows, profile)),
        (one_gpu.COLUMNS, lambda row: one_gpu.judge(row, profile)),
    )
    for columns, judge in formats:
        if set(columns) <= set(header):
            return judge
    missing = min(([c for c in columns if c not in header] for columns, _ in formats), key=len)
    raise BadFileError(f"{name!r} is none of the formats: it lacks the columns {', '.join(missing)}")


def report_of(path: Path, profile: Profile, progress: Callable[[int, int], None] = lambda done, total: None) -> Report:
    """Every row of a file, judged or named.

    Raises:
        BadFileError: if the file is no such table.
    """
    header, rows, bad = read(path)
    judge = judge_of(header, rows, profile, str(path))
    judged: list[Judged] = []
    skipped: list[Named] = []
    for place, row in enumerate(rows):
        progress(place, len(rows))
        found = tried(row, judge)
        if isinstance(found, Named):
            (bad if found.is_wrong else skipped).append(found)
        else:
            judged += found
    progress(len(rows), len(rows))
    return Report(tuple(judged), tuple(sorted(bad, key=lambda one: one.line)), tuple(skipped))


def figures(judged: Iterable[Judged]) -> dict[str, Any]:  # JSON
    """Mean and worst absolute error, bias (%), and the number of rows."""
    errors = [one.error for one in judged]
    return {
        "mean_abs_error_pct": round(100 * mean(map(abs, errors)), 2) if errors else None,
        "max_abs_error_pct": round(100 * max(map(abs, errors)), 2) if errors else None,
        "bias_pct": round(100 * mean(errors), 2) if errors else None,
        "num_rows": len(errors),
    }


def as_json(path: Path, report: Report, with_rows: bool) -> dict[str, Any]:
    """The report as JSON."""
    claimed = [one for one in report.judged if one.claimed]
    groups = sorted({(one.quantity, one.series, one.kind) for one in report.judged})
    found: dict[str, Any] = {
        "file": str(path),
        "num_rows": report.num_rows,
        **{key: value for key, value in figures(claimed).items() if key != "num_rows"},
        "num_values_claimed": len(claimed),
        "by_quantity": {
            quantity: figures(one for one in claimed if one.quantity == quantity)
            for quantity in sorted({one.quantity for one in claimed})
        },
        "by_kind": [
            {
                "quantity": quantity, "series": series, "kind": kind,
                "claimed": all(one.claimed for one in report.judged if (one.quantity, one.series, one.kind) == group),
                **figures(one for one in report.judged if (one.quantity, one.series, one.kind) == group),
            }
            for group in groups for quantity, series, kind in [group]
        ],
        "not_modelled": [{"line": one.line, "why": one.why} for one in report.not_modelled],
        "bad_rows": [{"file": str(path), "line": one.line, "why": one.why} for one in report.bad],
    }  # fmt: skip
    if with_rows:
        found["rows"] = [
            {
                "line": one.line, "quantity": one.quantity, "series": one.series, "kind": one.kind,
                "family": one.family, "measured": one.measured, "predicted": one.predicted, "claimed": one.claimed,
            }
            for one in report.judged
        ]  # fmt: skip
    return found


def print_table(found: dict[str, Any]) -> None:
    """The report as plain text."""

    def line(name: str, row: dict[str, Any]) -> None:
        print(
            f"{name:72} {row['num_rows']:5}  mean {row['mean_abs_error_pct']:6.2f} %"
            f"  worst {row['max_abs_error_pct']:6.1f} %  bias {row['bias_pct']:+6.1f} %"
        )

    print(f"{found['file']}: {found['num_rows']} rows, {found['num_values_claimed']} values claimed")
    for quantity, row in found["by_quantity"].items():
        line(quantity, row)
    print()
    for row in found["by_kind"]:
        line(f"{row['quantity']}  {row['series']}  {row['kind']}{'' if row['claimed'] else '  (no claim)'}", row)
    print()
    for why, count in Counter(one["why"] for one in found["not_modelled"]).most_common():
        lines = [str(one["line"]) for one in found["not_modelled"] if one["why"] == why]
        shown = ", ".join(lines[:8]) + (", ..." if len(lines) > 8 else "")
        print(f"not modelled ({count}): {why} [lines {shown}]")
    if found["bad_rows"]:
        print(f"bad rows ({len(found['bad_rows'])}): named on standard error")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; exit code 2 where nothing in the file can be judged."""
    return exit_code_of("contention_points", lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--rows", action="store_true", help="every value in the JSON object")
    options = parser.parse_args(arguments)

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total} rows", end="\n" if done == total else "", file=sys.stderr)

    report = report_of(options.file, load_profile("plausible"), progress)
    report_named(options.file, [*report.bad, *report.not_modelled], num_judged=len(report.judged))
    found = as_json(options.file, report, options.rows)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print_table(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
