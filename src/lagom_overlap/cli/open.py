"""`lagom open`: the page of a run, in the browser."""

import argparse
import webbrowser

from lagom_overlap.cli.stdout import say
from lagom_overlap.verbs.saved_runs import report_of


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code; a machine without a browser gets the path alone."""
    page = report_of(arguments.folder).resolve()
    say(str(page))
    if not webbrowser.open(page.as_uri()):
        say("No browser was found here: copy the file to a machine that has one; it needs no network.")
    return 0
