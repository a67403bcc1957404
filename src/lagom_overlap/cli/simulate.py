"""`lagom simulate JOB.toml`: predict an iteration: time, MFU, memory, what is exposed and what is stretched."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from lagom_overlap.job.simulate import SimulateRequest, run_simulate
from lagom_overlap.job.spec import read_job
from lagom_overlap.report.simulate_terminal import WIDTH, simulation_summary


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("simulate", help="predict the time of a training iteration", description=__doc__)
    parser.add_argument("job", type=Path, metavar="JOB.toml", help="the job file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for run.json, report.html, timeline.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    result = run_simulate(SimulateRequest(spec=read_job(arguments.job), out=arguments.out))
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(result.json).decode() + "\n")
        return 0
    Console(width=None if sys.stdout.isatty() else WIDTH).print(simulation_summary(result.json))
    if result.folder is not None:
        sys.stdout.write(
            f"\nReport: {result.folder / 'report.html'}\nTimeline (Perfetto): {result.folder / 'timeline.json'}\n"
        )
    return 0
