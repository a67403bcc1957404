"""`lagom simulate JOB.toml`: predict an iteration: time, MFU, memory, what is exposed and what is stretched."""

import argparse
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lagom_overlap.cli.output import show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.stdout import named, say
from lagom_overlap.cli.typed import typed
from lagom_overlap.errors import JobError
from lagom_overlap.interrupts import exit_code
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.step import SEQ_LEN
from lagom_overlap.jobfile.variants import JobVariants
from lagom_overlap.planners.layout_search import SearchProgress
from lagom_overlap.report.layouts import layouts_summary
from lagom_overlap.report.simulate import simulation_summary
from lagom_overlap.report.simulate_capture import captured_summary
from lagom_overlap.results.layouts import LayoutsResult
from lagom_overlap.units import format_seconds
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate, simulate_capture
from lagom_overlap.verbs.simulate_layouts import FRAMEWORKS, LayoutsRequest, run_layouts, run_variants

_OF_MODEL: Final = ("cluster", "gpus", "seq_len", "global_batch", "framework")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if (arguments.job is None) == (arguments.model is None):
        raise JobError(
            "give a job file, or --model, --cluster and --gpus: "
            "lagom simulate --model llama-3-8b --cluster h100_dgx --gpus 8"
        )
    if arguments.model is not None:
        return _layouts(arguments)
    for flag in _OF_MODEL:
        if getattr(arguments, flag) is not None:
            raise JobError(
                f"--{flag.replace('_', '-')} goes with --model; a job file says so itself (or --set KEY=VALUE)"
            )
    variants = JobVariants.read(arguments.job, arguments.sets)
    if variants.axes:
        with _Progress() as progress:
            ranked = run_variants(variants, arguments.out, progress)
        return _show_layouts(ranked, arguments)
    job = Job(variants.one())
    if job.spec.model is not None and job.spec.model.capture is not None:
        return _captured(job, arguments)
    result = run_simulate(SimulateRequest(job=job, out=arguments.out))
    if arguments.json:
        say(result.to_json())
        return 0
    show(simulation_summary(result))
    _say_files(result.files)
    say(f"\nNext: {_plan_line(arguments)}")
    return 0


def _layouts(arguments: argparse.Namespace) -> int:
    for flag in ("cluster", "gpus"):
        if getattr(arguments, flag) is None:
            raise JobError(f"--model needs --{flag} too, such as --cluster h100_dgx --gpus 64")
    if arguments.sets:
        raise JobError("--set goes with a job file, not with --model")
    frameworks = FRAMEWORKS if arguments.framework is None else tuple(map(str.strip, arguments.framework.split(",")))
    request = LayoutsRequest(
        model=arguments.model,
        cluster=arguments.cluster,
        num_gpus=arguments.gpus,
        seq_len=arguments.seq_len or SEQ_LEN,
        global_batch=arguments.global_batch,
        frameworks=frameworks,
        out=arguments.out,
    )
    with _Progress() as progress:
        result = run_layouts(request, progress)
    return _show_layouts(result, arguments)


def _show_layouts(result: LayoutsResult, arguments: argparse.Namespace) -> int:
    if arguments.json:
        say(result.to_json())
    else:
        show(layouts_summary(result))
    return exit_code() if result.interrupted else 0


class _Progress:
    """A bar on a terminal, lines now and then elsewhere."""

    def __init__(self) -> None:
        self._lines = PlainLines("simulate", "counting layouts")
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[best]}"),
            console=Console(stderr=True),
            transient=True,
            disable=not is_terminal(),
        )
        self._task = self._bar.add_task("simulating layouts", total=None, best="")

    def __enter__(self) -> "_Progress":
        self._lines.__enter__()
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._lines.__exit__(*error)

    def __call__(self, progress: SearchProgress) -> None:
        best = "" if progress.best_s is None else f"best {format_seconds(progress.best_s)}"
        self._bar.update(self._task, completed=progress.num_simulated, total=progress.most, best=best)
        self._lines.update(f"{progress.num_simulated} simulated, at most {progress.most}{best and ', ' + best}")


def _captured(job: Job, arguments: argparse.Namespace) -> int:
    result = simulate_capture(job, arguments.out)
    if arguments.json:
        say(result.to_json())
        return 0
    show(captured_summary(result))
    _say_files(result.files)
    say(f"\nNext: {_plan_line(arguments)}")
    return 0


def _plan_line(arguments: argparse.Namespace) -> str:
    """What looks for settings of the same job."""
    return f"lagom plan {typed(arguments, ('sets',))}"


def _say_files(written: tuple[Path, ...]) -> None:
    files = {path.name: path for path in written}
    if files:
        say("\n" + named(files["report.html"], "Report"))
        say(named(files["timeline.json"], "Timeline (Perfetto)"))
