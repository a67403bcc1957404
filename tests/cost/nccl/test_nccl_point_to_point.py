from dataclasses import replace

import pytest

from lagom_overlap.collective import Collective, CollectiveKind, Protocol
from lagom_overlap.cost.nccl.point_to_point import channels_per_peer, choose_point_to_point, point_to_point_terms
from lagom_overlap.cost.nccl.topology import PathType, load_topology
from lagom_overlap.units import KIB, MIB

SEND, SWAP = CollectiveKind.SEND_RECV, CollectiveKind.ALL_TO_ALL


def test_channels_per_peer_follow_the_links() -> None:
    # 2 x 12 links, rounded up to a power of two; two channels over PCIe.
    assert channels_per_peer(load_topology("a100_dgx")) == 32
    assert channels_per_peer(load_topology("a40_8_amd")) == 2
    # A 48 GB/s card needs 4 channels of 14; 16 ranks in batches of 8 and 16 channels leave 4.
    assert channels_per_peer(load_topology("h100_2_nodes")) == 4
    assert channels_per_peer(load_topology("h100_2_nodes").with_nodes(8)) == 2


def test_one_gpu_per_node_has_only_peers_over_the_network() -> None:
    wide = replace(load_topology("h100_2_nodes").ring, num_channels=1, intra_type=PathType.LOC)
    alone = replace(load_topology("h100_2_nodes"), num_ranks=2, ring=wide, tree=wide, nvls=None)
    assert channels_per_peer(alone) == 4


def test_small_messages_take_ll_and_few_channels() -> None:
    topology = load_topology("a100_dgx")
    small = choose_point_to_point(Collective(SEND, 8 * KIB, 2), topology).config
    large = choose_point_to_point(Collective(SEND, 64 * MIB, 2), topology).config
    assert (small.protocol, small.num_channels, small.chunk_bytes) == (Protocol.LL, 1, 32 * KIB)
    assert (large.protocol, large.num_channels, large.chunk_bytes) == (Protocol.SIMPLE, 32, 512 * KIB)
    assert small.algorithm is None


def test_a_send_moves_its_bytes_once_and_ll_twice() -> None:
    topology, collective = load_topology("a100_dgx"), Collective(SEND, MIB, 2)
    latency, wire = point_to_point_terms(collective, Protocol.SIMPLE, topology)
    assert (latency, wire) == (pytest.approx((8.4 + 3.4) * 1e-6), MIB)
    assert point_to_point_terms(collective, Protocol.LL, topology)[1] == 2 * MIB


def test_an_all_to_all_over_nodes_waits_for_its_share_of_the_cards() -> None:
    one, two = load_topology("a100_dgx"), load_topology("a100_2_nodes")
    inside = choose_point_to_point(Collective(SWAP, 64 * MIB, 8), one).seconds
    across = choose_point_to_point(Collective(SWAP, 64 * MIB, 16), two).seconds
    # 7/8 of 64 MiB at 240 GB/s; half of 64 MiB at 24 GB/s.
    assert inside == pytest.approx(7 / 8 * 64 * MIB / 240e9, rel=0.06)
    assert across == pytest.approx(0.5 * 64 * MIB / 24e9, rel=0.04)


def test_latency_counts_batches_of_eight_peers() -> None:
    one, eight = load_topology("a100_2_nodes"), load_topology("a100_2_nodes").with_nodes(8)
    small = [point_to_point_terms(Collective(SWAP, KIB, t.num_ranks), Protocol.LL, t)[0] - 6.6e-6 for t in (one, eight)]
    assert small == [pytest.approx(2 * 2.7e-6), pytest.approx(8 * 2.7e-6)]


def test_what_cannot_be_is_refused() -> None:
    topology = load_topology("a100_dgx")
    with pytest.raises(ValueError, match="not point-to-point"):
        choose_point_to_point(Collective(CollectiveKind.ALL_REDUCE, MIB, 8), topology)
    with pytest.raises(ValueError, match="16 ranks"):
        choose_point_to_point(Collective(SWAP, MIB, 16), topology)
    with pytest.raises(ValueError, match="ll128"):
        point_to_point_terms(Collective(SEND, MIB, 2), Protocol.LL128, topology)
