"""What a plan's prediction is worth by where its times come from: measured alone on the ranks, or a trace of the step.

    python benchmarks/plan_times.py examples/plan_zero_gloo.toml [--json]

Records a trace of the job's program over the job's link (examples/record_step.py), plans once from each source of
times, runs every plan against the program. Errors are predicted over the measured median of the same run, minus 1.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from lagom_overlap.backends.gloo.link import EmulatedLink
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.spec import link_bytes_per_s
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.verbs.plan import PlanRequest, run_plan
from lagom_overlap.verbs.plan_problem import PlanFlags, read_input

RECORD = Path(__file__).parents[1] / "examples" / "record_step.py"


def record(job: Path, trace: Path) -> None:
    """A trace of the job's program on rank 0, over the job's link."""
    spec = read_job(job)
    assert spec.program is not None, "the job has no [program]"
    rate = link_bytes_per_s(spec.job.link)
    link = EmulatedLink(rate, spec.job.ranks) if rate is not None else None
    run = [*(link.prefix if link else ()), sys.executable, "-m", "torch.distributed.run"]
    run += [f"--nproc-per-node={spec.job.ranks}", str(RECORD), spec.program.script, str(trace)]
    try:
        done = subprocess.run(
            [*run, spec.program.function],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        if link:
            link.close()
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])


def row_of(job: Path, times: str) -> dict[str, object]:
    """A plan from these times, run against the program."""
    given = read_input(job, PlanFlags(times=times, execute=True))
    try:
        result = run_plan(given, PlanRequest(execute=True))
    finally:
        given.close()
    return result.to_dict()


def shown(rows: dict[str, dict]) -> str:
    """The table."""
    names = "times from, predicted before, after, measured before, after, error before, after, speed-up"
    lines = ["| " + names.replace(", ", " | ") + " |", "|---" * 8 + "|"]
    for source, row in rows.items():
        predicted = [row["iteration_s"][arm] for arm in ("before", "after")]
        measured = [row["execution"]["iteration_s"][arm]["median"] for arm in ("before", "after")]
        errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
        speed = row["execution"]["speedup"]
        cells = [source, *(f"{1e3 * seconds:.0f} ms" for seconds in (*predicted, *measured))]
        cells += [f"{error:+.1%}" for error in errors]
        cells.append(f"{speed['median']:.3f} ({speed['q25']:.3f} to {speed['q75']:.3f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parses, records, plans, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--trace", type=Path, help="where to keep the trace")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        trace = arguments.trace or Path(folder) / "trace.json"
        record(arguments.job, trace)
        rows = {
            source: row_of(arguments.job, times)
            for source, times in (("the ranks", "measure"), ("a trace", str(trace.resolve())))
        }
    if arguments.json:
        print(json.dumps({"rows": rows, "machine": describe_machine(), "versions": package_versions()}, indent=1))
        return
    print(shown(rows))
    print(f"\n{utc_now()}, {describe_machine()}, {package_versions()}")


if __name__ == "__main__":
    main()
