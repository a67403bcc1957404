"""`lagom compare JOB.toml`: several tuners, or several planners, on one job, one table."""

import argparse
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from lagom_overlap.cli.output import say, show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.tune import seed
from lagom_overlap.errors import JobError
from lagom_overlap.interrupts import exit_code, held_back
from lagom_overlap.jobfile.build import join_launched
from lagom_overlap.jobfile.spec import read_job
from lagom_overlap.record import check_new_folder, create_folder, write_private
from lagom_overlap.report.compare.terminal import compare_table
from lagom_overlap.report.compare_page import render_comparison
from lagom_overlap.report.compare_planners.terminal import planners_table
from lagom_overlap.results.compare import CompareResult
from lagom_overlap.results.compare_planners import ComparePlannersResult
from lagom_overlap.stderr import write_lines
from lagom_overlap.verbs.compare import DEFAULT_TUNERS, CompareRequest, run_compare
from lagom_overlap.verbs.plan_compare import check_planners, compare_planners
from lagom_overlap.verbs.plan_problem import Asked, read_input


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("compare", help="several tuners or planners on one job, one table", description=__doc__)
    parser.add_argument(
        "job", type=Path, metavar="JOB.toml|CAPTURE", help="a job file; with --planners also a captured step"
    )
    who = parser.add_mutually_exclusive_group()
    words = ", ".join(DEFAULT_TUNERS)  # argparse breaks lines at blanks alone
    who.add_argument("--tuners", default=",".join(DEFAULT_TUNERS), metavar="A,B", help=f"default: {words}")
    who.add_argument("--planners", metavar="A,B", help="compare plans of the step instead of tuned collectives")
    parser.add_argument("--backend", metavar="NAME", help="what runs the measurements, instead of the job's")
    parser.add_argument("--cluster", metavar="NAME", help="the machine, for a capture (with --planners)")
    parser.add_argument(
        "--times", metavar="TRACE|measure|model", help="where operators' times come from (with --planners)"
    )
    parser.add_argument("--seed", type=seed, metavar="N", help="seed of search, noise and shuffling")
    parser.add_argument("--bundle", type=Path, metavar="RUN", help="run folder to replay (--backend recorded)")
    parser.add_argument(
        "--warm-start", metavar="FROM", help="where tuners begin that can begin somewhere: see lagom tune"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for compare.json and report.html")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if arguments.planners is not None:
        return _planners(arguments)
    if arguments.cluster is not None:
        raise JobError("--cluster goes with --planners and a capture; a job file names its own: [cluster] preset = ...")
    if arguments.times is not None:
        raise JobError("--times goes with --planners: tuners measure what they search")
    tuners = [name.strip() for name in arguments.tuners.split(",") if name.strip()]
    spec = read_job(arguments.job)
    if (code := join_launched(arguments.backend or spec.job.backend)) is not None:
        return code
    log = Console(stderr=True)
    if arguments.out is not None:
        check_new_folder(arguments.out)
    request = CompareRequest(
        spec=spec,
        tuners=tuners,
        backend=arguments.backend,
        seed=arguments.seed,
        bundle=arguments.bundle,
        warm_start=arguments.warm_start,
    )
    with PlainLines("compare", "starting") as lines:
        result = run_compare(request, note=log.print if is_terminal() else lines.update)
    return _finish(arguments, result, compare_table(result.rows, result.step_s), len(tuners))


def _planners(arguments: argparse.Namespace) -> int:
    for flag in ("backend", "bundle", "warm-start"):
        if getattr(arguments, flag.replace("-", "_")) is not None:
            raise JobError(f"--{flag} does not go with --planners: plans are compared by prediction")
    if arguments.out is not None:
        check_new_folder(arguments.out)
    log = Console(stderr=True)
    planners = [name.strip() for name in arguments.planners.split(",") if name.strip()]
    check_planners(planners)
    given = read_input(arguments.job, Asked(cluster=arguments.cluster, times=arguments.times))
    try:
        with PlainLines("compare", "starting") as lines:
            result = compare_planners(
                given, planners, seed=arguments.seed, note=log.print if is_terminal() else lines.update
            )
    finally:
        given.close()
    return _finish(arguments, result, planners_table(result), len(planners))


def _finish(
    arguments: argparse.Namespace, result: CompareResult | ComparePlannersResult, table: RenderableType, num_asked: int
) -> int:
    """Writes and prints a comparison, also one that the user ended; the exit code."""
    content = result.to_json()
    with held_back():
        if arguments.out is not None:
            create_folder(arguments.out)
            write_private(arguments.out / "compare.json", content.encode() + b"\n")
            write_private(arguments.out / "report.html", render_comparison(result).encode())
        if arguments.json:
            say(content)
        else:
            show(table, *(Text(note, style="dim") for note in result.notes))
            if arguments.out is not None:
                say(f"\nReport: {arguments.out / 'report.html'}")
    if not result.interrupted:
        return 0
    write_lines(f"lagom compare: interrupted; {len(result.rows)} of {num_asked} were done and are kept")
    return exit_code()
