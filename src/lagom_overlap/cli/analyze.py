"""`lagom analyze TRACE...`: what overlap a job has, what contention costs it, what to do."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.job.analyze import AnalyzeRequest, AnalyzeResult, Compat, run_analyze
from lagom_overlap.trace.reading import ReadProgress

MAX_JOBS: Final = 64


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("analyze", help="say what overlap profiler traces show", description=__doc__)
    parser.add_argument(
        "traces",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="Kineto JSON (.json, .json.gz, .tar.gz), Nsight Systems SQLite, NCCL Inspector JSON lines, flight "
        "recorder JSON, or a folder of them; one rank per parallel role suffices",
    )
    parser.add_argument("--against", type=Path, metavar="B", help="another run's trace or folder: say what changed")
    parser.add_argument("--compat", choices=[c.value for c in Compat], help="print HolisticTraceAnalysis's figures")
    parser.add_argument("--pattern", metavar="REGEX", help="kernels that communicate besides those known")
    parser.add_argument(
        "--anonymise",
        action="store_true",
        help="numbers instead of the names of files, kernels and communicators in everything written",
    )
    parser.add_argument("--jobs", type=jobs, metavar="N", help="processes that read (default: one per core)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for run.json, report.html, timeline.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def jobs(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_JOBS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; allowed: 1 to {MAX_JOBS}")
    return int(text)


def _with_bar(request: AnalyzeRequest) -> AnalyzeResult:
    """Runs with a progress bar on the terminal."""
    from rich.console import Console  # noqa: PLC0415 - not for a pipe, where it would be half of the time
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=4,
        transient=True,
    ) as progress:
        task = progress.add_task("reading", total=None)

        def observe(found: ReadProgress) -> None:
            name = "" if found.trace is None or request.is_anonymous else found.trace[-32:]
            shown = "".join(char if char.isprintable() else "?" for char in name)
            doing = "analysing" if found.num_done == found.num_files else f"reading {shown}".rstrip()
            progress.update(task, description=doing, total=found.num_files, completed=found.num_done)

        return run_analyze(request, observe)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    request = AnalyzeRequest(
        traces=tuple(arguments.traces),
        against=(arguments.against,) if arguments.against else (),
        compat=Compat(arguments.compat) if arguments.compat else None,
        pattern=arguments.pattern,
        is_anonymous=arguments.anonymise,
        num_jobs=arguments.jobs or min(MAX_JOBS, len(os.sched_getaffinity(0))),
        out=arguments.out,
    )
    read: Callable[[AnalyzeRequest], AnalyzeResult] = _with_bar if sys.stderr.isatty() else run_analyze
    result = read(request)
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(result.json).decode() + "\n")
        return 0
    _print(result, request)
    return 0


def _print(result: AnalyzeResult, request: AnalyzeRequest) -> None:
    from rich.console import Console  # noqa: PLC0415

    from lagom_overlap.report.analyze_terminal import WIDTH, analysis_summary  # noqa: PLC0415

    Console(width=None if sys.stdout.isatty() else WIDTH).print(analysis_summary(result.report))
    if result.folder is not None:
        folder = Path() if request.is_anonymous else result.folder
        sys.stdout.write(f"\nReport: {folder / 'report.html'}\nTimeline (Perfetto): {folder / 'timeline.json'}\n")
