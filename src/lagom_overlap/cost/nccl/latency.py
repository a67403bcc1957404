"""The latency that NCCL's tuning model expects of a collective: a base and its hops.

Source: NCCL's src/graph/tuning.cc, 2.18.3 to 2.30.7. Departure: POWER hosts, for which one entry differs, are left out.
"""

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.cost.nccl.bandwidth import graph_of, num_steps
from lagom_overlap.cost.nccl.constants import Constants
from lagom_overlap.cost.nccl.topology import Graph, PathType, Topology
from lagom_overlap.hardware import LinkKind


def intra_link(graph: Graph) -> LinkKind:
    """The column of NCCL's latency table inside a node: NVLink only where every hop is one."""
    return LinkKind.NVLINK if graph.intra_type is PathType.NVL else LinkKind.PCIE


def latency_s(
    kind: CollectiveKind, algorithm: Algorithm, protocol: Protocol, topology: Topology, constants: Constants
) -> float:
    """Seconds before bandwidth counts.

    Raises:
        ValueError: if the topology has no graph for the algorithm.
    """
    graph = graph_of(topology, algorithm)
    if graph is None:
        raise ValueError(f"topology {topology.name!r} has no graph for {algorithm}")
    num_nodes, simple = topology.num_nodes, protocol is Protocol.SIMPLE
    base = constants.base_s(algorithm, protocol)
    intra = constants.hop_s(intra_link(graph), algorithm, protocol)
    exposed = topology.ranks_per_node == 1 and 22300 <= constants.release < 23100
    network = Algorithm.TREE if exposed else algorithm
    inter = constants.hop_s(LinkKind.NETWORK, network, protocol) + (2 if simple else 1) * graph.inter_latency_s
    doublings = num_nodes.bit_length() - 1
    match algorithm:
        case Algorithm.RING:
            return base + _ring_hops_s(kind, protocol, topology, constants, (intra, inter))
        case Algorithm.TREE:
            return base + 2 * ((topology.ranks_per_node - 1) * intra + doublings * inter)
        case Algorithm.NVLS:
            old_base = base if constants.release < 21900 else 0.0
            return old_base + intra + (inter if num_nodes > 1 else 0.0)
        case Algorithm.NVLS_TREE:
            times = num_nodes - 1 if constants.release < 21900 else doublings
            return base + intra + 2 * times * inter
        case _:  # PAT: logarithmic in the network, with a linear part that NCCL hopes to remove
            return base + doublings * inter / 3.5 + topology.num_ranks * 2.8e-6


def _ring_hops_s(
    kind: CollectiveKind, protocol: Protocol, topology: Topology, constants: Constants, hops: tuple[float, float]
) -> float:
    intra, inter = hops
    num_nodes, simple = topology.num_nodes, protocol is Protocol.SIMPLE
    steps = num_steps(kind, topology.num_ranks)
    if kind.traits.is_rooted:
        link = intra_link(topology.ring) if num_nodes == 1 else LinkKind.NETWORK
        if topology.ring.same_channels:
            return constants.hop_s(link, Algorithm.RING, protocol)
        return steps * constants.hop_s(link, Algorithm.TREE if simple else Algorithm.RING, protocol)
    if num_nodes == 1:
        return steps * intra
    overhead = constants.network_overhead_s[topology.cpu_vendor] * (3 if simple else 1)
    if kind is not CollectiveKind.ALL_REDUCE:
        between = num_nodes - 1
    else:  # one hop too many on each way before 2.23
        between = 2 * (num_nodes - 1 if constants.release >= 22300 else num_nodes)
    return (steps - between) * max(intra, overhead) + between * inter
