"""`lagom reproduce FIGURE`: the Lagom paper's evaluation on the simulator, each line with a verdict."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from lagom_overlap.cli.tune import seed
from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.job.reproduce import ALL, CHAPTERS, run_reproduce
from lagom_overlap.job.spec import link_bytes_per_s
from lagom_overlap.record import create_folder, write_private
from lagom_overlap.report.reproduce_page import headline, render_reproduction
from lagom_overlap.report.reproduce_report import ReproduceReport
from lagom_overlap.report.reproduce_terminal import lines_table


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("reproduce", help="the paper's evaluation on the simulator", description=__doc__)
    parser.add_argument("figure", metavar="FIGURE", help=", ".join((*CHAPTERS, ALL)))
    parser.add_argument(
        "--backend",
        choices=("simulated", "workers"),
        default="simulated",
        help="workers: measure fig3 on this machine, on threads that contend for its cores (default: simulated)",
    )
    parser.add_argument(
        "--link",
        default="3 Gbit/s",
        metavar="RATE",
        help="emulated link of --backend workers, or loopback (default: 3 Gbit/s)",
    )
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help="seed of the searches (default: 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for report.html and reproduce.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if arguments.figure not in (*CHAPTERS, ALL):
        raise UnknownNameError.among("figure", arguments.figure, (*CHAPTERS, ALL))
    if arguments.backend == "workers" and arguments.figure != "fig3":
        raise JobError(f"--backend workers measures fig3, not {arguments.figure}; leave it out for the simulator")
    if arguments.out is not None:
        create_folder(arguments.out)
    log = Console(stderr=True)
    note = log.print if sys.stderr.isatty() else lambda _: None
    if arguments.backend == "workers":
        report = _on_workers(arguments, note)
    else:
        report = run_reproduce(arguments.figure, seed=arguments.seed, note=note)
    encoded = msgspec.json.encode(report)
    if arguments.out is not None:
        write_private(arguments.out / "reproduce.json", encoded + b"\n")
        write_private(arguments.out / "report.html", render_reproduction(report).encode())
    if arguments.json:
        sys.stdout.write(encoded.decode() + "\n")
        return 0
    Console(width=None if sys.stdout.isatty() else 80).print(lines_table(report))
    sys.stdout.write(f"\n{headline(report)}\n")
    if arguments.out is not None:
        sys.stdout.write(f"Report: {arguments.out / 'report.html'}\n")
    return 0


def _on_workers(arguments: argparse.Namespace, note: Callable[[str], None]) -> ReproduceReport:
    from lagom_overlap.job.reproduce.figure3_workers import figure3_on_workers  # noqa: PLC0415  torch is an extra

    return figure3_on_workers(seed=arguments.seed, link_bytes_per_s=link_bytes_per_s(arguments.link), note=note)
