"""`lagom init SOURCE`: a commented job file from a model, a `config.json`, a training script, a trace, or answers."""

import argparse
import sys
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.stdout import say, visible
from lagom_overlap.errors import JobError
from lagom_overlap.stderr import write_lines
from lagom_overlap.verbs.init import run_init
from lagom_overlap.verbs.init_file import InitRequest
from lagom_overlap.verbs.init_questions import asked_for


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if arguments.source is None:
        request = replace(_asked(), out=arguments.out, only_checks=arguments.check)
    else:
        request = InitRequest(
            source=arguments.source,
            cluster=arguments.cluster,
            num_gpus=arguments.gpus,
            seq_len=arguments.seq_len,
            out=arguments.out,
            only_checks=arguments.check,
        )
    log = Console(stderr=True)
    with log.status("choosing a layout") if is_terminal() else PlainLines("init", "choosing a layout"):
        result = run_init(request)
    written = [f"Written: {', '.join(map(str, result.files))}"] if result.files else []
    if written or result.notes:
        show(Text("\n".join((*written, *map(visible, result.notes)))))
    say("\n".join(result.next))
    if result.refused:
        raise JobError(result.refused)
    return 0


def _asked() -> InitRequest:
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stdout.isatty():
        raise JobError(
            "name a model: lagom init MODEL --cluster NAME --gpus N; MODEL may also be a config.json, a "
            "training script or a trace; on a terminal it asks"
        )
    try:
        return asked_for(input, write_lines)
    except EOFError:
        raise JobError("the questions were not answered: nothing is written") from None
