"""`lagom init SOURCE`: a commented job file from a model's name or a Hugging Face `config.json`."""

import argparse

from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.stdout import say
from lagom_overlap.jobfile.step import SEQ_LEN
from lagom_overlap.verbs.init import InitRequest, next_lines, run_init


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    request = InitRequest(
        source=arguments.source,
        cluster=arguments.cluster,
        num_gpus=arguments.gpus,
        seq_len=arguments.seq_len or SEQ_LEN,
        out=arguments.out,
        only_checks=arguments.check,
    )
    result = run_init(request)
    show(
        Text("\n".join((*((f"Written: {', '.join(map(str, result.files))}",) if result.files else ()), *result.notes)))
    )
    if result.files:
        say("\n".join(next_lines(request)))
    return 0
