"""`lagom show FILE`: anything that lagom writes or reads, in words."""

import argparse

from rich.console import Group
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.stdout import say, visible
from lagom_overlap.report.fitted_table import to_type
from lagom_overlap.verbs.show import run_show

MAX_LINES = 40
"""Lines in the terminal; --json has all."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    result = run_show(arguments.file)
    if arguments.json:
        say(result.to_json())
        return 0
    more = len(result.said) - MAX_LINES
    lines = [Text(visible(f"{result.path}: {result.what}"), style="bold")]
    lines += [Text(visible(line)) for line in result.said[:MAX_LINES]]
    lines += [Text(f"and {more} more (--json)", style="dim")] if more > 0 else []
    lines += [Text(), to_type(visible(result.next))] if result.next else []
    show(Group(*lines))
    return 0
