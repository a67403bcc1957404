"""`lagom resume RUN`: a run of `lagom tune` that was cut off goes on in its folder."""

import argparse

from lagom_overlap.cli.tune import tune
from lagom_overlap.verbs.resume import held, resumed


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    with held(arguments.folder):
        return tune(resumed(arguments.folder), as_json=arguments.json, details=arguments.details)
