"""Plans of several planners against the program on gloo ranks: predicted, measured, and whether results are equal.

    python benchmarks/plan_execution.py examples/plan_*_gloo.toml [--planners ours,centauri] [--rounds 11] [--json]

Per job file the operators are timed once, and every planner plans with those times. Measured times are medians over
shuffled rounds of the slowest rank; a speed-up is of program over plan within a round, with an interval (`paired.py`)
and what follows from it. A planner that cannot plan a program, or whose plan the ranks cannot run, says why.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from lagom_overlap.errors import LagomError, RankError
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.tuners.verdict import compared
from lagom_overlap.verbs.plan import planned
from lagom_overlap.verbs.plan_problem import PlanFlags, PlanInput, read_input
from lagom_overlap.workload.iteration import graph_digest

PLANNERS = "program_order,ours,centauri,concerto,megatron"


def rows_of(job: Path, planners: list[str], num_rounds: int) -> list[dict[str, Any]]:
    """One row per planner."""
    given = read_input(job, PlanFlags(execute=True))
    rows: list[dict[str, Any]] = []
    try:
        for name in planners:
            said = {"job": job.name, "ranks": given.num_ranks, "planner": name, "load": os.getloadavg()[0]}
            try:
                rows.append(said | _row(given, name, num_rounds))
            except RankError as error:
                rows.append(said | {"refused": str(error)})
                given.close()
                given = read_input(job, PlanFlags(execute=True))  # the ranks are gone; these time the operators again
            except LagomError as error:
                rows.append(said | {"refused": str(error)})
    finally:
        given.close()
    return rows


def _row(given: PlanInput, name: str, num_rounds: int) -> dict[str, Any]:
    assert given.ranks is not None, "the job names a backend that runs programs"
    found = planned(given, name)
    digest = graph_digest(given.problem.iteration)
    run = given.ranks.run(found.plan.rewrites, rounds=num_rounds, seed=given.seed, graph=digest)
    ratio = compared(run.before.makespan_s, run.after.makespan_s)
    return {
        "num_rewrites": len(found.plan.rewrites),
        "predicted_before_s": found.before.makespan_s,
        "predicted_after_s": found.after.makespan_s,
        "bound_s": found.plan.lower_bound_s,
        "before_s": median(run.before.makespan_s),
        "after_s": median(run.after.makespan_s),
        "exposed_before_s": median(run.before.exposed_s),
        "exposed_after_s": median(run.after.exposed_s),
        "max_error": run.max_error,
        "speedup": {"ratio": ratio.ratio, "low": ratio.low, "high": ratio.high, "verdict": ratio.verdict},
        "shown": str(ratio),
    }


def shown(rows: list[dict[str, Any]]) -> str:
    """The table."""
    heads = ["job", "ranks", "planner", "load", "predicted before", "after", "bound", "measured before", "after"]
    heads += ["speed-up", "exposed before", "after", "outputs"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    times = ("predicted_before_s", "predicted_after_s", "bound_s", "before_s", "after_s")
    for row in rows:
        cells = [row["job"], str(row["ranks"]), row["planner"], f"{row['load']:.0f}"]
        if "refused" in row:
            cells += [f"refused: {row['refused']}", *[""] * (len(heads) - 5)]
        else:
            cells += [f"{1e3 * row[key]:.0f} ms" for key in times] + [row["shown"]]
            cells += [f"{1e3 * row[key]:.0f} ms" for key in ("exposed_before_s", "exposed_after_s")]
            cells.append(f"within {row['max_error']:.0e}" if row["max_error"] else "equal bit for bit")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parses, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, nargs="+")
    parser.add_argument("--planners", default=PLANNERS)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for job in arguments.jobs:
        rows += rows_of(job, arguments.planners.split(","), arguments.rounds)
    record = {"rows": rows, "machine": describe_machine(), "versions": package_versions(), "date": utc_now()}
    print(json.dumps(record, indent=1) if arguments.json else shown(rows))
    if not arguments.json:
        print(f"\n{record['date']}, {record['machine']}, {record['versions']}")


if __name__ == "__main__":
    main()
