import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.cost.nccl.topology import load_topology
from lagom_overlap.cost.nccl.wire import FittedLink, wire_terms
from lagom_overlap.units import GIB, MIB

AR = CollectiveKind.ALL_REDUCE


def test_a_simple_ring_counts_bus_bytes() -> None:
    terms = wire_terms(Collective(AR, 64 * MIB, 8), load_topology("a100_dgx"))
    assert terms.wire_bytes == pytest.approx(2 * 7 / 8 * 64 * MIB)
    assert (terms.fixed_s, terms.scaled_s) == (0.0, pytest.approx(56e-6))
    gathered = wire_terms(Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8), load_topology("a100_dgx"))
    assert gathered.wire_bytes == pytest.approx(7 / 8 * 64 * MIB)


def test_time_is_latency_and_bytes_over_bandwidth() -> None:
    terms = wire_terms(Collective(AR, 64 * MIB, 8), load_topology("a100_dgx"))
    assert terms.seconds(FittedLink(200e9, 1.5)) == pytest.approx(84e-6 + 1.75 * 64 * MIB / 200e9)


def test_ll_doubles_the_bytes_and_keeps_nccls_latency() -> None:
    terms = wire_terms(Collective(AR, MIB, 8), load_topology("a40_8_bridged"))
    assert terms.wire_bytes == pytest.approx(2 * 1.75 * MIB)
    assert (terms.fixed_s, terms.scaled_s) == (pytest.approx(20.6e-6), 0.0)


def test_ll128_carries_seven_tenths_on_ampere() -> None:
    terms = wire_terms(Collective(AR, 8 * MIB, 8), load_topology("a100_dgx"))
    assert terms.wire_bytes == pytest.approx(1.75 * 8 * MIB / 0.7)


def test_four_bridged_gpus_cross_pcie_less_with_a_tree() -> None:
    # Measured by vidur on four A40: 40.3 GB/s bus bandwidth at 99 MiB, 57.7 at 140 MiB (ratio 1.43).
    topology, link = load_topology("a40_4_bridged"), FittedLink(40e9)
    below, above = (wire_terms(Collective(AR, size, 4), topology) for size in (127 * MIB, 128 * MIB))
    assert below.wire_bytes / (127 * MIB) == pytest.approx(1.5)
    assert above.wire_bytes / (128 * MIB) == pytest.approx(1 / 0.92)
    assert above.seconds(link) < 0.75 * below.seconds(link)


def test_nvls_approaches_its_rate_as_loops_and_chunks_grow() -> None:
    topology, link = load_topology("h100_dgx"), FittedLink(340e9)
    rates = [
        1.75 * size / wire_terms(Collective(AR, size, 8), topology).seconds(link)
        for size in (4 * MIB, 32 * MIB, 256 * MIB, GIB, 8 * GIB)
    ]
    assert rates == sorted(rates)
    # NCCL's ratio of NVLS to a ring's bandwidth is 272.0 / 205.7; a 128 KiB chunk pays for 8 KiB more.
    assert rates[-1] == pytest.approx(340e9 * 272.0 / 205.7 * 128 / 136, rel=0.01)


def test_an_nvls_loop_is_exposed_and_every_chunk_pays() -> None:
    # 32 MiB: chunks of 32 KiB, loops of 16 x 8 x 32 KiB = 4 MiB, so 8 loops and one exposed.
    terms = wire_terms(Collective(AR, 32 * MIB, 8), load_topology("h100_dgx"))
    ideal = 1.75 * 32 * MIB * (12 * 30) / (8 * 40 * 0.85 * 7 / 8 * 2)
    assert terms.wire_bytes == pytest.approx(ideal * (1 + 1 / 8) * (1 + 8 / 32))


def test_a_way_can_be_forced_and_point_to_point_has_its_own() -> None:
    topology = load_topology("h100_dgx")
    ring = wire_terms(Collective(AR, 64 * MIB, 8), topology, Algorithm.RING, Protocol.SIMPLE)
    assert ring.wire_bytes == pytest.approx(1.75 * 64 * MIB)
    send = wire_terms(Collective(CollectiveKind.SEND_RECV, 64 * MIB, 2), topology)
    assert send.wire_bytes == 64 * MIB
    with pytest.raises(ValueError, match="both or neither"):
        wire_terms(Collective(AR, MIB, 8), topology, Algorithm.RING)
    with pytest.raises(ValueError, match="NCCL has no"):
        wire_terms(Collective(AR, MIB, 8), topology, Algorithm.PAT, Protocol.SIMPLE)


@pytest.mark.parametrize(("rate", "scale"), [(0.0, 1.0), (float("nan"), 1.0), (1e9, -1.0), (1e9, float("inf"))])
def test_a_link_has_a_bandwidth_and_a_scale(rate: float, scale: float) -> None:
    with pytest.raises(ValueError, match="link"):
        FittedLink(rate, scale)
