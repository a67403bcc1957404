"""The questions of `lagom init` without a source, on a terminal."""

from collections.abc import Callable
from typing import TypeVar

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.jobfile.spec import ClusterTable
from lagom_overlap.jobfile.step import SEQ_LEN, cluster_of, stated_cluster
from lagom_overlap.verbs.init_config import read_model
from lagom_overlap.verbs.init_file import InitRequest
from lagom_overlap.workload.parallel.layout import MAX_GPUS

T = TypeVar("T")


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
