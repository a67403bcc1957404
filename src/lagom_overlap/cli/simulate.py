"""`lagom simulate JOB.toml`: predict an iteration: time, MFU, memory, what is exposed and what is stretched.

With --profile: measure the job's operators on this machine, fit the cost model, write it as a cluster file.
"""

import argparse
from pathlib import Path

from lagom_overlap.cli.output import show
from lagom_overlap.cli.stdout import say
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.report.simulate.terminal import captured_summary, simulation_summary
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if arguments.profile:
        return _profile(arguments)
    job = Job.read(arguments.job)
    if job.spec.model is not None and job.spec.model.capture is not None:
        return _captured(job, arguments)
    result = run_simulate(SimulateRequest(job=job, out=arguments.out))
    if arguments.json:
        say(result.to_json())
        return 0
    show(simulation_summary(result))
    _say_files(result.files)
    return 0


def _captured(job: Job, arguments: argparse.Namespace) -> int:
    from lagom_overlap.verbs.simulate_capture import simulate_capture  # noqa: PLC0415 - seldom asked for

    result = simulate_capture(job, arguments.out)
    if arguments.json:
        say(result.to_json())
        return 0
    show(captured_summary(result))
    _say_files(result.files)
    return 0


def _say_files(written: tuple[Path, ...]) -> None:
    files = {path.name: path for path in written}
    if files:
        say(f"\nReport: {files['report.html']}\nTimeline (Perfetto): {files['timeline.json']}")


def _profile(arguments: argparse.Namespace) -> int:
    # Not at the top: seldom asked for, and it loads the fit.
    from lagom_overlap.report.simulate.terminal import profile_summary  # noqa: PLC0415
    from lagom_overlap.verbs.simulate_profile import run_profile  # noqa: PLC0415

    if arguments.out is None:
        raise JobError("--profile writes a cluster file: give --out DIR")
    result = run_profile(Job.read(arguments.job), arguments.out)
    if arguments.json:
        say(result.to_json())
        return 0
    show(profile_summary(result))
    say(f'\nUse it: [cluster] preset = "{result.files[0].resolve()}"')
    return 0
