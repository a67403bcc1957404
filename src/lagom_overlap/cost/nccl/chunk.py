"""NCCL's default chunk on the wire, which for rings and trees is also the largest.

Source: NCCL 2.30.7, src/enqueue.cc, with the default buffers of init.cc (LL 512 KiB, LL128 4800 KiB, Simple 4 MiB in
8 steps) and nvls.cc (128 KiB for NVLS; 64 KiB for its tree from four nodes on).

Departures: Blackwell's own chunks of NVLS trees over nodes (nvls.cc) are left out. A chunk can be larger than a
channel's part of a small tensor: the kernel shrinks its last loop.
"""

from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.collective.config import STEP_BYTES
from lagom_overlap.cost.nccl.topology import Topology
from lagom_overlap.units import KIB

LL_CHUNK_BYTES: Final = 32 * KIB
"""A step of 64 KiB, half of it data."""
LL128_CHUNK_BYTES: Final = 600 * KIB * 15 // 16
"""A step of 600 KiB, 15/16 of it data."""
NVLS_CHUNK_BYTES: Final = 128 * KIB
"""NCCL_NVLS_CHUNKSIZE's default."""

_GATHER_LIKE: Final = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def default_chunk_bytes(
    collective: Collective, algorithm: Algorithm, protocol: Protocol, num_channels: int, topology: Topology
) -> int:
    """The chunk that NCCL cuts a collective into."""
    num_bytes = collective.num_bytes
    match algorithm:
        case Algorithm.NVLS:
            return nvls_chunk_bytes(num_bytes, num_channels, topology.ranks_per_node)
        case Algorithm.NVLS_TREE:
            return _nvls_tree_chunk(num_bytes, num_channels, topology)
        case Algorithm.PAT:
            share = 32 if collective.kind is CollectiveKind.ALL_GATHER else 16
            return _pat_chunk(num_bytes, num_channels * share)
        case _:
            pass
    if protocol is Protocol.LL:
        return LL_CHUNK_BYTES
    if protocol is Protocol.LL128:
        return (
            LL128_CHUNK_BYTES if algorithm is Algorithm.RING else _ll128_tree_chunk(num_bytes, num_channels, topology)
        )
    long_ring = algorithm is Algorithm.RING and collective.kind in _GATHER_LIKE
    return 4 * STEP_BYTES if long_ring else STEP_BYTES


def nvls_chunk_bytes(num_bytes: int, num_channels: int, num_heads: int) -> int:
    """16 to 128 KiB by size: smaller tensors are cut finer, to fill the pipeline."""
    chunk, at_once = NVLS_CHUNK_BYTES, num_channels * num_heads
    for loops, smaller in ((64, 64 * KIB), (8, 32 * KIB), (2, 16 * KIB)):
        if num_bytes < loops * at_once * chunk:
            chunk = min(chunk, smaller)
    return chunk


def _nvls_tree_chunk(num_bytes: int, num_channels: int, topology: Topology) -> int:
    chunk = 64 * KIB if topology.num_nodes >= 4 else NVLS_CHUNK_BYTES
    at_once = num_channels * topology.ranks_per_node
    for loops, smaller in ((4, 64 * KIB), (1, 32 * KIB)):
        if num_bytes < loops * at_once * chunk:
            chunk = min(chunk, smaller)
    return chunk


def _pat_chunk(num_bytes: int, pieces: int) -> int:
    chunk = STEP_BYTES
    while chunk > 64 * KIB and chunk * pieces > num_bytes:
        chunk //= 2
    return chunk


def _ll128_tree_chunk(num_bytes: int, num_channels: int, topology: Topology) -> int:
    per_node = topology.ranks_per_node
    steps = 1 + topology.num_nodes.bit_length() - 1 + 0.1 * per_node
    chunk = LL128_CHUNK_BYTES
    for loops, least in ((64, 128 * KIB), (16, 32 * KIB)):
        wanted = steps * loops / per_node
        while chunk > least and num_bytes // (num_channels * chunk) < wanted:
            chunk //= 2
    return chunk
