"""The flags of `lagom reproduce`: what `lagom --help` reads."""

import argparse
from pathlib import Path
from typing import Final

from lagom_overlap.cli.flags import seed

CHAPTERS: Final = ("fig3", "fig5", "fig7", "fig8", "convergence", "equations", "hidden", "scaling")
ALL_CHAPTERS: Final = "all"
DATA: Final = "data"
"""`reproduce` shows data instead of a chapter."""
WORKERS_LINK: Final = "3 Gbit/s"


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`lagom reproduce FIGURE`: repeat the Lagom paper's evaluation on the simulator, each line with a verdict.

    `lagom reproduce data` lists the third-party data behind the figures of accuracy; --fetch fetches what is missing.
    """
    parser = verbs.add_parser(
        "reproduce", help="repeat the paper's evaluation on the simulator", description=add_parser.__doc__
    )
    parser.add_argument("figure", metavar="FIGURE", help=", ".join((*CHAPTERS, ALL_CHAPTERS, DATA)))
    parser.add_argument(
        "--backend",
        choices=("simulated", "workers"),
        default="simulated",
        help="workers: measure fig3 on this machine, on threads that contend for its cores (default: simulated)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help=f"emulated link of --backend workers, or loopback (default: {WORKERS_LINK})",
    )
    parser.add_argument(
        "--unknowns",
        action="store_true",
        help="also vary what the paper leaves open, and say where each line holds: sequence, precision, kernels, "
        "links, NCCL (fig7 takes some minutes)",
    )
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help="seed of the searches (default: 1)")
    parser.add_argument("--fetch", action="store_true", help="with data: fetch what is missing into the cache")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for report.html and reproduce.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lagom_overlap.papers.cli import run  # noqa: PLC0415 - only once the verb is called

    return run(arguments)
