"""`lagom run -- COMMAND`: a training command with our plug-in and hooks loaded: watched, tuned, or set by a file.

The command takes this process's place: its streams, signals and exit code are the job's own. A proof by restarts stays,
and starts the command again and again.
"""

import argparse
import os

from lagom_overlap.cli.flags import RESTARTS
from lagom_overlap.errors import JobError
from lagom_overlap.export.run_variables import RunMode
from lagom_overlap.interrupts import exit_code, received
from lagom_overlap.stderr import write_lines
from lagom_overlap.verbs.given import GivenKind, given
from lagom_overlap.verbs.run import LaunchRequest, command_of, is_disabled, prepare, replace_process


def run(arguments: argparse.Namespace) -> int:
    """Becomes the command; returns only if that fails, or after a proof by restarts."""
    request = _request(arguments)
    if request.mode is RunMode.PROVE and not is_disabled(os.environ) and _needs_restarts(arguments):
        return _prove(request, arguments.restarts or RESTARTS)
    launch = prepare(request, os.environ)
    write_lines(*(f"lagom run: {warning}" for warning in launch.warnings))
    if launch.folder is not None:
        write_lines(f"lagom run: {request.mode}, files in {launch.folder}")
    replace_process(launch)
    return 1


def _request(arguments: argparse.Namespace) -> LaunchRequest:
    if arguments.prove is not None and arguments.config is not None:
        raise JobError("--config has no meaning with --prove, which names what is proven itself")
    if arguments.restarts is not None and arguments.prove is None:
        raise JobError("--restarts has no meaning without --prove")
    if arguments.pairs is not None and (arguments.prove is None or _needs_restarts(arguments)):
        why = "without --prove" if arguments.prove is None else "in a proof by restarts, which has --restarts"
        raise JobError(f"--pairs has no meaning {why}")
    if arguments.prove is not None:
        mode = RunMode.PROVE
    else:
        mode = RunMode.OBSERVE if arguments.observe else RunMode.ONLINE if arguments.online else RunMode.FIXED
    return LaunchRequest(
        command=command_of(arguments.command),
        mode=mode,
        config=arguments.config if arguments.prove is None else arguments.prove,
        tuner=arguments.tuner,
        job_steps=arguments.job_steps,
        num_pairs=arguments.pairs,
        compare=arguments.compare,
        adapters=arguments.adapters,
        out=arguments.out,
    )


def _needs_restarts(arguments: argparse.Namespace) -> bool:
    """Whether it cannot be switched while the job runs, or the user wants restarts."""
    return arguments.restarts is not None or given(arguments.prove).kind is not GivenKind.SETTINGS


def _prove(request: LaunchRequest, num_pairs: int) -> int:
    from lagom_overlap.verbs.prove import prove_by_restarts  # noqa: PLC0415 - most launches prove nothing

    result, folder = prove_by_restarts(
        request, num_pairs, os.environ, say=lambda line: write_lines(f"lagom run: {line}")
    )
    write_lines(*(f"lagom: {line}" for line in result.conclusion.lines()), f"lagom run: files in {folder}")
    return exit_code() if received() else 0
