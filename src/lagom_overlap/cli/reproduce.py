"""`lagom reproduce FIGURE`: the Lagom paper's evaluation on the simulator, each line with a verdict.

`lagom reproduce data` lists the third-party data behind docs/accuracy.md, and fetches what is missing with --fetch.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from lagom_overlap.cli.output import say, show
from lagom_overlap.cli.tune import seed
from lagom_overlap.errors import DataError, JobError, UnknownNameError
from lagom_overlap.job.reproduce import ALL, CHAPTERS, run_reproduce
from lagom_overlap.job.reproduce.data_report import data_report
from lagom_overlap.job.reproduce.datasets import State, cache_root, data_roots, datasets, fetch, look_up
from lagom_overlap.job.spec import link_bytes_per_s
from lagom_overlap.record import create_folder, write_private
from lagom_overlap.report.reproduce_data import data_table
from lagom_overlap.report.reproduce_page import headline, render_reproduction
from lagom_overlap.report.reproduce_report import ReproduceReport
from lagom_overlap.report.reproduce_terminal import lines_table

DATA: Final = "data"
WORKERS_LINK: Final = "3 Gbit/s"


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("reproduce", help="the paper's evaluation on the simulator", description=__doc__)
    parser.add_argument("figure", metavar="FIGURE", help=", ".join((*CHAPTERS, ALL, DATA)))
    parser.add_argument(
        "--backend",
        choices=("simulated", "workers"),
        default="simulated",
        help="workers: measure fig3 on this machine, on threads that contend for its cores (default: simulated)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="emulated link of --backend workers, or loopback (default: " + WORKERS_LINK + ")",
    )
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help="seed of the searches (default: 1)")
    parser.add_argument("--fetch", action="store_true", help="with data: fetch what is missing, into the cache")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for report.html and reproduce.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if arguments.figure == DATA:
        return _data(arguments)
    if arguments.figure not in (*CHAPTERS, ALL):
        raise UnknownNameError.among("figure", arguments.figure, (*CHAPTERS, ALL, DATA))
    if arguments.fetch:
        raise DataError(f"--fetch goes with `lagom reproduce {DATA}`, not with {arguments.figure!r}")
    if arguments.backend == "workers" and arguments.figure != "fig3":
        raise JobError(f"--backend workers measures fig3, not {arguments.figure}; leave it out for the simulator")
    if arguments.backend != "workers" and arguments.link is not None:
        raise JobError(f"--link {arguments.link!r} has no meaning without --backend workers")
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
        say(encoded.decode())
        return 0
    show(lines_table(report))
    show(f"\n{headline(report)}")
    if arguments.out is not None:
        say(f"Report: {arguments.out / 'report.html'}")
    return 0


def _on_workers(arguments: argparse.Namespace, note: Callable[[str], None]) -> ReproduceReport:
    from lagom_overlap.job.reproduce.figure3_workers import figure3_on_workers  # noqa: PLC0415  torch is an extra

    link = WORKERS_LINK if arguments.link is None else arguments.link
    return figure3_on_workers(seed=arguments.seed, link_bytes_per_s=link_bytes_per_s(link, "--link"), note=note)


def _data(arguments: argparse.Namespace) -> int:
    if arguments.out is not None:
        raise DataError(f"--out has no meaning with `lagom reproduce {DATA}`: files go to {cache_root()}")
    log = Console(stderr=True)
    held = datasets()
    found = fetch(held, note=lambda line: log.print(line, soft_wrap=True)) if arguments.fetch else map(look_up, held)
    report = data_report(found)
    if arguments.json:
        say(msgspec.json.encode(report).decode())
        return 0
    show(data_table(report))
    missing = sum(row.state == State.ABSENT for row in report.datasets)
    say(f"\nLooked in: {', '.join(str(root) for root in data_roots())}")
    if missing:
        say(f"{missing} absent; `lagom reproduce {DATA} --fetch` gets them.")
    return 0
