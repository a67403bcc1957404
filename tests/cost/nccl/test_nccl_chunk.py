"""Chunks against the defaults that NCCL's source gives (buffers of 512 KiB, 4800 KiB and 4 MiB in 8 steps)."""

import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.cost.nccl.chunk import default_chunk_bytes, nvls_chunk_bytes
from lagom_overlap.cost.nccl.topology import load_topology
from lagom_overlap.units import GIB, KIB, MIB

AR = CollectiveKind.ALL_REDUCE


@pytest.mark.parametrize(
    ("kind", "algorithm", "protocol", "chunk"),
    [
        (AR, Algorithm.RING, Protocol.SIMPLE, 2 * MIB),
        (CollectiveKind.BROADCAST, Algorithm.RING, Protocol.SIMPLE, 512 * KIB),
        (AR, Algorithm.TREE, Protocol.SIMPLE, 512 * KIB),
        (AR, Algorithm.RING, Protocol.LL, 32 * KIB),
        (AR, Algorithm.RING, Protocol.LL128, 576_000),
    ],
)
def test_rings_and_trees_take_their_buffers_steps(
    kind: CollectiveKind, algorithm: Algorithm, protocol: Protocol, chunk: int
) -> None:
    topology = load_topology("a100_dgx")
    assert default_chunk_bytes(Collective(kind, 64 * MIB, 8), algorithm, protocol, 24, topology) == chunk


@pytest.mark.parametrize(
    ("size", "chunk"),
    [
        (4 * MIB, 16 * KIB),
        (8 * MIB - 1, 16 * KIB),
        (8 * MIB, 32 * KIB),
        (64 * MIB - 1, 32 * KIB),
        (64 * MIB, 64 * KIB),
        (GIB - 1, 64 * KIB),
        (GIB, 128 * KIB),
    ],
)
def test_nvls_cuts_small_tensors_finer(size: int, chunk: int) -> None:
    assert nvls_chunk_bytes(size, 16, 8) == chunk


def test_nvls_trees_take_smaller_chunks_from_four_nodes_on() -> None:
    two = load_topology("h100_2_nodes")
    for topology, chunk in ((two, 128 * KIB), (two.with_nodes(4), 64 * KIB)):
        huge = Collective(AR, GIB, topology.num_ranks)
        assert default_chunk_bytes(huge, Algorithm.NVLS_TREE, Protocol.SIMPLE, 16, topology) == chunk
    small = Collective(AR, 2 * MIB, 16)
    assert default_chunk_bytes(small, Algorithm.NVLS_TREE, Protocol.SIMPLE, 16, two) == 32 * KIB


def test_trees_of_ll128_and_pat_halve_their_chunks_while_small() -> None:
    topology = load_topology("h100_2_nodes")
    sizes = [64 * KIB, MIB, 16 * MIB, 256 * MIB, 16 * GIB]
    for algorithm, protocol, least in (
        (Algorithm.TREE, Protocol.LL128, 18_000),
        (Algorithm.PAT, Protocol.SIMPLE, 64 * KIB),
    ):
        chunks = [
            default_chunk_bytes(Collective(CollectiveKind.ALL_GATHER, size, 16), algorithm, protocol, 16, topology)
            for size in sizes
        ]
        assert chunks == sorted(chunks)
        assert chunks[0] == least
    assert chunks[-1] == 512 * KIB
