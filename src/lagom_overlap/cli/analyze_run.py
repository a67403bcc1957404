"""What `lagom analyze` does once its flags are known: apart from them, because all the imports are here."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from lagom_overlap.cli.analyze import MAX_JOBS
from lagom_overlap.job.analyze import AnalyzeRequest, AnalyzeResult, Compat, run_analyze
from lagom_overlap.trace.reading import ReadProgress


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


def run_verb(arguments: argparse.Namespace) -> int:
    """Reads, analyses, prints; the exit code."""
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
