"""`lagom capture`: a training step of your model becomes a file that simulate, tune and plan read; no GPU, no weights.

TARGET is SCRIPT.py:FUNCTION (the function returns a TrainingStep; the script is your own code and is run), a job file
whose [model] and [parallel] say what to build, or a model's name with --parallel.
"""

import argparse
import shlex
import sys

from lagom_overlap.cli.stdout import say
from lagom_overlap.verbs.capture import CaptureRequest, run_capture


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
    if arguments.json:
        say(result.to_json())
    else:
        follow = f"lagom plan {shlex.quote(str(arguments.out))} --cluster h100_dgx    # any of lagom list clusters"
        say(f"{result.summary()}\nNext: {follow}")
    return 0
