"""`lagom diff A B`: two runs or two traces, what differs and whether it is measurable."""

import argparse
import os

from lagom_overlap.cli.stdout import say, visible
from lagom_overlap.errors import JobError
from lagom_overlap.verbs.diff import is_run, run_diff


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    sides = [is_run(path) for path in (arguments.first, arguments.second)]
    if all(sides):
        result = run_diff(arguments.first, arguments.second)
        say(result.to_json() if arguments.json else visible(result.summary()))
        return 0
    for path in (arguments.first, arguments.second):
        if not path.exists():
            raise JobError(f"{str(path)!r} does not exist; give two run folders or two traces")
    if any(sides):
        other = arguments.second if sides[0] else arguments.first
        raise JobError(f"one is a run folder, {str(other)!r} is not: give two run folders, or two traces")
    return _traces(arguments)


def _traces(arguments: argparse.Namespace) -> int:
    """The second trace against the first: what `lagom analyze B --against A` says."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from lagom_overlap.cli.analyze_run import analyse_and_print  # noqa: PLC0415 - traces only
    from lagom_overlap.verbs.analyze import AnalyzeRequest  # noqa: PLC0415

    request = AnalyzeRequest(traces=(arguments.second,), against=(arguments.first,))
    return analyse_and_print(request, is_json=arguments.json)
