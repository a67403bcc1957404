"""`lagom export RUN`: what a run found, in the forms that a job, NCCL or a framework reads."""

import argparse

from lagom_overlap.cli.stdout import say
from lagom_overlap.verbs.export import ExportRequest, Format, run_export


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    result = run_export(
        ExportRequest(
            run=arguments.folder,
            formats=tuple(map(Format, arguments.format)),
            out=arguments.out,
            groups=dict(arguments.group),
        )
    )
    say(result.to_json() if arguments.json else result.summary())
    return 0
