"""`lagom analyze TRACE...`: what overlap a job has, what contention costs it, what to do."""

import argparse
import os


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # no matrix is multiplied here; starting threads is half of numpy
    from lagom_overlap.cli.analyze_run import run_verb  # noqa: PLC0415 - numpy, after the line above

    return run_verb(arguments)
