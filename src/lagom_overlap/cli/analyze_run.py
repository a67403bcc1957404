"""What `lagom analyze` does once its flags are known: apart from them, because all the imports are here."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Final

from lagom_overlap.cli.flags import MAX_JOBS
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.errors import TraceError
from lagom_overlap.results.analyze import AnalyzeResult
from lagom_overlap.trace.files import EXAMPLE
from lagom_overlap.trace.reader import ReadProgress
from lagom_overlap.verbs.analyze import AnalyzeRequest, Compat, run_analyze
from lagom_overlap.verbs.analyze_profile import analyze_profiles, are_profiles


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


def _with_lines(request: AnalyzeRequest) -> AnalyzeResult:
    """Runs with a line now and then."""
    with PlainLines("analyze", "reading") as lines:

        def observe(progress: ReadProgress) -> None:
            is_read = progress.num_done == progress.num_files
            lines.update("analysing" if is_read else f"reading, {progress.num_done} of {progress.num_files} files")

        return run_analyze(request, observe)


_TRACES_ONLY: Final = ("against", "compat", "cluster", "pattern", "anonymise", "out")


def _run_profiles(arguments: argparse.Namespace) -> int:
    for name in _TRACES_ONLY:
        if getattr(arguments, name):
            raise TraceError(f"--{name} is for traces; a profile of NCCL's is printed only (--json)")
    result = analyze_profiles(arguments.traces)
    sys.stdout.write((result.to_json() if arguments.json else result.summary()) + "\n")
    return 0


def run_verb(arguments: argparse.Namespace) -> int:
    """Reads, analyses, prints; the exit code."""
    if bool(arguments.traces) == arguments.example:
        raise TraceError("give traces or --example, not both" if arguments.example else "give a trace, or --example")
    if are_profiles(arguments.traces):
        return _run_profiles(arguments)
    request = AnalyzeRequest(
        traces=(EXAMPLE,) if arguments.example else tuple(arguments.traces),
        against=(arguments.against,) if arguments.against else (),
        compat=Compat(arguments.compat) if arguments.compat else None,
        cluster=arguments.cluster,
        pattern=arguments.pattern,
        is_anonymous=arguments.anonymise,
        num_jobs=arguments.jobs or min(MAX_JOBS, len(os.sched_getaffinity(0))),
        out=arguments.out,
    )
    return analyse_and_print(request, is_json=arguments.json)


def analyse_and_print(request: AnalyzeRequest, *, is_json: bool) -> int:
    """Analyses, telling how far it is, and prints; the exit code."""
    read: Callable[[AnalyzeRequest], AnalyzeResult] = _with_bar if is_terminal() else _with_lines
    result = read(request)
    if is_json:
        sys.stdout.write(result.to_json() + "\n")
        return 0
    _print(result)
    return 0


def _print(result: AnalyzeResult) -> None:
    # Not at the top: --json needs neither rich nor the tables.
    from lagom_overlap.cli.output import show  # noqa: PLC0415
    from lagom_overlap.cli.stdout import named  # noqa: PLC0415
    from lagom_overlap.report.analyze.terminal import analysis_summary  # noqa: PLC0415

    files = {path.name: path for path in result.files}
    titles = {"report.html": "Report", "timeline.json": "Timeline (Perfetto)"}
    show(analysis_summary(result, [named(files[name], title) for name, title in titles.items() if name in files]))
