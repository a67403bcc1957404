"""`lagom compare JOB.toml`: several tuners, or several planners, on one job, one table."""

import argparse

from rich.console import Console, RenderableType
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.stdout import say
from lagom_overlap.cli.typed import new_folder, typed
from lagom_overlap.errors import JobError
from lagom_overlap.interrupts import exit_code, held_back
from lagom_overlap.jobfile.job import Job, join_launched
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.report.compare import compare_table, render_comparison
from lagom_overlap.report.compare_planners import planners_table
from lagom_overlap.results.compare import ComparePlannersResult, CompareResult
from lagom_overlap.stderr import write_lines
from lagom_overlap.verbs.compare import CompareRequest, check_planners, compare_planners, run_compare
from lagom_overlap.verbs.plan_problem import PlanFlags, job_or_capture, read_input


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if arguments.planners is not None:
        return _planners(arguments)
    if arguments.cluster is not None:
        raise JobError("--cluster goes with --planners and a capture; a job file names its own: [cluster] preset = ...")
    if arguments.times is not None:
        raise JobError("--times goes with --planners: tuners measure what they search")
    tuners = [name.strip() for name in arguments.tuners.split(",") if name.strip()]
    job = Job.read(arguments.job, arguments.sets)
    if (code := join_launched(job.backend_name(arguments.backend))) is not None:
        return code
    log = Console(stderr=True)
    if arguments.out is not None:
        RunFolder.check(arguments.out)
    request = CompareRequest(
        job=job,
        tuners=tuners,
        backend=arguments.backend,
        seed=arguments.seed,
        bundle=arguments.bundle,
        warm_start=arguments.warm_start,
    )
    with PlainLines("compare", "starting") as lines:
        result = run_compare(request, note=log.print if is_terminal() else lines.update)
    asked = {key: getattr(arguments, key) for key in ("backend", "bundle", "warm_start")}
    record = RunRecord.now(RunKind.COMPARE, seed=result.seed, job=job.spec, request={"tuners": tuners, **asked})
    return _finish(arguments, record, result, compare_table(result.rows, result.step_s), len(tuners))


def _planners(arguments: argparse.Namespace) -> int:
    for flag in ("backend", "bundle", "warm-start"):
        if getattr(arguments, flag.replace("-", "_")) is not None:
            raise JobError(f"--{flag} does not go with --planners: plans are compared by prediction")
    if arguments.out is not None:
        RunFolder.check(arguments.out)
    log = Console(stderr=True)
    planners = [name.strip() for name in arguments.planners.split(",") if name.strip()]
    check_planners(planners)
    given = read_input(
        job_or_capture(arguments.job, arguments.sets), PlanFlags(cluster=arguments.cluster, times=arguments.times)
    )
    try:
        with PlainLines("compare", "starting") as lines:
            result = compare_planners(
                given, planners, seed=arguments.seed, note=log.print if is_terminal() else lines.update
            )
    finally:
        given.close()
    seed = given.problem.seed if arguments.seed is None else arguments.seed
    asked = {key: getattr(arguments, key) for key in ("cluster", "times")}
    record = RunRecord.now(RunKind.COMPARE_PLANNERS, seed=seed, job=given.spec, request={"planners": planners, **asked})
    return _finish(arguments, record, result, planners_table(result), len(planners))


def _following(result: CompareResult | ComparePlannersResult, arguments: argparse.Namespace) -> str:
    """What runs the best of them alone; empty where none was measured to the end."""
    if isinstance(result, CompareResult):
        tuners = [row for row in result.rows if row.makespan_s is not None]
        best = min(tuners, key=lambda row: row.makespan_s or 0.0, default=None)
        gains = best is not None and best.tuner != "default" and (best.speedup_over_default or 2.0) > 1.0
        if best is not None and not gains:
            return "lagom run --online -- COMMAND    # nothing beat the default here: tries settings in the job itself"
        asked = typed(arguments, ("backend", "seed", "bundle", "warm_start", "sets"))
        return "" if best is None else f"lagom tune {asked} --tuner {best.tuner}"
    plans = [row for row in result.rows if row.after_s is not None]
    first = min(plans, key=lambda row: row.after_s or 0.0, default=None)
    asked = typed(arguments, ("cluster", "times", "sets"))
    return "" if first is None else f"lagom plan {asked} --planner {first.planner} --out {new_folder('planned')}"


def _finish(
    arguments: argparse.Namespace,
    record: RunRecord,
    result: CompareResult | ComparePlannersResult,
    table: RenderableType,
    num_asked: int,
) -> int:
    """Writes and prints a comparison, also one that the user ended; the exit code."""
    content = result.to_json()
    with held_back():
        if arguments.out is not None:
            RunFolder.create(arguments.out, result.job).write(
                record,
                result,
                {
                    "compare.json": content.encode() + b"\n",
                    "report.html": lambda: render_comparison(result).encode(),
                },
            )
        if arguments.json:
            say(content)
        else:
            show(table, *(Text(note, style="dim") for note in result.notes))
            if arguments.out is not None:
                say(f"\nReport: {arguments.out / 'report.html'}")
            if line := _following(result, arguments):
                say(f"\nNext: {line}")
    if not result.interrupted:
        return 0
    write_lines(f"lagom compare: interrupted; {len(result.rows)} of {num_asked} were done and are kept")
    return exit_code()
