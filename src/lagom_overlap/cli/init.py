"""`lagom init SOURCE`: a commented job file from a model, a `config.json`, a training script, a trace, or answers."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.stdout import say, visible
from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.jobfile.spec import ClusterTable
from lagom_overlap.jobfile.step import SEQ_LEN, cluster_of, stated_cluster
from lagom_overlap.stderr import write_lines
from lagom_overlap.verbs.init import run_init
from lagom_overlap.verbs.init_config import read_model
from lagom_overlap.verbs.init_file import InitRequest
from lagom_overlap.workload.parallel.layout import MAX_GPUS

T = TypeVar("T")


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


def asked_for(ask: Callable[[str], str], tell: Callable[[str], object]) -> InitRequest:
    """The request that somebody answers question by question; `ask` puts one, `tell` says why an answer is none."""

    def answer(question: str, check: Callable[[str], T]) -> T:
        while True:
            try:
                return check(ask(question).strip())
            except LagomError as error:
                tell(str(error))

    def number(text: str) -> int:
        if not text.isdecimal() or not 0 < int(text[:10]) <= MAX_GPUS:
            raise JobError(f"{text!r} is no number of GPUs, must be 1 to {MAX_GPUS}")
        return int(text)

    def length(text: str) -> int:
        if text and (not text.isdecimal() or int(text[:10]) == 0):
            raise JobError(f"{text!r} is no number of tokens, must be 1 or more")
        return int(text[:10]) if text else SEQ_LEN

    def model(text: str) -> str:
        read_model(text)
        return text

    def machine(text: str) -> str:
        stated_cluster(ClusterTable(preset=text))
        return text

    def filled(text: str) -> int:
        cluster_of(name, number(text))
        return int(text)

    source = answer("Model (a name of lagom list models, a config.json, or a model file): ", model)
    name = answer("Cluster (a name of lagom list clusters, or a file): ", machine)
    cluster = stated_cluster(ClusterTable(preset=name))
    gpus = answer(f"GPUs ({cluster.gpus_per_node} a node): ", filled)
    seq_len = answer(f"Tokens per sequence (Enter: {SEQ_LEN}): ", length)
    return InitRequest(source=source, cluster=name, num_gpus=gpus, seq_len=seq_len)
