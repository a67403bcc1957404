"""Plans of several planners beside the program on gloo ranks: predicted, measured, and whether results are equal.

    python benchmarks/plan_execution.py examples/plan_zero_gloo.toml --planners ours,centauri [--json]

Times are medians over interleaved rounds of the slowest rank; the speed-up is the median of the paired ratios.
"""

import argparse
import json
from pathlib import Path

import msgspec

from lagom_overlap.errors import LagomError
from lagom_overlap.job.plan import PlanRequest, run_plan
from lagom_overlap.job.plan_problem import Asked, read_input
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.report.plan_model import ExecutionJson


def rows_of(job: Path, planners: list[str]) -> list[dict[str, object]]:
    """One row per planner; one that cannot plan this program says why."""
    given = read_input(job, Asked(execute=True))
    rows: list[dict[str, object]] = []
    try:
        for name in planners:
            try:
                result = run_plan(given, PlanRequest(planner=name, execute=True)).json
            except LagomError as error:
                rows.append({"planner": name, "refused": str(error)})
                continue
            assert isinstance(result.execution, ExecutionJson)
            rows.append({"planner": name, **msgspec.to_builtins(result)})
    finally:
        given.close()
    return rows


def shown(rows: list[dict]) -> str:
    """The table."""
    names = "planner, predicted before, after, bound, measured before, after, speed-up, exposed before, after, equal"
    lines = ["| " + names.replace(", ", " | ") + " |", "|---" * 10 + "|"]
    for row in rows:
        if "refused" in row:
            lines.append(f"| {row['planner']} | refused: {row['refused']} |" + " |" * 8)
            continue
        run, times = row["execution"], row["iteration_s"]
        equal = "bitwise" if run["is_bitwise_equal"] else f"{run['max_error']:.0e}"
        measured, exposed, speed = run["iteration_s"], run["exposed_comm_s"], run["speedup"]
        cells = [row["planner"], *(f"{1e3 * times[key]:.0f} ms" for key in ("before", "after", "lower_bound"))]
        cells += [f"{1e3 * measured[arm]['median']:.0f} ms" for arm in ("before", "after")]
        cells.append(f"{speed['median']:.3f} ({speed['q25']:.3f} to {speed['q75']:.3f})")
        cells += [f"{1e3 * exposed[arm]['median']:.0f} ms" for arm in ("before", "after")]
        lines.append("| " + " | ".join([*cells, equal]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parses, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--planners", default="program_order,ours,centauri,concerto,megatron")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = rows_of(arguments.job, arguments.planners.split(","))
    if arguments.json:
        record = {"rows": rows, "machine": describe_machine(), "versions": package_versions(), "date": utc_now()}
        print(json.dumps(record, indent=1))
        return
    print(shown(rows))
    print(f"\n{utc_now()}, {describe_machine()}, {package_versions()}")


if __name__ == "__main__":
    main()
