"""`lagom plan JOB.toml | CAPTURE`: a schedule of a training step that hides more communication."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from lagom_overlap.cli.output import show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.stdout import say
from lagom_overlap.interrupts import exit_code, received
from lagom_overlap.jobfile.run_folder import RunFolder
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.report.plan import plan_summary
from lagom_overlap.results.plan import PlanResult
from lagom_overlap.stderr import write_lines
from lagom_overlap.units import format_percent
from lagom_overlap.verbs.plan import PlanRequest, check_request, run_plan, step_check
from lagom_overlap.verbs.plan_problem import PlanFlags, job_or_capture, read_input


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
    say(f"\nNext: {_following(result, arguments.out)}")
    return _code()


def _following(result: PlanResult, out: Path | None) -> str:
    """What takes the plan, or shows it."""
    if out is None:
        return "the same with --out DIR, which writes the plan as a file"
    name = shlex.quote(str(out))
    return f"lagom run --prove {name} -- COMMAND" if result.carrier is Carrier.FSDP2 else f"lagom open {name}"


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
