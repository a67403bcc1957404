"""`lagom doctor`: what this machine and its NCCL can do, what is missing, what would work."""

import argparse

from rich.table import Table
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.stdout import say
from lagom_overlap.report.fitted_table import Fitted
from lagom_overlap.results.doctor import DoctorResult
from lagom_overlap.verbs.doctor import run_doctor


def _table(report: DoctorResult) -> Fitted:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    table.add_column("", overflow="fold")
    for check in report.checks:
        mark = Text("ok", style="green") if check.ok else Text("--", style="yellow")
        text = check.found + (f"\n{check.remedy}" if check.remedy else "")
        table.add_row(mark, Text(check.name), Text(text))
    for name, values in (("tuners", report.tuners), ("backends", report.backends)):
        table.add_row(Text(""), Text(name), Text(", ".join(values)))
    for name, values in (("clusters", report.presets), ("models", report.models)):
        table.add_row(Text(""), Text(name), Text(f"{len(values)}: lagom list {name}"))
    return Fitted(table)


_LEGEND = (
    "P: by the tuner plug-in; S: by sibling communicators; 'lower': only below NCCL's own; 'some': with limits, see "
    "lagom docs support. Transport: never. From NCCL's sources; of 2.30.7 tried on one H100."
)
_HEADERS = {"channels of all-to-all": "all-to-\nall ch."}
_ROUTES = {"plugin": "P", "sibling": "S"}
_REACHES = {"yes": "", "lower only": " lower", "partly": " some"}


def _support(report: DoctorResult) -> Fitted:
    """The support matrix: by which route each knob can be set, per NCCL."""
    table = Table(box=None, padding=(0, 1))
    for header in ("NCCL", "torch", *report.support[0].knobs):
        table.add_column(_HEADERS.get(header, header), no_wrap=header != "NCCL")
    for row in report.support:
        cells = [_ROUTES[k.route] + _REACHES[k.reach] if k.route else "-" for k in row.knobs.values()]
        style = "bold" if row.is_here else ""
        table.add_row(*(Text(cell) for cell in (row.nccl, ", ".join(row.torch) or "-", *cells)), style=style)
    return Fitted(table)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    report = run_doctor()
    if arguments.json:
        say(report.to_json())
        return 0
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    machine = f"{report.machine['cpu']}, {report.machine['cores']} cores, load {report.machine['load_1min']}"
    show(Text(f"lagom {report.version}: {versions}\n{machine}"), _table(report))
    say("\nWhat can be set in a running job, by NCCL:")
    show(_support(report), Text(_LEGEND))
    say("\nNext: lagom run --observe -- COMMAND  # what your job calls, what can be set")
    return 0
