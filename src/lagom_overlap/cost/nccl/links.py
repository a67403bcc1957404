"""Links fitted to published measurements, by GPU and number of ranks on one node: `data/links.toml`."""

import tomllib
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Final

import msgspec

from lagom_overlap.cost.nccl.wire import FittedLink
from lagom_overlap.hardware import Cluster, LinkKind

_AGREEMENT: Final = (0.75, 2.0)
"""Fewer ranks may have a faster wire than the whole node's ring, which a cluster states: bridged pairs."""


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


@lru_cache(maxsize=256)
def link_of(cluster: Cluster, num_ranks: int, num_nodes: int | None = None) -> FittedLink | None:
    """The measured link of that many ranks on one node of such GPUs, or None where nobody measured it.

    The machines measured are those of the file's sources: eight A40 in bridged pairs, DGX A100 and H100. A measurement
    refines what a cluster says of its wires and does not contradict it: where the kind is another, or the bandwidth
    outside `_AGREEMENT` times the stated one, the cluster is not one of those machines.

    Raises:
        JobError: if the cluster has fewer GPUs.
    """
    if cluster.num_nodes_of(num_ranks, num_nodes) > 1 or cluster.intra.kind is not LinkKind.NVLINK:
        return None
    name = cluster.gpu.name.upper()
    for (gpu, ranks), link in _entries().items():
        ratio = link.bytes_per_s / cluster.intra.bytes_per_s
        if name.startswith(gpu) and ranks == num_ranks and _AGREEMENT[0] <= ratio <= _AGREEMENT[1]:
            return link
    return None
