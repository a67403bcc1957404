"""`lagom capture`: a training step of your model becomes a file that simulate, tune and plan read; no GPU, no weights.

TARGET is SCRIPT.py:FUNCTION (the function returns a TrainingStep; the script is your own code and is run), a job file
whose [model] and [parallel] say what to build, or a model's name with --parallel.
"""

import argparse
import sys
from pathlib import Path

from lagom_overlap.cli.output import say
from lagom_overlap.verbs.capture import CaptureRequest, run_capture


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("capture", help="capture a training step of a model", description=__doc__)
    parser.add_argument("target", metavar="TARGET", help="SCRIPT.py:FUNCTION, JOB.toml, or a model's name")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="new file, packed if it ends in .gz")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of a script's world (default 8)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to capture (default 0)")
    parser.add_argument("--parallel", metavar="KEY=N,...", help="degrees of a named model, such as fsdp=8,tensor=2")
    parser.add_argument("--seq-len", type=int, metavar="N", help="sequence length of a named model (default 2048)")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="sequences per rank of a named model (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    result = run_capture(
        CaptureRequest(
            target=arguments.target,
            out=arguments.out,
            num_ranks=arguments.ranks,
            rank=arguments.rank,
            parallel=arguments.parallel,
            seq_len=arguments.seq_len,
            micro_batch=arguments.micro_batch,
        )
    )
    sys.stdout.flush()
    say(result.to_json() if arguments.json else result.summary())
    return 0
