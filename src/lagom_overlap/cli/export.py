"""`lagom export RUN`: what a run found, in the forms that a job, NCCL or a framework reads."""

import argparse
from pathlib import Path

from lagom_overlap.cli.output import say
from lagom_overlap.verbs.export import ExportRequest, Format, run_export


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("export", help="write a run's configuration for a job to read", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUN", help="run folder of lagom tune, or saved settings")
    parser.add_argument(
        "--format",
        action="append",
        choices=[form.value for form in Format],
        required=True,
        help="what to write; may be given several times",
    )
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        type=group,
        metavar="NAME=GROUP",
        help="megatron_yaml: Megatron's group for a communicator of the run",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write into, made if it is not there (default: RUN)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def group(text: str) -> tuple[str, str]:
    """A communicator's description and Megatron's name for it."""
    name, separator, megatron = text.partition("=")
    if not (name and separator and megatron):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=GROUP")
    return name, megatron


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
