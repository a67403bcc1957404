"""The ways in which NCCL can run a collective on a cluster: algorithms, protocols, and the largest chunk of each.

Rings, and trees for all-reduces, are always there. What a machine's switch or card adds (NVLS, NVLS tree, PAT) is taken
from NCCL's own table (`nccl.choice.candidates`), unless the profile stays with the paper's NCCL 2.18.3, where the model
knows rings and trees only. Copy engines are a transport without channels (`nccl.copy_engine`).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.collective.slices import STEP_BYTES
from lagom_overlap.cost.nccl.choice import POINT_TO_POINT, candidates
from lagom_overlap.cost.nccl.chunk import LL128_CHUNK_BYTES, LL_CHUNK_BYTES, NVLS_CHUNK_BYTES
from lagom_overlap.cost.nccl.machines import on_topology
from lagom_overlap.cost.nccl.point_to_point import SLOW_CHUNK_BYTES
from lagom_overlap.cost.profile import Collectives
from lagom_overlap.hardware import Cluster, LinkKind

CHAINED: Final = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
BEYOND_RINGS: Final = (Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.PAT)
"""Algorithms whose cost is NCCL's own model of them: the specification's formula has rings and trees only."""


def algorithms_of(collective: Collective, cluster: Cluster, collectives: Collectives) -> tuple[Algorithm | None, ...]:
    """The algorithms of a collective, rings first: point-to-point has none, only all-reduce has trees.

    Raises:
        JobError: if the cluster has fewer GPUs than the collective has ranks.
    """
    kind = collective.kind
    if kind in POINT_TO_POINT:
        return (None,)
    plain = (Algorithm.RING, Algorithm.TREE) if kind is CollectiveKind.ALL_REDUCE else (Algorithm.RING,)
    return (
        plain
        if collectives is Collectives.PAPER
        else (*plain, *_beyond_rings(replace(collective, num_bytes=1), cluster))
    )


@lru_cache(maxsize=256)
def _beyond_rings(collective: Collective, cluster: Cluster) -> tuple[Algorithm, ...]:
    found = candidates(*on_topology(collective, cluster))
    return tuple(dict.fromkeys(way.algorithm for way in found if way.algorithm in BEYOND_RINGS))


def protocols_of(kind: CollectiveKind, intra: LinkKind, algorithm: Algorithm | None = None) -> tuple[Protocol, ...]:
    """The protocols of a kind: LL128 needs NVLink and is not for point-to-point; NVLS and PAT have Simple only."""
    if algorithm in BEYOND_RINGS:
        return (Protocol.SIMPLE,)
    if kind in POINT_TO_POINT or intra is not LinkKind.NVLINK:
        return Protocol.SIMPLE, Protocol.LL
    return Protocol.SIMPLE, Protocol.LL, Protocol.LL128


def largest_chunk_bytes(
    kind: CollectiveKind, algorithm: Algorithm | None, protocol: Protocol, intra: LinkKind = LinkKind.NVLINK
) -> int:
    """The largest chunk on the wire, for rings and trees also NCCL's own: FIFO steps of the protocol's buffer.

    Simple: 4 steps (2 MiB) for rings of all-reduce, all-gather, reduce-scatter; 1 step (512 KiB) for trees, broadcast,
    reduce and PAT; 128 KiB for NVLS; 512 KiB per peer over NVLink and 128 KiB otherwise for point-to-point
    (NCCL_P2P_NVL_CHUNKSIZE, NCCL_P2P_PCI_CHUNKSIZE). LL: one step of 64 KiB, half of it data. LL128: one step of
    600 KiB, 15/16 of it data.
    """
    match protocol:
        case Protocol.LL:
            return LL_CHUNK_BYTES
        case Protocol.LL128:
            return LL128_CHUNK_BYTES
        case Protocol.SIMPLE:
            if kind in POINT_TO_POINT:
                return STEP_BYTES if intra is LinkKind.NVLINK else SLOW_CHUNK_BYTES
            if algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE):
                return NVLS_CHUNK_BYTES
            return STEP_BYTES if algorithm in (Algorithm.TREE, Algorithm.PAT) or kind in CHAINED else 4 * STEP_BYTES
