"""`lagom runs`: the run folders that there are."""

import argparse

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.stdout import say, visible
from lagom_overlap.jobfile.run_folder import RunKind
from lagom_overlap.report.fitted import Fitted
from lagom_overlap.verbs.saved_runs import run_runs


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    result = run_runs(arguments.folder)
    if arguments.json:
        say(result.to_json())
        return 0
    if not result.runs:
        say(f"No run below {result.below}. A run folder is written with --out DIR, by lagom tune always.")
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("when (UTC)", "verb", "job", "folder"):
        table.add_column(name, no_wrap=name != "folder", overflow="fold")
    for listed in result.runs:
        when = listed.date.replace("T", " ").removesuffix("Z")
        cells = (when, RunKind(listed.kind).words, listed.job or "-", str(listed.folder))
        table.add_row(*(Text(visible(cell)) for cell in cells))
    show(Group(Fitted(table), Text(), Text("Open a report: lagom open FOLDER (without FOLDER: the latest)")))
    return 0
