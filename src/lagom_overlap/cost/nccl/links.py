"""Links fitted to published measurements, by GPU and number of ranks on one node: `data/links.toml`."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

from lagom_overlap.collective import Collective
from lagom_overlap.cost.nccl.machines import topology_of
from lagom_overlap.cost.nccl.wire import FittedLink, wire_terms
from lagom_overlap.hardware import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    gpu: str
    num_ranks: int
    bytes_per_s: float
    latency_scale: float


@cache
def _entries() -> dict[tuple[str, int], FittedLink]:
    text = (resources.files(__package__) / "data" / "links.toml").read_text(encoding="utf-8")
    entries = msgspec.convert(tomllib.loads(text), dict[str, list[_Entry]])["links"]
    return {(entry.gpu, entry.num_ranks): FittedLink(entry.bytes_per_s, entry.latency_scale) for entry in entries}


def link_of(cluster: Cluster, num_ranks: int) -> FittedLink | None:
    """The measured link of so many ranks on one node of such GPUs, or None where nobody measured it.

    The machines measured are those of the file's sources: eight A40 in bridged pairs, DGX A100 and H100. A cluster that
    is said to have other wires is not theirs.

    Raises:
        JobError: if the cluster has fewer GPUs.
    """
    if cluster.num_nodes_of(num_ranks) > 1:
        return None
    name = cluster.gpu.name.upper()
    return next(
        (link for (gpu, ranks), link in _entries().items() if name.startswith(gpu) and ranks == num_ranks), None
    )


def measured_seconds(collective: Collective, cluster: Cluster) -> float | None:
    """The time of a collective untouched, alone, on a cluster whose link was measured; else None.

    Fitted on all-reduces; for other collectives it is a prediction.

    Raises:
        JobError: if the cluster has fewer GPUs than the collective has ranks.
    """
    link = link_of(cluster, collective.num_ranks)
    return None if link is None else wire_terms(collective, topology_of(cluster, collective.num_ranks)).seconds(link)
