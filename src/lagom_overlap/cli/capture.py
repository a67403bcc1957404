"""`lagom capture`: a training step of your model becomes a file that simulate, tune and plan read; no GPU, no weights.

TARGET is SCRIPT.py:FUNCTION (the function returns a TrainingStep; the script is your own code and is run), a job file
whose [model] and [parallel] say what to build, or a model's name with --parallel.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from lagom_overlap.cli.output import say
from lagom_overlap.job.capture import CaptureJson, CaptureRequest, run_capture
from lagom_overlap.units import format_bytes, format_seconds


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
    say(msgspec.json.encode(result).decode() if arguments.json else _summary(result))
    return 0


def _summary(result: CaptureJson) -> str:
    lines = [
        f"{result.name}: rank {result.rank} of {result.num_ranks}, captured in {format_seconds(result.capture_s)}",
        f"  {result.num_ops} operators, {result.num_comms} collectives, {result.num_shardable} can be cut; "
        f"{result.flops / 1e12:.3g} TFLOP; {format_bytes(result.resident_bytes)} stay in memory",
    ]
    lines += [
        f"  {comm.name}: {len(comm.ranks)} ranks, {comm.num_comms} collectives, {format_bytes(comm.num_bytes)}"
        for comm in result.communicators
    ]
    return "\n".join([*lines, *(f"  note: {note}" for note in result.notes), f"Written: {result.files[0]}"])
