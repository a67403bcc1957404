"""Send, receive and all-to-all: NCCL's channels, protocol and chunk per peer; a time of our own.

Source of the knobs: NCCL 2.30.7, src/graph/paths.cc (channels per peer), src/enqueue.cc (channels for a size, LL up to
16 KiB per channel), src/init.cc (chunks of 512 KiB over NVLink, 128 KiB otherwise). NCCL has no tuning model here: no
plug-in is asked and no time is predicted, so the time is ours: one latency per batch of eight peers, and the bytes for
other ranks past the GPU's own links and its share of the node's cards, both at once.

Departure: NVLinks per GPU are taken from the ring's bandwidth, which can fall short of a pair's full number of links.
"""

from math import ceil
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol
from lagom_overlap.collective.config import STEP_BYTES
from lagom_overlap.cost.nccl.choice import MAX_THREADS, NcclChoice
from lagom_overlap.cost.nccl.chunk import LL_CHUNK_BYTES
from lagom_overlap.cost.nccl.constants import load_constants
from lagom_overlap.cost.nccl.latency import intra_link
from lagom_overlap.cost.nccl.topology import PathType, Topology
from lagom_overlap.hardware import LinkKind
from lagom_overlap.units import KIB

PEERS_PER_BATCH: Final = 8
"""device.h: the sends and receives that one launch of a channel works through together."""
LL_BYTES_PER_CHANNEL: Final = 16 * KIB
"""enqueue.cc: LL up to so many bytes on a channel."""
SLOW_CHUNK_BYTES: Final = 128 * KIB
"""init.cc: the chunk where no NVLink joins the peers."""
NETWORK_CHANNEL_BYTES_PER_S: Final = 14e9
"""paths.cc: a channel per 14 GB/s of a GPU's card, at least two."""
_NVLINK_BYTES_PER_S: Final = ((100, 40.1e9), (90, 20.6e9), (86, 12.0e9), (80, 20.0e9), (70, 20.0e9), (60, 18.0e9))
"""topo.h: one NVLink, by least compute capability; 8.6 has its own, slower one."""


def point_to_point_channels(topology: Topology) -> int:
    """Channels of a communicator for sends and receives: those of its collectives, rounded up to a power of two."""
    return _power_of_two(topology.num_channels)


def channels_per_peer(topology: Topology) -> int:
    """Channels that NCCL sets up towards each peer: the least over all peers, a power of two."""
    ring, pool = topology.ring, point_to_point_channels(topology)
    if ring.intra_type in (PathType.NVL, PathType.NVB):
        total = ring.num_channels * ring.intra_bytes_per_s
        link = next(speed for least, speed in _NVLINK_BYTES_PER_S if topology.compute_capability >= least)
        channels = 2 * max(1, int(total / link))
    else:
        channels = 2
    if topology.num_nodes == 1:
        return min(pool, _power_of_two(channels))
    card = _card_bytes_per_s(topology)
    # A node's other GPUs do not limit it where each node has one rank.
    network = max(2, ceil(card / NETWORK_CHANNEL_BYTES_PER_S))
    channels = _power_of_two(network if topology.ranks_per_node == 1 else min(channels, network))
    while channels * -(-topology.num_ranks // PEERS_PER_BATCH) > pool and channels > 1:
        channels //= 2
    return channels


def choose_point_to_point(collective: Collective, topology: Topology) -> NcclChoice:
    """NCCL's default for a send and receive or an all-to-all, and our time for it on NCCL's believed bandwidths.

    `num_channels` is that of the kernel: an all-to-all runs a batch of peers at once, on channels of their own.

    Raises:
        ValueError: if the collective is of another kind or its ranks are more than the topology's.
    """
    _check(collective, topology)
    pool, most = point_to_point_channels(topology), channels_per_peer(topology)
    all_to_all = collective.kind is CollectiveKind.ALL_TO_ALL
    part = collective.num_bytes // collective.num_ranks if all_to_all else collective.num_bytes
    nvlink, one_node = topology.ring.intra_type <= PathType.NVB, topology.num_nodes == 1
    chunk = STEP_BYTES if nvlink and one_node else SLOW_CHUNK_BYTES
    least, largest = (chunk // 8, chunk * 32) if one_node else (chunk // 2, chunk)
    channels = min(most, max(1, -(-part // least)))
    while part / channels > largest and channels <= most // 2:
        channels *= 2
    protocol = Protocol.LL if part <= channels * LL_BYTES_PER_CHANNEL else Protocol.SIMPLE
    peers = min(PEERS_PER_BATCH, collective.num_ranks) if all_to_all else 1  # a rank sends to itself as to others
    config = CommConfig(
        protocol=protocol,
        num_channels=min(pool, channels * peers),
        num_threads=MAX_THREADS,
        chunk_bytes=LL_CHUNK_BYTES if protocol is Protocol.LL else chunk,
    )
    latency, wire = point_to_point_terms(collective, protocol, topology)
    return NcclChoice(config, latency + wire / topology.ring_bytes_per_s)


def point_to_point_terms(collective: Collective, protocol: Protocol, topology: Topology) -> tuple[float, float]:
    """Latency (s) and wire bytes at the Simple ring's bandwidth.

    Raises:
        ValueError: if the protocol is LL128, the collective of another kind, or its ranks more than the topology's.
    """
    _check(collective, topology)
    if protocol is Protocol.LL128:
        raise ValueError(f"NCCL has no {protocol} for {collective.kind}")
    constants, num_ranks = load_constants(), collective.num_ranks
    link = intra_link(topology.ring) if topology.num_nodes == 1 else LinkKind.NETWORK
    all_to_all = collective.kind is CollectiveKind.ALL_TO_ALL
    batches = -(-(num_ranks - 1) // PEERS_PER_BATCH) if all_to_all else 1
    latency = constants.base_s(Algorithm.RING, protocol) + batches * constants.hop_s(link, Algorithm.RING, protocol)
    bus = topology.ring_bytes_per_s
    if all_to_all:
        inside = (topology.ranks_per_node - 1) / num_ranks * collective.num_bytes
        outside = (num_ranks - topology.ranks_per_node) / num_ranks * collective.num_bytes
    else:
        inside, outside = (collective.num_bytes, 0.0) if topology.num_nodes == 1 else (0.0, collective.num_bytes)
    wire = max(inside, outside * bus / _card_bytes_per_s(topology) if outside else 0.0)
    return latency, wire * (2.0 if protocol is Protocol.LL else 1.0)


def _check(collective: Collective, topology: Topology) -> None:
    if not collective.kind.traits.is_point_to_point:
        raise ValueError(f"{collective.kind} is not point-to-point; use choice.choose")
    pair = collective.kind is CollectiveKind.SEND_RECV
    if (collective.num_ranks > topology.num_ranks) if pair else (collective.num_ranks != topology.num_ranks):
        raise ValueError(
            f"{collective.kind} has {collective.num_ranks} ranks, topology {topology.name!r} {topology.num_ranks}"
        )


def _card_bytes_per_s(topology: Topology) -> float:
    """A GPU's share of its node's cards."""
    return topology.ring.num_channels * topology.ring.inter_bytes_per_s / topology.ranks_per_node


def _power_of_two(count: int) -> int:
    """The least power of two that is not below."""
    return 1 << (count - 1).bit_length()
