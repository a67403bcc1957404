"""`lagom tune JOB.toml`: search, judge by a paired A/B, write the run folder.

`lagom tune --from-trace TRACES` predicts instead: groups and model come from profiler traces, nothing is run.
"""

import argparse
import shlex

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lagom_overlap.cli.output import EXIT_UNWRITTEN, show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.stdout import named, say
from lagom_overlap.errors import JobError
from lagom_overlap.interrupts import exit_code
from lagom_overlap.jobfile.job import join_launched
from lagom_overlap.jobfile.run_folder import job_command
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.jobfile.variants import JobVariants
from lagom_overlap.report.fitted_table import to_type
from lagom_overlap.report.tune.terminal import changes, verdict_panel
from lagom_overlap.report.tune.verdict_words import UNDO, next_commands
from lagom_overlap.results.conclusion import UNKNOWN
from lagom_overlap.trace.files import EXAMPLE
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.units import format_seconds
from lagom_overlap.verbs.measure import Observer, RunProgress
from lagom_overlap.verbs.own_trace import job_for
from lagom_overlap.verbs.tune import RUN_FILES, TuneRequest, run_tune


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
            disable=not is_terminal(),
        )
        self._search = self._progress.add_task("search", total=None, best="")
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
            self._progress.update(self._search, completed=progress.num_done, total=progress.num_planned, best=best)
            return
        if progress.num_done == 1:
            self._progress.update(self._search, total=self._progress.tasks[self._search].completed)
            self._progress.start_task(self._verdict)
        self._progress.update(self._verdict, completed=progress.num_done, total=progress.num_planned)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if arguments.sets and arguments.job is None:
        raise JobError("--set sets keys of a job file: give one")
    if arguments.example and arguments.from_trace is not None:
        raise JobError("give --from-trace or --example, not both")
    trace = EXAMPLE if arguments.example else arguments.from_trace
    spec = None
    if arguments.job is not None:
        is_seen = trace is not None  # what is trained
        spec = JobVariants.read(arguments.job, arguments.sets, may_lack_work=is_seen).one()
    job = job_for(spec, trace, seed=arguments.seed, backend=arguments.backend, bundle=arguments.bundle)
    request = TuneRequest(
        job=job,
        backend=arguments.backend,
        tuner=arguments.tuner,
        seed=arguments.seed,
        bundle=arguments.bundle,
        out=arguments.out,
        warm_start=arguments.warm_start,
    )
    command = job_command(trace) if trace is not None else UNKNOWN
    return tune(request, as_json=arguments.json, details=arguments.details, command=command)


def tune(request: TuneRequest, *, as_json: bool, details: bool, command: str = UNKNOWN) -> int:
    """Tunes, prints, and returns the exit code; `command` is the job's, for the lines to type."""
    if (code := join_launched(request.backend_name)) is not None:
        return code
    with PlainLines("tune", "starting") as lines, ProgressBar(request.job.spec) as observe:
        result = run_tune(request, _telling(observe, lines))
    if as_json:
        say(result.to_json())
    else:
        show(verdict_panel(result), changes(result, details=details))
        files = {path.name: path for path in result.files}
        kinds = (("Report", "report.html"), ("Timeline (Perfetto)", "timeline.json"))
        say("\n" + "\n".join(named(files[name], what) for what, name in kinds if name in files))
        folder = shlex.quote(str(result.folder)) if result.folder is not None else "RUN"
        first, *others = (line.replace(UNKNOWN, command) for line in next_commands(result, folder))
        next_lines = [f"Next: {first}", *(f"Or:   {line}" for line in others if line != UNDO)]
        undo = [Text(f"To undo{UNDO.partition('undo')[2]}.")] if UNDO in others else []
        show(Group(Text(), *map(to_type, next_lines), *undo))
    if result.interrupted:
        return exit_code()
    is_whole = {*RUN_FILES} <= {path.name for path in result.files}
    return 0 if is_whole else EXIT_UNWRITTEN


def _telling(observe: Observer, lines: PlainLines) -> Observer:
    """Also tells who writes lines where there is no bar."""

    def both(progress: RunProgress) -> None:
        is_search = progress.phase is StepKind.SEARCH  # the verdict measures what was chosen
        best = f", best {format_seconds(progress.best_s)}" if is_search and progress.best_s is not None else ""
        lines.update(f"{progress.phase}, {progress.num_done} of {progress.num_planned}{best}")
        observe(progress)

    return both
