"""Latency and bandwidth against hand calculation and the figures that NCCL 2.30.7 printed (us, GB/s, one decimal)."""

import pytest

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.cost.nccl.bandwidth import bytes_per_s, is_available
from lagom_overlap.cost.nccl.constants import load_constants
from lagom_overlap.cost.nccl.latency import latency_s
from lagom_overlap.cost.nccl.topology import load_topology

AR, AG = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
RING, TREE, NVLS = Algorithm.RING, Algorithm.TREE, Algorithm.NVLS
LL, LL128, SIMPLE = Protocol.LL, Protocol.LL128, Protocol.SIMPLE
PRINTED = [
    ("a100_dgx", AR, TREE, LL, 15.2, 29.1),
    ("a100_dgx", AR, TREE, LL128, 31.5, 85.9),
    ("a100_dgx", AR, RING, SIMPLE, 56.0, 137.1),
    ("a100_dgx", AG, RING, LL128, 27.3, 252.3),
    ("h100_dgx", AR, NVLS, SIMPLE, 25.0, 272.0),
    ("h100_dgx", AG, NVLS, SIMPLE, 25.0, 208.2),
    ("h100_2_nodes", AR, Algorithm.NVLS_TREE, SIMPLE, 66.8, 246.2),
    ("h100_2_nodes", AR, TREE, SIMPLE, 92.4, 140.8),
    ("h100_2_nodes", AR, RING, LL, 40.0, 20.8),
    ("a40_8_amd_2_nodes", AR, RING, SIMPLE, 204.4, 8.5),
    ("a40_8_intel_2_nodes", AR, RING, SIMPLE, 196.0, 10.7),
    ("h200_2_ranks_one_gpu", AR, RING, LL128, 19.0, 1174.4),
]


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: "-".join(str(part) for part in row[:4]))
def test_tables_are_those_that_nccl_prints(
    row: tuple[str, CollectiveKind, Algorithm, Protocol, float, float],
) -> None:
    name, kind, algorithm, protocol, micros, gigabytes = row
    topology, constants = load_topology(name), load_constants()
    assert latency_s(kind, algorithm, protocol, topology, constants) * 1e6 == pytest.approx(micros, abs=0.051)
    assert bytes_per_s(kind, algorithm, protocol, topology, constants) / 1e9 == pytest.approx(gigabytes, abs=0.051)


def test_a_ring_over_two_nodes_by_hand() -> None:
    # 28 steps of at least 3 x 2 us overhead (AMD), 2 of 14 us: 8.4 + 168 + 28 = 204.4 us.
    found = latency_s(AR, RING, SIMPLE, load_topology("a100_2_nodes"), load_constants())
    assert found == pytest.approx(204.4e-6)


def test_broadcast_pays_one_hop_where_all_channels_go_alike_and_all_of_them_otherwise() -> None:
    constants, kind = load_constants(), CollectiveKind.BROADCAST
    assert latency_s(kind, RING, LL, load_topology("a100_dgx"), constants) == pytest.approx((6.6 + 0.6) * 1e-6)
    assert latency_s(kind, RING, SIMPLE, load_topology("a100_2_nodes"), constants) == pytest.approx(
        (8.4 + 16 * 14) * 1e-6
    )


def test_correction_of_trees_covers_64_bytes_to_256_mebibytes() -> None:
    table = load_constants().tree_correction
    assert table.of(SIMPLE, 63) == 1.0
    assert table.of(SIMPLE, 64) == 0.9
    assert table.of(SIMPLE, 64 << 20) == 0.8
    assert table.of(SIMPLE, 128 << 20) == 0.9
    assert table.of(SIMPLE, 512 << 20) == 1.0
    assert table.of(LL, 64 << 12) == 0.4


def test_ll128_needs_nvlink_and_a_near_card() -> None:
    assert is_available(AR, RING, LL128, load_topology("a100_dgx"))
    assert not is_available(AR, RING, LL128, load_topology("a40_8_amd"))
    assert not is_available(AR, RING, LL128, load_topology("a100_2_nodes_shared_bridge"))


def test_switch_reduction_stays_inside_a_node_and_its_tree_between_nodes() -> None:
    one, two = load_topology("h100_dgx"), load_topology("h100_2_nodes")
    assert is_available(AR, NVLS, SIMPLE, one)
    assert not is_available(AR, NVLS, SIMPLE, two)
    assert not is_available(AR, Algorithm.NVLS_TREE, SIMPLE, one)
    assert is_available(AR, Algorithm.NVLS_TREE, SIMPLE, two)
    assert not is_available(AG, TREE, SIMPLE, one)
    assert not is_available(AR, Algorithm.COLLNET_DIRECT, SIMPLE, one)
    assert not is_available(AR, NVLS, LL, one)


def test_no_graph_no_latency() -> None:
    with pytest.raises(ValueError, match="no graph"):
        latency_s(AR, NVLS, SIMPLE, load_topology("a100_dgx"), load_constants())
