"""`lagom plan JOB.toml | CAPTURE`: a schedule of a training step that hides more communication."""

import argparse
import shlex
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.status import Status

from lagom_overlap.cli.output import show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.stdout import say
from lagom_overlap.cli.typed import new_folder, typed
from lagom_overlap.interrupts import exit_code, received
from lagom_overlap.jobfile.run_folder import RunFolder
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.report.plan import plan_summary
from lagom_overlap.results.plan import PlanResult
from lagom_overlap.stderr import write_lines
from lagom_overlap.units import format_percent
from lagom_overlap.verbs.plan import PlanRequest, check_request, run_plan, step_check
from lagom_overlap.verbs.plan_problem import PlanFlags, job_or_capture, read_input

NO_CHANGE: Final = 0.0005
"""A gain that the headline rounds to none."""
PLAN_FLAGS: Final = ("planner", "carrier", "cluster", "times", "work", "apply", "execute", "sets")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if arguments.out is not None:
        RunFolder.check(arguments.out)
    log = Console(stderr=True)
    with log.status("reading the step") if is_terminal() else PlainLines("plan", "reading the step") as status:
        request = PlanRequest(
            planner=arguments.planner,
            carrier=None if arguments.carrier is None else Carrier(arguments.carrier),
            work=arguments.work,
            apply=arguments.apply,
            execute=arguments.execute,
            out=arguments.out,
            on_progress=_Shown(status),
        )
        check_request(request)
        asked = PlanFlags(
            cluster=arguments.cluster, times=arguments.times, execute=request.execute, check=step_check(request)
        )
        given = read_input(job_or_capture(arguments.job, arguments.sets), asked)
        try:
            status.update("planning")
            result = run_plan(given, request)
        except KeyboardInterrupt:
            if request.out is not None and (request.out / "plan.toml").exists():
                write_lines(f"lagom plan: the plan is in {request.out}, without a run")
            raise
        finally:
            given.close()
    if arguments.json:
        say(result.to_json())
        return _code()
    show(plan_summary(result))
    files = {path.name: path for path in result.files}
    if files:
        say(f"\nReport: {files['report.html']}\nPlan: {files['plan.toml']}")
    say(f"\nNext: {_following(result, arguments, has_model=given.step is not None)}")
    return _code()


def _following(result: PlanResult, arguments: argparse.Namespace, *, has_model: bool) -> str:
    """What takes the plan, or shows it; where it is no file yet, the same command that writes it.

    A plan that nobody runs and that gains nothing is no file worth writing: other changes of the job may be.
    """
    written: Path | None = arguments.out or arguments.apply
    if written is not None and result.carrier is Carrier.FSDP2 and result.step.plan.settings is not None:
        return f"lagom run --prove {shlex.quote(str(written))} -- COMMAND"
    if arguments.out is not None:
        return f"lagom open {shlex.quote(str(arguments.out))}"
    times = result.iteration_s
    if has_model and result.carrier is None and times.before / times.after < 1 + NO_CHANGE:
        return f"lagom simulate {typed(arguments, ('sets',))}    # whether a change of the job would pay"
    return f"lagom plan {typed(arguments, PLAN_FLAGS)} --out {new_folder('planned')}    # writes it as a file"


def _code() -> int:
    """A plan whose search was ended early is shown, and the exit code says so."""
    return exit_code() if received() else 0


class _Shown:
    """Progress of a planner on the status line: the best schedule so far and the bound."""

    def __init__(self, status: Status | PlainLines) -> None:
        self._status = status

    def __call__(self, progress: Any) -> None:
        over = progress.makespan / progress.bound - 1 if progress.bound else 0.0
        self._status.update(
            f"planning: {format_percent(over, 3)} above the bound ({progress.found_by}, {progress.elapsed_s:.1f} s)"
        )
