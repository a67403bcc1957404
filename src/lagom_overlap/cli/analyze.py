"""`lagom analyze TRACE...`: what overlap a job has, what contention costs it, what to do."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lagom_overlap.job.analyze import AnalyzeRequest, Compat, run_analyze
from lagom_overlap.report.analyze_terminal import WIDTH, analysis_summary


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
    parser.add_argument("--compat", choices=[c.value for c in Compat], help="print HolisticTraceAnalysis's figures")
    parser.add_argument("--pattern", metavar="REGEX", help="kernels that communicate besides those known")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for run.json, report.html, timeline.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    request = AnalyzeRequest(
        traces=tuple(arguments.traces),
        compat=Compat(arguments.compat) if arguments.compat else None,
        pattern=arguments.pattern,
        out=arguments.out,
    )
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=4,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("reading", total=None)
        num_read = 0

        def observe(file: str) -> None:
            nonlocal num_read
            num_read += 1
            progress.update(task, description=f"{num_read} read: {file[-40:]}")

        result = run_analyze(request, observe)
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(result.json).decode() + "\n")
        return 0
    Console(width=None if sys.stdout.isatty() else WIDTH).print(analysis_summary(result.report))
    if result.folder is not None:
        sys.stdout.write(
            f"\nReport: {result.folder / 'report.html'}\nTimeline (Perfetto): {result.folder / 'timeline.json'}\n"
        )
    return 0
