"""`lagom tune JOB.toml`: search, judge by a paired A/B, write the run folder.

`lagom tune --from-trace TRACES` predicts instead: groups and model come from profiler traces, nothing is run.
"""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lagom_overlap.cli.output import EXIT_INTERRUPTED, say, show
from lagom_overlap.errors import JobError
from lagom_overlap.job.build import join_launched
from lagom_overlap.job.from_trace import FromTraceRequest, ground_of, spec_of
from lagom_overlap.job.ground import Ground
from lagom_overlap.job.measure import Observer
from lagom_overlap.job.measure import Progress as RunProgress
from lagom_overlap.job.own_trace import ground_of_run, is_own_run
from lagom_overlap.job.spec import JobSpec, read_job
from lagom_overlap.job.tune import TuneRequest, run_tune
from lagom_overlap.report.terminal import config_table, verdict_panel
from lagom_overlap.tune.journal import StepKind
from lagom_overlap.units import format_seconds


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("tune", help="search for a configuration and prove it by an A/B", description=__doc__)
    parser.add_argument("job", type=Path, nargs="?", metavar="JOB.toml", help="the job file")
    parser.add_argument(
        "--from-trace",
        type=Path,
        metavar="DIR",
        help="predict from profiler traces (a file, or a folder of them) what tuning would gain; of JOB.toml, if "
        "given, only [tune], [cluster] and [cost] count",
    )
    parser.add_argument("--backend", metavar="NAME", help="what runs the measurements, instead of the job's")
    parser.add_argument("--tuner", metavar="NAME", help="what searches, instead of the job's")
    parser.add_argument("--seed", type=seed, metavar="N", help="seed of search, noise and shuffling")
    parser.add_argument(
        "--warm-start",
        metavar="FROM",
        help="begin with a run folder, a configs.toml, profiler traces, 'simulator' or 'nccl'; nothing of it is "
        "adopted unmeasured",
    )
    parser.add_argument("--bundle", type=Path, metavar="RUN", help="run folder to replay (--backend recorded)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for the run (default: below lagom-runs/)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def seed(text: str) -> int:
    """A seed: a whole number of at least 0."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; allowed: whole numbers from 0")
    return int(text)


class ProgressBar:
    """A progress bar on a terminal with the best makespan so far; silent in a pipe."""

    def __init__(self, spec: JobSpec) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[best]}"),
            console=Console(stderr=True),
            auto_refresh=False,  # a refreshing thread would run on the cores that are measured
            disable=not sys.stderr.isatty(),
        )
        self._search = self._progress.add_task("search", total=spec.tune.budget.measurements, best="")
        self._verdict = self._progress.add_task("verdict", total=None, start=False, best="")

    def __enter__(self) -> Observer:
        self._progress.start()
        return self._observe

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _observe(self, progress: RunProgress) -> None:
        self._update(progress)
        self._progress.refresh()

    def _update(self, progress: RunProgress) -> None:
        best = "" if progress.best_s is None else f"best {format_seconds(progress.best_s)}"
        if progress.phase is StepKind.SEARCH:
            self._progress.update(self._search, completed=progress.num_done, best=best)
            return
        if progress.num_done == 1:
            self._progress.update(self._search, total=self._progress.tasks[self._search].completed)
            self._progress.start_task(self._verdict)
        self._progress.update(self._verdict, completed=progress.num_done, total=progress.num_planned)


def _job_and_ground(arguments: argparse.Namespace) -> tuple[JobSpec, Ground | None]:
    """The job, and what a trace puts in the place of its groups and backend."""
    spec = None if arguments.job is None else read_job(arguments.job)
    if arguments.from_trace is None:
        if spec is None:
            raise JobError("give a job file, or --from-trace with profiler traces")
        return spec, None
    for flag in ("backend", "bundle"):
        if getattr(arguments, flag) is not None:
            raise JobError(f"--{flag} has no meaning with --from-trace: the times are predicted from the trace")
    if is_own_run(arguments.from_trace):
        if spec is not None:
            raise JobError("a job file has no meaning beside --from-trace RUN: a run folder holds its own")
        return ground_of_run(arguments.from_trace)
    request = FromTraceRequest(traces=(arguments.from_trace,), spec=spec, seed=arguments.seed)
    return spec_of(request), ground_of(request)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    spec, ground = _job_and_ground(arguments)
    request = TuneRequest(
        spec=spec,
        ground=ground,
        backend=arguments.backend,
        tuner=arguments.tuner,
        seed=arguments.seed,
        bundle=arguments.bundle,
        out=arguments.out,
        warm_start=arguments.warm_start,
    )
    if (code := join_launched(request.backend_name)) is not None:
        return code
    with ProgressBar(spec) as observe:
        result = run_tune(request, observe)
    if arguments.json:
        say(msgspec.json.encode(result.json).decode())
    else:
        show(verdict_panel(result.report), config_table(result.report))
        say(f"\nReport: {result.folder / 'report.html'}\nTimeline (Perfetto): {result.folder / 'timeline.json'}")
    return EXIT_INTERRUPTED if result.json.interrupted else 0
