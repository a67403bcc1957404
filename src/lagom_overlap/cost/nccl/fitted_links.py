"""Links fitted to published measurements, by GPU and number of ranks on one node: `[[nccl.links]]` of a GPU's file."""

from functools import lru_cache
from math import log
from typing import Final

from lagom_overlap.cost.nccl.machines import nccl_of
from lagom_overlap.cost.nccl.wire import FittedLink
from lagom_overlap.hardware import Cluster, LinkKind

_AGREEMENT: Final = (0.75, 2.0)
"""A measured bandwidth over the stated one: between these it is taken as measured. Fewer ranks may have a faster wire
than the whole node's ring, which a cluster states: bridged pairs."""
_CONTRADICTION: Final = (0.6, 4.0)
"""Beyond these the cluster is not the machine that was measured, and its own figure is taken. Chosen, as are the first
two; between the pairs the bandwidth follows a straight line, so that no small change of an input moves a price much."""


@lru_cache(maxsize=256)
def link_of(cluster: Cluster, num_ranks: int, num_nodes: int | None = None) -> FittedLink | None:
    """The measured link of that many ranks on one node of such GPUs, or None where nobody measured such GPUs.

    The machines measured are those of the files' sources: eight A40 in bridged pairs, DGX A100 and H100. Numbers of
    ranks that nobody measured have the link of the nearest one. A measurement refines what a cluster says of its wires
    and does not contradict it: where the kind is another or the cluster says so (`Link.measured`) there is none, and
    where the bandwidths are far apart, the cluster's own is taken (`refined_bytes_per_s`) with the measured latency.

    Raises:
        JobError: if the cluster has fewer GPUs.
    """
    intra = cluster.intra
    if cluster.num_nodes_of(num_ranks, num_nodes) > 1 or intra.kind is not LinkKind.NVLINK or not intra.measured:
        return None
    links = nccl_of(cluster.gpu).links
    if not links:
        return None
    nearest = min(links, key=lambda link: abs(log(link.num_ranks / num_ranks)))
    return FittedLink(refined_bytes_per_s(nearest.bytes_per_s, intra.bytes_per_s), nearest.latency_scale)


def refined_bytes_per_s(measured: float, stated: float) -> float:
    """A wire's bandwidth from a measured and a stated one, in B/s; continuous, and never less for a larger `stated`."""
    least, most = _AGREEMENT
    if stated > measured / least:
        share = (stated - measured / least) / (measured / _CONTRADICTION[0] - measured / least)
        return stated if share >= 1.0 else measured + share * (measured / _CONTRADICTION[0] - measured)
    if stated < measured / most:
        share = (measured / most - stated) / (measured / most - measured / _CONTRADICTION[1])
        return stated if share >= 1.0 else measured - share * (measured - measured / _CONTRADICTION[1])
    return measured
