"""`lagom analyze TRACE...`: what overlap a job has, what contention costs it, what to do."""

import argparse
import os
from pathlib import Path
from typing import Final

MAX_JOBS: Final = 64
_COMPAT: Final = ("hta",)


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("analyze", help="say what overlap profiler traces show", description=__doc__)
    parser.add_argument(
        "traces",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="Kineto JSON (.json, .json.gz, .tar.gz), Nsight Systems SQLite, NCCL Inspector JSON lines, flight "
        "recorder JSON, or a folder of them; one rank per parallel role suffices; or profiles of our NCCL plug-in "
        "(profile.RANK.bin)",
    )
    parser.add_argument("--against", type=Path, metavar="B", help="another run's trace or folder: say what changed")
    parser.add_argument("--compat", choices=_COMPAT, help="print HolisticTraceAnalysis's figures")
    parser.add_argument("--pattern", metavar="REGEX", help="regular expression of further kernels that communicate")
    parser.add_argument(
        "--anonymise",
        action="store_true",
        help="numbers instead of the names of files, kernels and communicators in everything written",
    )
    parser.add_argument("--jobs", type=jobs, metavar="N", help="processes that read (default: one per core)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for run.json, report.html, timeline.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def jobs(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_JOBS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; allowed: 1 to {MAX_JOBS}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # no matrix is multiplied here; starting threads is half of numpy
    from lagom_overlap.cli.analyze_run import run_verb  # noqa: PLC0415 - numpy, after the line above

    return run_verb(arguments, most_jobs=MAX_JOBS)
