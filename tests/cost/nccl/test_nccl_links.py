"""Single published figures, none of them fitted alone: vidur's median times and nccl-tests, with their sources."""

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost.nccl.fitted_links import link_of, refined_bytes_per_s
from lagom_overlap.cost.nccl.machines import on_topology
from lagom_overlap.cost.nccl.wire import wire_terms
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.units import MIB

AR = CollectiveKind.ALL_REDUCE


@pytest.mark.parametrize(
    ("preset", "ranks", "size", "seconds", "tolerance"),
    [
        ("a40_bridged", 2, 128 * MIB, 3.14e-3, 0.05),  # vidur a40 @513ddc1
        ("a40_bridged", 8, 128 * MIB, 8.7e-3, 0.05),
        ("a40_bridged", 8, 4 * MIB, 0.32e-3, 0.10),
        ("h100_dgx", 8, 32 * MIB, 0.196e-3, 0.05),  # vidur h100_dgx: 300 GB/s bus bandwidth
        ("a100_dgx", 8, 1024 * MIB, 8.19e-3, 0.03),  # vTrain: 229 GB/s
        ("a100_dgx", 4, 128 * MIB, 0.9986e-3, 0.04),  # vTrain: 202 GB/s
    ],
)
def test_published_times_are_met(preset: str, ranks: int, size: int, seconds: float, tolerance: float) -> None:
    cluster = load_preset(preset)
    link = link_of(cluster, ranks)
    assert link is not None
    found = wire_terms(*on_topology(Collective(AR, size, ranks), cluster)).seconds(link)
    assert found == pytest.approx(seconds, rel=tolerance)


def test_where_nobody_measured_there_is_no_link() -> None:
    assert link_of(load_preset("a100_dgx", 2), 16) is None
    assert link_of(load_preset("h200"), 8) is None
    assert link_of(load_preset("a40_pcie"), 8) is None
    assert link_of(load_preset("a40_nvlink"), 2) is None  # the paper's eight A40 are wired in another way than vidur's
    with pytest.raises(JobError, match="do not fit"):
        link_of(load_preset("a100_dgx"), 9)


def test_a_number_of_ranks_that_nobody_measured_has_the_nearest_ones_link() -> None:
    cluster = load_preset("h100_dgx")
    assert link_of(cluster, 6) == link_of(cluster, 8)
    assert link_of(cluster, 5) == link_of(cluster, 4)


def test_a_measurement_refines_what_a_cluster_states_and_never_contradicts_it() -> None:
    """342.1 GB/s were measured: that is taken for 171 to 456, and the stated one from 570 and up to 86."""
    near = [refined_bytes_per_s(342.1e9, stated) for stated in (171.1e9, 360e9, 456.1e9)]
    assert near == [342.1e9] * 3
    far = (570.2e9, 800e9, 85.5e9, 1e9)
    assert [refined_bytes_per_s(342.1e9, stated) for stated in far] == list(far)
    # Halfway along each straight line, by hand.
    assert refined_bytes_per_s(342.1e9, (456.1333e9 + 570.1667e9) / 2) == pytest.approx((342.1e9 + 570.1667e9) / 2)
    assert refined_bytes_per_s(342.1e9, (171.05e9 + 85.525e9) / 2) == pytest.approx((342.1e9 + 85.525e9) / 2)


def test_ranks_spread_over_nodes_have_no_link_of_one_node() -> None:
    assert link_of(load_preset("a100_dgx", 2), 2) is not None
    assert link_of(load_preset("a100_dgx", 2), 2, num_nodes=2) is None
