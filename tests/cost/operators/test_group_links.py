"""Where the groups of a layout lie on a cluster, and what their collectives take."""

import pytest

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.operators import GroupLinks, LinkConstants
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.workload.parallel import GroupKind, ParallelLayout

FREE = LinkConstants(
    base_s=0.0, hop_s=0.0, network_hop_s=0.0, intra_efficiency=1.0, inter_efficiency=1.0,
)  # fmt: skip
CLUSTER: Cluster = load_preset("a100_dgx", 8)


UNMEASURED: Cluster = load_preset("h200", 8)
"""Nobody published times of its links: the formula of the module's text holds inside a node too."""


def links(layout: ParallelLayout, constants: LinkConstants = FREE) -> GroupLinks:
    return GroupLinks(CLUSTER, layout, constants)


def test_tensor_ranks_share_a_node_and_data_ranks_lie_a_stride_apart() -> None:
    found = links(ParallelLayout(tensor=4, data=4, pipeline=4, global_batch=4))
    assert found.shape(GroupKind.TENSOR).num_nodes == 1
    data = found.shape(GroupKind.DATA)
    assert (data.num_ranks, data.ranks_per_node, data.num_nodes) == (4, 2, 2)
    pipeline = found.shape(GroupKind.PIPELINE)
    assert (pipeline.num_ranks, pipeline.ranks_per_node, pipeline.num_nodes) == (4, 1, 4)


def test_rings_that_cross_nodes_share_the_nodes_ports() -> None:
    # Eight GPUs of a node each have a ring of their own: an eighth of the node's network each.
    found = links(ParallelLayout(tensor=8, data=8, global_batch=8))
    assert found.bytes_per_s(GroupKind.DATA) == CLUSTER.inter.bytes_per_s / 8
    # One ring over all GPUs has the node's ports for itself.
    whole = links(ParallelLayout(data=64, global_batch=64))
    assert whole.bytes_per_s(GroupKind.DATA) == min(CLUSTER.intra.bytes_per_s, CLUSTER.inter.bytes_per_s)


@pytest.mark.parametrize(
    ("kind", "passes"), [(CollectiveKind.ALL_REDUCE, 2), (CollectiveKind.ALL_GATHER, 1), (CollectiveKind.ALL_TO_ALL, 1)]
)
def test_a_collective_takes_its_wire_bytes_over_the_link(kind: CollectiveKind, passes: int) -> None:
    found = GroupLinks(UNMEASURED, ParallelLayout(tensor=8), FREE)
    by_hand = passes * 7 / 8 * 1e9 / UNMEASURED.intra.bytes_per_s
    assert found.seconds(kind, 10**9, GroupKind.TENSOR) == pytest.approx(by_hand)


def test_a_measured_link_takes_the_place_of_the_formula() -> None:
    """vTrain: 8 A100 move 1 GiB in 8.19 ms; between nodes nobody measured and the formula holds."""
    found = links(ParallelLayout(tensor=8, data=8, global_batch=8))
    assert found.seconds(CollectiveKind.ALL_REDUCE, 1 << 30, GroupKind.TENSOR) == pytest.approx(8.19e-3, rel=0.03)
    by_hand = 2 * 7 / 8 * 1e9 / (CLUSTER.inter.bytes_per_s / 8)
    assert found.seconds(CollectiveKind.ALL_REDUCE, 10**9, GroupKind.DATA) == pytest.approx(by_hand)


def test_channels_are_nccl_s_for_the_group_s_part_of_the_cluster() -> None:
    """24 inside a DGX A100; with one GPU per node, which has one card, its two."""
    found = links(ParallelLayout(tensor=8, data=8, global_batch=8))
    assert found.terms(CollectiveKind.ALL_REDUCE, 1 << 30, GroupKind.TENSOR).num_channels == 24
    assert found.terms(CollectiveKind.ALL_REDUCE, 1 << 30, GroupKind.DATA).num_channels == 2


@pytest.mark.parametrize(("tensor", "experts"), [(1, 64), (1, 16), (4, 16), (8, 8)])
def test_an_all_to_all_over_nodes_sends_every_rank_s_bytes_through_the_node_s_ports(tensor: int, experts: int) -> None:
    """By hand: all eight GPUs of a node send what leaves it, each (n - r) / n of a GB, r = 8 / tensor ranks a node."""
    found = links(ParallelLayout(tensor=tensor, data=64 // tensor, expert=experts, global_batch=64 // tensor))
    away = 1 - 8 / tensor / experts
    by_hand = 8 * away * 1e9 / CLUSTER.inter.bytes_per_s
    assert found.seconds(CollectiveKind.ALL_TO_ALL, 10**9, GroupKind.EXPERT) == pytest.approx(by_hand)


@pytest.mark.parametrize("kind", [CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_GATHER])
def test_groups_and_iterations_price_large_collectives_over_nodes_alike(kind: CollectiveKind) -> None:
    """Two implementations: the cost model of overlap groups and the links of a layout."""
    cluster = load_preset("a40_nvlink", 8)
    found = GroupLinks(cluster, ParallelLayout(data=64, expert=64, global_batch=64), FREE)
    group = ContentionModel(cluster, load_profile("plausible"))
    apart = group.collective(Collective(kind, 1 << 30, 64), CommConfig()).seconds()
    assert found.seconds(kind, 1 << 30, GroupKind.EXPERT) == pytest.approx(apart, rel=0.05)


def test_latency_counts_the_steps_of_the_ring_by_kind_of_hop() -> None:
    constants = LinkConstants(
        base_s=1.0, hop_s=0.1, network_hop_s=10.0, intra_efficiency=1.0, inter_efficiency=1.0,
    )  # fmt: skip
    found = links(ParallelLayout(data=16, global_batch=16), constants)
    assert found.latency_s(CollectiveKind.ALL_GATHER, GroupKind.DATA) == pytest.approx(1 + 14 * 0.1 + 10)
    assert found.latency_s(CollectiveKind.ALL_REDUCE, GroupKind.DATA) == pytest.approx(1 + 28 * 0.1 + 20)


def test_a_group_of_one_communicates_for_free() -> None:
    assert links(ParallelLayout()).seconds(CollectiveKind.ALL_REDUCE, 10**9, GroupKind.TENSOR) == 0.0


def test_all_reduces_of_eight_a100_are_near_the_measured_ones() -> None:
    # nccl-tests, 8 x A100 (VIA-Research/vTrain, MIT): 232 us at 16 MB, 1 GB at about 227 GB/s of bus bandwidth.
    from lagom_overlap.cost.operators import load_operators

    found = links(ParallelLayout(tensor=8), load_operators(CLUSTER.gpu).links)
    seconds = found.seconds(CollectiveKind.ALL_REDUCE, 16 << 20, GroupKind.TENSOR)
    assert seconds == pytest.approx(232e-6, rel=0.15)
