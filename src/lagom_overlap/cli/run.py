"""`lagom run -- COMMAND`: a training command with our plug-in and hooks loaded: watched, tuned, or set by a file.

The command takes this process's place: its streams, signals and exit code are the job's own.
"""

import argparse
import os
from pathlib import Path

from lagom_overlap.stderr import write_lines
from lagom_overlap.verbs.run import LaunchRequest, RunMode, command_of, prepare, replace_process


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("run", help="run a training command watched, tuned or configured", description=__doc__)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--observe", action="store_true", help="change nothing: record, warn, say what could be reached")
    way.add_argument("--online", action="store_true", help="tune the job's collectives while it runs")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="RUN",
        help="start from a run folder, settings that online tuning saved, or a plug-in table",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for what is written (default: lagom-runs/)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the training command")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Becomes the command; returns only if that fails."""
    mode = RunMode.OBSERVE if arguments.observe else RunMode.ONLINE if arguments.online else RunMode.FIXED
    request = LaunchRequest(
        command=command_of(arguments.command), mode=mode, config=arguments.config, out=arguments.out
    )
    launch = prepare(request, os.environ)
    write_lines(*(f"lagom run: {warning}" for warning in launch.warnings))
    if launch.folder is not None:
        write_lines(f"lagom run: {mode}, files in {launch.folder}")
    replace_process(launch)
    return 1
