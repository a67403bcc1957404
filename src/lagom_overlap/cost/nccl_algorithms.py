"""The ways in which NCCL can run a collective on a cluster: algorithms, protocols, and the largest chunk of each.

Rings, and trees for all-reduces, are always there. What a machine's switch or card adds (NVLS, NVLS tree, PAT) is taken
from NCCL's own table (`nccl.choice.candidates`), unless the profile stays with the paper's NCCL 2.18.3, where the model
knows rings and trees only. Copy engines are a transport without channels (`nccl.copy_engine`).
"""

from functools import lru_cache
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.collective.config import STEP_BYTES
from lagom_overlap.cost.nccl.choice import candidates
from lagom_overlap.cost.nccl.chunk import LL128_CHUNK_BYTES, LL_CHUNK_BYTES, NVLS_CHUNK_BYTES
from lagom_overlap.cost.nccl.machines import on_topology
from lagom_overlap.cost.nccl.point_to_point import SLOW_CHUNK_BYTES, point_to_point_channels
from lagom_overlap.cost.profile import Collectives
from lagom_overlap.hardware import Cluster, LinkKind

BEYOND_RINGS: Final = (Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.PAT)
"""Algorithms whose cost is NCCL's own model of them: the specification's formula has rings and trees only."""
PAPER_MAX_CHANNELS: Final = 128
"""AutoCCL's fork of NCCL 2.18.3 has as many everywhere."""
_SWITCHED: Final = (Algorithm.NVLS, Algorithm.NVLS_TREE)


def algorithms_of(collective: Collective, cluster: Cluster, collectives: Collectives) -> tuple[Algorithm | None, ...]:
    """The algorithms of a collective, rings first: point-to-point has none, only all-reduce has trees.

    Raises:
        JobError: if the cluster has fewer GPUs than the collective has ranks.
    """
    kind = collective.kind
    if kind.traits.is_point_to_point:
        return (None,)
    plain = (Algorithm.RING, Algorithm.TREE) if kind is CollectiveKind.ALL_REDUCE else (Algorithm.RING,)
    if collectives is Collectives.PAPER:
        return plain
    beyond = dict.fromkeys(way for way, _ in table_ways(collective, cluster) if way in BEYOND_RINGS)
    return (*plain, *beyond)


def table_ways(collective: Collective, cluster: Cluster) -> tuple[tuple[Algorithm, Protocol], ...]:
    """The algorithms and protocols that NCCL's own table has for a collective, which is not point-to-point."""
    return _table_ways(collective.kind, collective.num_ranks, collective.num_nodes, cluster)


@lru_cache(maxsize=256)
def _table_ways(
    kind: CollectiveKind, num_ranks: int, num_nodes: int | None, cluster: Cluster
) -> tuple[tuple[Algorithm, Protocol], ...]:
    ways = candidates(*on_topology(Collective(kind, 1, num_ranks, num_nodes), cluster))
    return tuple((way.algorithm, way.protocol) for way in ways)


def most_channels(
    collective: Collective, algorithm: Algorithm | None, cluster: Cluster, collectives: Collectives
) -> int:
    """The channels of the collective's communicator: however many more are asked for, NCCL runs with these.

    The paper's NCCL 2.18.3 was AutoCCL's fork, which has up to 128 everywhere.
    """
    if collectives is Collectives.PAPER:
        return PAPER_MAX_CHANNELS
    _, topology = on_topology(collective, cluster)
    if algorithm is None:
        return point_to_point_channels(topology)
    return topology.num_nvls_channels if algorithm in _SWITCHED else topology.num_channels


def protocols_of(
    collective: Collective, algorithm: Algorithm | None, cluster: Cluster, collectives: Collectives
) -> tuple[Protocol, ...]:
    """The protocols of an algorithm, Simple first: NVLS and PAT have no other, point-to-point has no LL128.

    LL128 is where NCCL's table has it: not on paths that could tear its 128 bytes. The paper's NCCL has it on NVLink.
    """
    if algorithm in BEYOND_RINGS:
        return (Protocol.SIMPLE,)
    plain = Protocol.SIMPLE, Protocol.LL
    if collective.kind.traits.is_point_to_point or cluster.intra.kind is not LinkKind.NVLINK:
        return plain
    in_table = collectives is Collectives.PAPER or (algorithm, Protocol.LL128) in table_ways(collective, cluster)
    return (*plain, Protocol.LL128) if in_table else plain


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
            if kind.traits.is_point_to_point:
                return STEP_BYTES if intra is LinkKind.NVLINK else SLOW_CHUNK_BYTES
            if algorithm in _SWITCHED:
                return NVLS_CHUNK_BYTES
            in_steps = algorithm in (Algorithm.TREE, Algorithm.PAT) or kind.traits.is_rooted
            return STEP_BYTES if in_steps else 4 * STEP_BYTES
