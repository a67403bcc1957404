import random

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost.nccl.topology import Topology, load_topology
from lagom_overlap.cost.nccl.wire import FittedLink, wire_terms
from lagom_overlap.units import GIB, KIB, MIB
from link_fit import Measurement, fit_link, is_held_out, size_band

AR = CollectiveKind.ALL_REDUCE


def measured(link: FittedLink, topology: Topology, sizes: list[int], noise: float = 0.0) -> list[Measurement]:
    rng = random.Random(5)
    found = []
    for size in sizes:
        collective = Collective(AR, size, topology.num_ranks)
        seconds = wire_terms(collective, topology).seconds(link)
        found.append(Measurement(collective, seconds * (1 + noise * rng.uniform(-1, 1))))
    return found


def spread(least: int, most: int, count: int) -> list[int]:
    return [round(least * (most / least) ** (i / (count - 1))) for i in range(count)]


@pytest.mark.parametrize("name", ["a100_dgx", "h100_dgx", "a40_4_bridged", "h100_2_nodes"])
def test_the_link_that_made_the_times_is_found(name: str) -> None:
    topology, link = load_topology(name), FittedLink(123e9, 2.5)
    fit = fit_link(measured(link, topology, spread(MIB, GIB, 60)), topology)
    assert fit.link.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-4)
    assert fit.link.latency_scale == pytest.approx(link.latency_scale, rel=1e-3)
    assert fit.mean_abs_error < 1e-4
    assert fit.bandwidth_identified
    assert fit.latency_identified


def test_standard_errors_cover_the_truth() -> None:
    topology, link = load_topology("a100_dgx"), FittedLink(200e9, 2.0)
    fit = fit_link(measured(link, topology, spread(MIB, GIB, 80), noise=0.05), topology)
    assert abs(fit.link.bytes_per_s / link.bytes_per_s - 1) < 4 * fit.bytes_per_s_error
    assert abs(fit.link.latency_scale / link.latency_scale - 1) < 4 * fit.latency_scale_error
    assert 0.001 < fit.bytes_per_s_error < 0.02
    assert 0.015 < fit.mean_abs_error < 0.035


def test_an_outlier_does_not_pull_the_fit() -> None:
    topology, link = load_topology("a100_dgx"), FittedLink(200e9, 2.0)
    times = measured(link, topology, spread(MIB, GIB, 40))
    times[30] = Measurement(times[30].collective, 5 * times[30].seconds)
    fit = fit_link(times, topology)
    assert fit.link.bytes_per_s == pytest.approx(200e9, rel=0.01)
    assert max(range(40), key=lambda i: abs(fit.log_residuals[i])) == 30


def test_huge_messages_do_not_tell_the_latency() -> None:
    topology, link = load_topology("a100_dgx"), FittedLink(200e9, 2.0)
    fit = fit_link(measured(link, topology, spread(8 * GIB, 64 * GIB, 30), noise=0.03), topology)
    assert fit.bandwidth_identified
    assert not fit.latency_identified


def test_small_messages_of_ll_tell_no_latency_scale_at_all() -> None:
    topology, link = load_topology("a40_8_bridged"), FittedLink(26e9, 1.0)
    fit = fit_link(measured(link, topology, spread(256 * KIB, 2 * MIB, 20), noise=0.02), topology)
    assert fit.link.bytes_per_s == pytest.approx(26e9, rel=0.02)
    assert 0.001 < fit.bytes_per_s_error < 0.01
    assert fit.latency_scale_error == float("inf")
    assert not fit.latency_identified


def test_two_numbers_need_two_sizes() -> None:
    topology = load_topology("a100_dgx")
    one = measured(FittedLink(1e9), topology, [MIB])
    for times in ([], one, one * 3):
        with pytest.raises(ValueError, match="two numbers"):
            fit_link(times, topology)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_measured_time_is_positive_and_finite(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        Measurement(Collective(AR, MIB, 8), seconds)


def test_half_of_the_quarter_octaves_is_held_out() -> None:
    assert [size_band(size) for size in (MIB, round(1.1 * MIB), round(1.2 * MIB), 2 * MIB)] == [80, 80, 81, 84]
    held = [is_held_out(size) for size in spread(MIB, GIB - 1, 4000)]
    assert sum(held) / len(held) == pytest.approx(0.5, abs=0.01)
    assert not is_held_out(MIB)
