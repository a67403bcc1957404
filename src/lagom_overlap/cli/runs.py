"""`lagom runs`: the run folders that there are."""

import argparse
import shlex

from rich.console import Group
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.stdout import say, visible
from lagom_overlap.jobfile.run_folder import RUNS_FOLDER, RunKind
from lagom_overlap.report.fitted_table import to_type
from lagom_overlap.verbs.saved_runs import run_runs

_HEAD = ("when (UTC)", "verb", "job", "folder")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    result = run_runs(arguments.folder)
    if arguments.json:
        say(result.to_json())
        return 0
    if not result.runs:
        where = "this folder" if arguments.folder is None else repr(str(result.below))
        say(
            f"No run in {where} or in its {RUNS_FOLDER}. lagom tune writes one always, other verbs with --out DIR.\n"
            "Next: lagom analyze --example --out example"
        )
        return 0
    rows = [
        (_when(listed.date), RunKind(listed.kind).words, visible(listed.job) or "-", visible(str(listed.folder)))
        for listed in result.runs
    ]
    widths = [max(map(len, column)) for column in zip(_HEAD[:-1], *(row[:-1] for row in rows), strict=True)]
    lines = ["  ".join((*map(str.ljust, row, widths), row[-1])) for row in (_HEAD, *rows)]
    latest = next((listed.folder for listed in result.runs if listed.report is not None), None)
    verb, folder = ("show", result.runs[0].folder) if latest is None else ("open", latest)
    show(
        Group(
            *(to_type(line) for line in lines),  # a folder's name that is broken cannot be copied
            Text(),
            to_type(visible(f"Next: lagom {verb} {shlex.quote(str(folder))}")),
        )
    )
    return 0


def _when(date: str) -> str:
    """A run's date as it is shown."""
    return visible(date.replace("T", " ").removesuffix("Z"))
