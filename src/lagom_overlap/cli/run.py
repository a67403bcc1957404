"""`lagom run -- COMMAND`: a training command with our plug-in and hooks loaded: watched, tuned, or set by a file.

The command takes this process's place: its streams, signals and exit code are the job's own.
"""

import argparse
import os

from lagom_overlap.stderr import write_lines
from lagom_overlap.verbs.run import LaunchRequest, RunMode, command_of, prepare, replace_process


def run(arguments: argparse.Namespace) -> int:
    """Becomes the command; returns only if that fails."""
    mode = RunMode.OBSERVE if arguments.observe else RunMode.ONLINE if arguments.online else RunMode.FIXED
    request = LaunchRequest(
        command=command_of(arguments.command),
        mode=mode,
        config=arguments.config,
        tuner=arguments.tuner,
        out=arguments.out,
    )
    launch = prepare(request, os.environ)
    write_lines(*(f"lagom run: {warning}" for warning in launch.warnings))
    if launch.folder is not None:
        write_lines(f"lagom run: {mode}, files in {launch.folder}")
    replace_process(launch)
    return 1
