"""The algorithm bandwidth that NCCL's tuning model expects: bytes of the whole tensor per second.

Source: NCCL's src/graph/tuning.cc, 2.18.3 to 2.30.7, and src/tuning of the development branch of 2.31 (alpha 7, June
2026). A graph's channels times their speed give a bus bandwidth, which each
algorithm and protocol lowers; a collective's steps turn it into bytes of the user's tensor per second.

    here                 meaning
    bus                  num_channels x speed per channel (B/s)
    per_channel_limit    measured limits of one channel, from `constants.py`

Departures: CollNet (in-network reduction) is left out; NCCL has it off by default.
"""

from math import inf
from typing import Final

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.cost.nccl.constants import ChannelLimit, Constants
from lagom_overlap.cost.nccl.topology import Graph, PathType, Topology

_LL128_TREE_ONE_NODE = 7.0 / 9.0
"""tuning.cc: what LL128 trees carry on one node, over what Simple trees carry."""
_LL128_PAYLOAD = 120.0 / 128.0
"""Of 128 bytes of an LL128 line 8 are the flag."""
ALPHA_OF_2_31: Final = 23100
"""The development branch looks at paths for LL128 only where NCCL_ALGO or NCCL_PROTO is set; 2.31.2 was not read."""


def graph_of(topology: Topology, algorithm: Algorithm) -> Graph | None:
    """The graph that an algorithm runs on; PAT uses the tree's."""
    match algorithm:
        case Algorithm.RING:
            return topology.ring
        case Algorithm.TREE | Algorithm.PAT:
            return topology.tree
        case Algorithm.NVLS | Algorithm.NVLS_TREE:
            return topology.nvls
        case _:
            return None


def num_steps(kind: CollectiveKind, num_ranks: int) -> int:
    """Steps of a ring: 2(n-1) for an all-reduce, n-1 for gather and scatter, n for broadcast and reduce."""
    passes = kind.traits.passes
    return passes * (num_ranks - 1) if passes else num_ranks


def is_available(
    kind: CollectiveKind, algorithm: Algorithm, protocol: Protocol, topology: Topology, release: int = 23007
) -> bool:
    """Whether NCCL would consider it by default: implemented, supported by the machine, not switched off."""
    graph = graph_of(topology, algorithm)
    if graph is None:
        return False
    all_reduce, one_node = kind is CollectiveKind.ALL_REDUCE, topology.num_nodes == 1
    if protocol is not Protocol.SIMPLE and algorithm not in (Algorithm.RING, Algorithm.TREE):
        return False
    if protocol is Protocol.LL128 and not _ll128_allowed(graph, topology.compute_capability, release):
        return False
    match algorithm:
        case Algorithm.RING:
            return True
        case Algorithm.TREE:
            return all_reduce
        case Algorithm.NVLS:
            gathers = kind.traits.is_in_parts and release >= 21900
            return one_node and (graph.num_channels > 1 or release < 22800) and (all_reduce or gathers)
        case Algorithm.NVLS_TREE:
            return all_reduce and not one_node and (graph.num_channels > 1 or release < 22800)
        case Algorithm.PAT:
            return kind.traits.is_in_parts and topology.ranks_per_node == 1 and release >= 22300
        case _:
            return False


def _ll128_allowed(graph: Graph, compute_capability: int, release: int) -> bool:
    if release < 22700 and compute_capability not in (70, 80, 90):
        return False
    if release == ALPHA_OF_2_31:
        return True
    farthest = PathType.PXN if compute_capability >= 90 else PathType.PXB
    return compute_capability >= 70 and graph.intra_type <= PathType.NVB and graph.inter_type <= farthest


def _nvls_channel(kind: CollectiveKind, algorithm: Algorithm, topology: Topology, constants: Constants) -> float:
    """Bus bandwidth of one NVLS channel: the switch's, or the network's behind it."""
    graph, per_node = topology.nvls, topology.ranks_per_node
    assert graph is not None
    if constants.release < 22800:
        return _old_nvls_channel(kind, algorithm, topology, constants.release)
    channels = graph.num_channels
    intra = graph.intra_bytes_per_s * constants.nvls_efficiency[topology.generation] * (channels - 1) / channels
    intra *= 2.0 if kind is CollectiveKind.ALL_REDUCE else (per_node - 1) / per_node
    if algorithm is Algorithm.NVLS:
        return min(intra, graph.inter_bytes_per_s)
    limit = constants.channel_max(ChannelLimit.NVLS_TREE, topology.generation, topology.num_nodes)
    return min(intra, graph.inter_bytes_per_s * (2.0 if topology.num_nodes <= 2 else 1.0), limit)


def _old_nvls_channel(kind: CollectiveKind, algorithm: Algorithm, topology: Topology, release: int) -> float:
    """The same before 2.28: no efficiency, and 5/6 of it for users where a bus bandwidth is converted."""
    graph, nodes = topology.nvls, topology.num_nodes
    assert graph is not None
    intra, inter = graph.intra_bytes_per_s, graph.inter_bytes_per_s
    if release < 21900:
        return intra if nodes <= 2 else inter
    if algorithm is Algorithm.NVLS_TREE:
        return min(intra, inter if nodes <= 2 else inter / 2)
    if kind.traits.is_in_parts and release >= 22700:
        per_node = topology.ranks_per_node
        return min(intra * (per_node - 1) / per_node, 0.9 * inter)
    return min(intra, inter)


def _user_share(kind: CollectiveKind, algorithm: Algorithm, topology: Topology, release: int) -> float:
    """Bytes of the user's tensor per byte past a rank."""
    steps = topology.num_ranks / num_steps(kind, topology.num_ranks)
    if algorithm is Algorithm.RING:
        return steps
    switched = algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE)
    if kind.traits.is_in_parts and release >= 22300 and not (switched and release >= 23100):
        return 1.0
    if not switched:
        return 0.5
    if release >= 22800:
        return steps
    if algorithm is Algorithm.NVLS_TREE and release < 21900:
        return 0.7 * topology.num_nodes / (2 * (topology.num_nodes - 1))
    return 5.0 / 6.0


def bytes_per_s(
    kind: CollectiveKind, algorithm: Algorithm, protocol: Protocol, topology: Topology, constants: Constants
) -> float:
    """Bytes of the whole tensor per second, before the correction of trees by size; 0 where not available."""
    if not is_available(kind, algorithm, protocol, topology, constants.release):
        return 0.0
    bus = _bus_bytes_per_s(kind, algorithm, protocol, topology, constants)
    return bus * _user_share(kind, algorithm, topology, constants.release)


def _bus_bytes_per_s(
    kind: CollectiveKind, algorithm: Algorithm, protocol: Protocol, topology: Topology, constants: Constants
) -> float:
    """Bytes past each rank per second."""
    graph = graph_of(topology, algorithm)
    assert graph is not None
    channels = graph.num_channels
    if algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE):
        return channels * _nvls_channel(kind, algorithm, topology, constants)
    intra, inter, nodes = graph.intra_bytes_per_s, graph.inter_bytes_per_s, topology.num_nodes
    if constants.release < 23100:
        bus = channels * (intra if nodes <= 2 else inter)
    elif algorithm is Algorithm.RING:
        bus = channels * (intra if nodes == 1 else inter)
    else:
        bus = channels * min(intra, inter)
    if algorithm is Algorithm.RING and protocol is Protocol.LL and constants.release < 21900:
        reduces = topology.num_nodes > 1 or kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE)
        ll_max = constants.ll_max(topology.generation, topology.cpu_vendor, topology.num_nodes)
        return min(ll_max, bus / 4 if reduces else bus / 3)
    return _limited(bus, algorithm, protocol, topology, constants)


def ceiling_bytes_per_s(algorithm: Algorithm, protocol: Protocol, topology: Topology, constants: Constants) -> float:
    """What NCCL lets a ring, a tree or PAT carry past each rank on a wire without limit; infinite for a Simple ring.

    LL has one limit for all channels, which falls once nodes are crossed; LL128 and trees have one per channel.
    """
    return _limited(inf, algorithm, protocol, topology, constants)


def _limited(bus: float, algorithm: Algorithm, protocol: Protocol, topology: Topology, constants: Constants) -> float:
    """The bandwidth of a graph under a ring, a tree or PAT: its protocol's share, and at most NCCL's limit."""
    graph = graph_of(topology, algorithm)
    assert graph is not None
    generation, num_nodes, channels = topology.generation, topology.num_nodes, graph.num_channels
    ll_max = constants.ll_max(generation, topology.cpu_vendor, num_nodes)

    def most(limit: ChannelLimit) -> float:
        return channels * constants.channel_max(limit, generation, num_nodes)

    if algorithm is Algorithm.RING:
        match protocol:
            case Protocol.LL:
                return min(ll_max, 0.5 * bus)
            case Protocol.LL128:
                share = 0.7 if topology.ranks_per_node < 2 and constants.release < 22300 else 0.92
                return min(share * bus, most(ChannelLimit.RING_LL128))
            case Protocol.SIMPLE:
                return bus
    if algorithm is Algorithm.PAT:
        return (0.75 if constants.release >= 22400 else 0.85) * bus
    bus = min(0.92 * bus, most(ChannelLimit.TREE))
    if protocol is Protocol.LL:
        bus = min(bus / 3.8, ll_max)
    elif protocol is Protocol.LL128:
        share = _LL128_TREE_ONE_NODE if num_nodes == 1 else _LL128_PAYLOAD
        bus = min(bus * share, most(ChannelLimit.TREE_LL128))
    return 0.85 * bus if topology.fallback_tree else bus
