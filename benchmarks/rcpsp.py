"""Solves PSPLIB's single-mode projects: every `.sm` file below a folder, one after the other.

    python benchmarks/rcpsp.py ../shared/data/psplib --seconds 30 --best-known ../shared/data/psplib/best_known.csv
    python benchmarks/rcpsp.py FOLDER --seconds 30 --json

With --json one object comes: {"rows": [{"instance", "makespan", "lower_bound", "optimal", "seconds"}]}. Every schedule
is checked by code that shares nothing with what made it. --best-known names a table with the columns instance and ub;
the gap is makespan over ub, minus one.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from lagom_overlap.errors import LagomError
from lagom_overlap.plan.rcpsp import read_sm
from lagom_overlap.plan.rcpsp.solve import solve


def solved(path: Path, limit_s: float, seed: int) -> dict[str, Any]:
    """One row: what was found of a file's project."""
    project = read_sm(path)
    begin = perf_counter()
    solution = solve(project, limit_s, seed)
    return {
        "instance": project.name,
        "makespan": solution.makespan,
        "lower_bound": solution.lower_bound,
        "optimal": solution.is_optimal,
        "seconds": round(perf_counter() - begin, 2),
    }


def best_known(path: Path | None) -> dict[str, int]:
    """The best makespans known, by instance."""
    if path is None:
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["instance"]: int(row["ub"]) for row in csv.DictReader(file)}


def shown(rows: list[dict[str, Any]], known: dict[str, int]) -> Table:
    """The rows as a table, with gaps where the best makespan is known."""
    table = Table("instance", "makespan", "bound", "optimal", "seconds", "best known", "gap %")
    for row in rows:
        best = known.get(row["instance"])
        gap = "" if best is None else f"{100 * (row['makespan'] / best - 1):.2f}"
        table.add_row(
            *(str(row[key]) for key in ("instance", "makespan", "lower_bound", "optimal", "seconds")),
            str(best or ""),
            gap,
        )
    return table


def main() -> int:
    """Runs the benchmark; 2 if there is nothing to solve or a file cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="searched for .sm files, recursively")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each project (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--best-known", type=Path, help="table of the best makespans known")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    if not args.seconds > 0:
        parser.error(f"--seconds is {args.seconds}, must be positive")
    paths = sorted(args.folder.rglob("*.sm"))
    if not paths:
        parser.error(f"no .sm file below {str(args.folder)!r}")
    rows = []
    try:
        for path in paths:
            rows.append(solved(path, args.seconds, args.seed))
            print(rows[-1], file=sys.stderr)
    except LagomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        Console(width=110).print(shown(rows, best_known(args.best_known)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
