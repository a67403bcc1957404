"""The choice against rows that NCCL 2.30.7's own code printed (synthetic topologies, Nov 2026), typed in here."""

from dataclasses import replace

import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.cost.nccl import CpuVendor, Graph, PathType, Topology, candidates, channels_and_threads, choose
from lagom_overlap.cost.nccl.topology import load_topology
from lagom_overlap.units import KIB, MIB

AR, AG = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
RING, TREE, NVLS, NVLS_TREE = Algorithm.RING, Algorithm.TREE, Algorithm.NVLS, Algorithm.NVLS_TREE
LL, LL128, SIMPLE = Protocol.LL, Protocol.LL128, Protocol.SIMPLE

ROWS = [
    ("a100_dgx", 1, AR, 1 * KIB, RING, LL, 1, 96, 15.0),
    ("a100_dgx", 1, AR, 512 * KIB, RING, LL, 16, 512, 25.5),
    ("a100_dgx", 1, AR, 4 * MIB, RING, LL128, 24, 640, 73.8),
    ("a100_dgx", 1, AR, 16 * MIB, RING, LL128, 24, 640, 173.6),
    ("a100_dgx", 1, AR, 32 * MIB, RING, SIMPLE, 24, 544, 300.7),
    ("a100_dgx", 1, AG, 16 * MIB, RING, SIMPLE, 24, 544, 93.4),
    ("h100_dgx", 1, AR, 1 * MIB, RING, LL, 24, 512, 28.0),
    ("h100_dgx", 1, AR, 2 * MIB, NVLS, SIMPLE, 16, 640, 32.7),
    ("h100_dgx", 1, AR, 1024 * MIB, NVLS, SIMPLE, 16, 640, 3972.6),
    ("h100_dgx", 1, AG, 16 * MIB, RING, LL128, 24, 640, 71.6),
    ("h100_2_nodes", 2, AR, 64 * KIB, TREE, LL, 16, 640, None),
    ("h100_2_nodes", 2, AR, 256 * KIB, TREE, LL128, 16, 640, None),
    ("h100_2_nodes", 2, AR, 2 * MIB, NVLS_TREE, SIMPLE, 16, 640, None),
    ("h100_2_nodes", 4, AR, 8 * MIB, NVLS_TREE, SIMPLE, 16, 640, None),
    ("h100_2_nodes", 4, AR, 1024 * MIB, RING, SIMPLE, 16, 544, None),
    ("h100_2_nodes", 4, AG, 128 * MIB, RING, SIMPLE, 16, 544, None),
    ("a100_2_nodes", 2, AR, 16 * MIB, RING, LL128, 16, 640, None),
    ("a100_2_nodes", 4, AR, 32 * MIB, RING, LL128, 16, 640, None),
    ("a100_2_nodes_shared_bridge", 2, AR, 16 * MIB, TREE, SIMPLE, 16, 640, None),
    ("a100_2_nodes_shared_bridge", 2, AR, 32 * MIB, RING, SIMPLE, 16, 544, None),
    ("a40_8_amd", 1, AR, 512 * KIB, RING, LL, 2, 512, None),
    ("a40_8_amd", 1, AR, 1 * MIB, RING, SIMPLE, 2, 544, None),
    ("a40_8_intel", 1, AR, 512 * KIB, RING, SIMPLE, 2, 288, None),
    ("a40_8_amd_2_nodes", 2, AR, 32 * KIB, TREE, LL, 8, 640, None),
    ("a40_8_amd_2_nodes", 2, AR, 64 * KIB, RING, LL, 1, 512, None),
    ("a40_4_bridged", 1, AR, 64 * MIB, RING, SIMPLE, 8, 544, None),
    ("a40_4_bridged", 1, AR, 128 * MIB, TREE, SIMPLE, 8, 640, None),
    ("a40_2_bridged", 1, AR, 32 * KIB, RING, LL, 4, 512, None),
    ("h200_2_ranks_one_gpu", 1, AR, 4 * MIB, RING, SIMPLE, 64, 544, None),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}-{row[3]}")
def test_the_choice_is_that_of_nccl(
    row: tuple[str, int, CollectiveKind, int, Algorithm, Protocol, int, int, float | None],
) -> None:
    name, nodes, kind, size, *expected, micros = row
    topology = load_topology(name).with_nodes(nodes)
    choice = choose(Collective(kind, size, topology.num_ranks), topology)
    config = choice.config
    assert [config.algorithm, config.protocol, config.num_channels, config.num_threads] == expected
    if micros is not None:
        assert choice.seconds * 1e6 == pytest.approx(micros, abs=0.051)


def test_channels_are_given_up_one_by_one_as_in_the_source() -> None:
    topology = load_topology("a100_dgx")
    for size in [1, 1000, 32 * KIB, 100_000, 123_457, 786_431, 786_432, MIB, 10 * MIB]:
        for protocol, most, per_thread in ((LL, 512, 64), (LL128, 640, 8), (SIMPLE, 512, 64)):
            channels, threads = 24, most
            while size < channels * threads * per_thread and channels >= 2:
                channels -= 1
            while size < channels * threads * per_thread and threads % 128 == 0:
                threads //= 2
            threads = max(96, threads + (32 if protocol is SIMPLE else 0))
            assert channels_and_threads(size, RING, protocol, topology) == (channels, threads)


def test_the_choice_is_the_least_of_the_candidates() -> None:
    topology = load_topology("h100_dgx")
    collective = Collective(AR, 3 * MIB, 8)
    found = candidates(collective, topology)
    best = min(found, key=lambda candidate: candidate.seconds)
    choice = choose(collective, topology)
    assert (choice.config.algorithm, choice.config.protocol) == (best.algorithm, best.protocol)
    assert {candidate.algorithm for candidate in found} == {TREE, RING, NVLS}
    assert len(found) == 7


def test_broadcast_and_reduce_run_on_rings() -> None:
    topology = load_topology("h100_2_nodes")
    for kind in (CollectiveKind.BROADCAST, CollectiveKind.REDUCE):
        for size in (KIB, 64 * MIB):
            assert choose(Collective(kind, size, 16), topology).config.algorithm is RING


def test_one_gpu_per_node_gathers_with_pat_while_small() -> None:
    graph = Graph(
        num_channels=2,
        intra_bytes_per_s=24e9,
        inter_bytes_per_s=24e9,
        intra_type=PathType.LOC,
        inter_type=PathType.PIX,
    )
    topology = Topology(
        name="ones",
        compute_capability=90,
        cpu_vendor=CpuVendor.AMD,
        num_nodes=32,
        num_ranks=32,
        ring=graph,
        tree=graph,
    )
    # PAT: 8 + 5 x 14 / 3.5 + 32 x 2.8 = 117.6 us; ring Simple: 8.4 + 31 x 14 = 442.4 us.
    table = {(c.algorithm, c.protocol): c for c in candidates(Collective(AG, MIB, 32), topology)}
    assert table[Algorithm.PAT, SIMPLE].latency_s == pytest.approx(117.6e-6)
    assert table[RING, SIMPLE].latency_s == pytest.approx(442.4e-6)
    assert table[Algorithm.PAT, SIMPLE].bytes_per_s == pytest.approx(0.75 * 48e9)
    assert choose(Collective(AG, MIB, 32), topology).config.algorithm is Algorithm.PAT
    assert choose(Collective(AG, 1024 * MIB, 32), topology).config.algorithm is RING


def test_old_gpus_pay_more_for_rings_over_nodes() -> None:
    young = load_topology("a100_2_nodes")
    old = replace(young, compute_capability=70)
    size = 64 * MIB
    for topology, factor in ((young, 1.4), (old, 1.9)):
        ring = next(
            c for c in candidates(Collective(AR, size, 16), topology) if (c.algorithm, c.protocol) == (RING, SIMPLE)
        )
        assert ring.seconds == pytest.approx(factor * ring.latency_s + size / ring.bytes_per_s)


def test_what_nccl_has_no_model_for_is_refused() -> None:
    topology = load_topology("a100_dgx")
    with pytest.raises(ValueError, match="point_to_point"):
        choose(Collective(CollectiveKind.ALL_TO_ALL, MIB, 8), topology)
    with pytest.raises(ValueError, match="4 ranks"):
        choose(Collective(AR, MIB, 4), topology)
