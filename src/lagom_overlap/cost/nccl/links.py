"""Links fitted to published measurements, by GPU and number of ranks on one node: `[[nccl.links]]` of a GPU's file."""

from functools import lru_cache
from typing import Final

from lagom_overlap.cost.nccl.machines import nccl_of
from lagom_overlap.cost.nccl.wire import FittedLink
from lagom_overlap.hardware import Cluster, LinkKind

_AGREEMENT: Final = (0.75, 2.0)
"""Fewer ranks may have a faster wire than the whole node's ring, which a cluster states: bridged pairs."""


@lru_cache(maxsize=256)
def link_of(cluster: Cluster, num_ranks: int, num_nodes: int | None = None) -> FittedLink | None:
    """The measured link of that many ranks on one node of such GPUs, or None where nobody measured it.

    The machines measured are those of the files' sources: eight A40 in bridged pairs, DGX A100 and H100. A measurement
    refines what a cluster says of its wires and does not contradict it: where the kind is another, or the bandwidth
    outside `_AGREEMENT` times the stated one, the cluster is not one of those machines.

    Raises:
        JobError: if the cluster has fewer GPUs.
    """
    if cluster.num_nodes_of(num_ranks, num_nodes) > 1 or cluster.intra.kind is not LinkKind.NVLINK:
        return None
    for link in nccl_of(cluster.gpu).links:
        ratio = link.bytes_per_s / cluster.intra.bytes_per_s
        if link.num_ranks == num_ranks and _AGREEMENT[0] <= ratio <= _AGREEMENT[1]:
            return link.fitted
    return None
