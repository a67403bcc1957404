from dataclasses import replace
from itertools import pairwise, product
from math import exp, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol, SpaceLimits, Transport
from lagom_overlap.cost import ContentionModel, Profile
from lagom_overlap.errors import JobError, SpaceError
from lagom_overlap.hardware import Cluster
from lagom_overlap.units import KIB, MIB

AR, AG, RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
RING, TREE = Algorithm.RING, Algorithm.TREE


def ring(num_channels: int = 8, chunk_bytes: int = 2 * MIB, num_threads: int = 512, **more: object) -> CommConfig:
    return CommConfig(
        algorithm=RING,
        protocol=Protocol.SIMPLE,
        num_channels=num_channels,
        num_threads=num_threads,
        chunk_bytes=chunk_bytes,
        **more,
    )


def by_the_specification(kind: CollectiveKind, num_bytes: float, n: int, config: CommConfig, *, load: float) -> float:
    """x of specification section 1 on eight PCIe ranks, written down a second time from its text."""
    simple = config.protocol is Protocol.SIMPLE
    overhead = 3.5e-6 * (1.0 if simple else 0.25) * (1 + 0.3 * load)
    efficiency = 1.0 if simple else 0.5
    channels, chunk = min(config.num_channels, 8), config.chunk_bytes  # NCCL finds four rings, two channels each
    parts = n if config.algorithm is RING else 1
    chunk = min(chunk, max(num_bytes / (parts * channels), 16 * config.num_threads))
    slices = 2 if simple and config.algorithm is RING and chunk > 32768 else 1
    per_channel = 22e9 * (1 - exp(-config.num_threads / 64)) * efficiency * (1 - 0.15 * load)
    tau = slices * overhead + (2e-6 if slices == 1 else 0) + chunk / per_channel
    line = 24e9 * efficiency * (0.92 if config.algorithm is TREE else 1.0)
    rate = ((channels * chunk / tau) ** -6 + line**-6) ** (-1 / 6)
    wire, steps = (2 * (n - 1) / n * num_bytes, 2 * (n - 1)) if kind is AR else ((n - 1) / n * num_bytes, n - 1)
    base = {(RING, True): 8.4e-6, (RING, False): 6.6e-6, (TREE, True): 8.4e-6, (TREE, False): 6.8e-6}
    fill = 0.5 * chunk / slices * channels / rate * (1 if config.algorithm is RING else log2(n))
    return base[config.algorithm, simple] + steps * (overhead + 2e-6) + fill + wire / rate


@pytest.mark.parametrize(
    ("kind", "algorithm", "protocol", "chunk_bytes"),
    [
        (AR, RING, Protocol.SIMPLE, 16 * KIB),
        (AR, RING, Protocol.SIMPLE, 128 * KIB),
        (AG, RING, Protocol.SIMPLE, 2 * MIB),
        (RS, RING, Protocol.LL, 32 * KIB),
        (AR, TREE, Protocol.SIMPLE, 512 * KIB),
        (AR, TREE, Protocol.LL, 16 * KIB),
    ],
)
def test_the_time_inside_a_node_is_the_specification_s(
    pcie_model: ContentionModel, kind: CollectiveKind, algorithm: Algorithm, protocol: Protocol, chunk_bytes: int
) -> None:
    for num_channels, num_threads, num_bytes, load in product((1, 7, 32), (64, 512), (64 * KIB, 32 * MIB), (0.0, 0.7)):
        config = replace(ring(num_channels, chunk_bytes, num_threads), algorithm=algorithm, protocol=protocol)
        cost = pcie_model.collective(Collective(kind, num_bytes, 8), config)
        expected = by_the_specification(kind, num_bytes, 8, config, load=load)
        assert cost.seconds(load) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("mib", "measured_s"), [(4, 0.32e-3), (16, 1.11e-3), (32, 2.09e-3), (64, 4.15e-3), (128, 8.7e-3)]
)
def test_eight_a40_reduce_in_about_the_measured_times(
    pcie: Cluster, plausible: Profile, mib: int, measured_s: float
) -> None:
    """microsoft/vidur @513ddc1, all_reduce.csv of 8 x A40, with the 28.4 GB/s fitted to them: within 10 %."""
    link = replace(pcie.intra, bytes_per_s=28.4e9)
    model = ContentionModel(replace(pcie, intra=link), plausible)
    assert model.collective(Collective(AR, mib * MIB, 8), CommConfig()).seconds() == pytest.approx(measured_s, rel=0.10)


def test_two_bridged_a40_reduce_in_about_the_measured_time(nvlink_model: ContentionModel) -> None:
    """Vidur, 2 x A40 NVLink: 32 MB in .83 ms and 128 MB in 3.14 ms."""
    for mib, measured_s in ((32, 0.83e-3), (128, 3.14e-3)):
        cost = nvlink_model.collective(Collective(AR, mib * MIB, 2), CommConfig())
        assert cost.seconds() == pytest.approx(measured_s, rel=0.10)


def chunk_curve(model: ContentionModel, collective: Collective, config: CommConfig, most: int) -> list[float]:
    sizes = [8 * KIB << i for i in range(9) if 8 * KIB << i <= most]
    return [model.collective(collective, replace(config, chunk_bytes=size)).seconds() for size in sizes]


def falls_then_rises(times: list[float]) -> bool:
    lowest = times.index(min(times))
    return all(a > b for a, b in pairwise(times[: lowest + 1])) and all(a <= b for a, b in pairwise(times[lowest:]))


def test_a_tree_is_clearly_u_shaped_in_the_chunk(pcie_model: ContentionModel) -> None:
    times = chunk_curve(pcie_model, Collective(AR, 32 * MIB, 8), replace(ring(), algorithm=TREE), 512 * KIB)
    assert falls_then_rises(times)
    assert times[0] > 1.5 * min(times)
    assert times[-1] > 1.05 * min(times)


def test_a_ring_over_nodes_is_u_shaped_because_proxies_store_and_forward(pcie_model: ContentionModel) -> None:
    times = chunk_curve(pcie_model, Collective(AR, 128 * MIB, 16), ring(), 2 * MIB)
    assert falls_then_rises(times)
    assert times[-1] > 1.02 * min(times)


def test_a_ring_inside_a_node_hardly_minds_large_chunks(pcie_model: ContentionModel) -> None:
    times = chunk_curve(pcie_model, Collective(AR, 128 * MIB, 8), ring(), 2 * MIB)
    assert falls_then_rises(times)
    assert times[-1] < 1.02 * min(times)


def test_a_broadcast_pays_for_large_chunks_along_its_whole_chain(pcie_model: ContentionModel) -> None:
    times = chunk_curve(pcie_model, Collective(CollectiveKind.BROADCAST, 32 * MIB, 8), ring(), 512 * KIB)
    assert falls_then_rises(times)
    assert times[-1] > 1.2 * min(times)


@given(
    kind=st.sampled_from([AR, AG, RS]),
    num_bytes=st.integers(1 * MIB, 512 * MIB),
    chunk_bytes=st.integers(64 * KIB, 2 * MIB),
    num_channels=st.integers(1, 40),
)
def test_channels_speed_a_ring_up_until_its_link_is_full(
    pcie_model: ContentionModel, kind: CollectiveKind, num_bytes: int, chunk_bytes: int, num_channels: int
) -> None:
    collective = Collective(kind, num_bytes, 8)
    fewer, more = (pcie_model.collective(collective, ring(n, chunk_bytes)) for n in (num_channels, num_channels + 1))
    assert more.bytes_per_s() >= fewer.bytes_per_s() * (1 - 1e-12)
    if fewer.bytes_per_s() < 0.8 * fewer.link_bytes_per_s:
        assert more.seconds() <= fewer.seconds() * (1 + 1e-9)


@given(load=st.floats(0, 1), share=st.floats(0.1, 1))
def test_load_and_a_shared_link_only_slow_a_collective_down(
    pcie_model: ContentionModel, load: float, share: float
) -> None:
    cost = pcie_model.collective(Collective(AG, 64 * MIB, 8), ring(2, 128 * KIB))
    assert cost.seconds(load, share) >= cost.seconds()
    assert cost.bytes_per_s(load) <= cost.bytes_per_s()


def test_no_collective_is_faster_than_its_wire(nvlink_model: ContentionModel) -> None:
    for kind in CollectiveKind:
        collective = Collective(kind, 64 * MIB, 8 if kind is not CollectiveKind.SEND_RECV else 2)
        for config in nvlink_model.space(collective):
            assert (
                nvlink_model.collective(collective, config).seconds() > collective.wire_bytes / 45e9
            )  # a bridged pair's own wire


def test_ll_wins_small_messages_and_simple_large_ones(nvlink_model: ContentionModel) -> None:
    def best(num_bytes: int) -> Protocol | None:
        collective = Collective(AR, num_bytes, 8)
        space = nvlink_model.space(collective, SpaceLimits(algorithms=(RING,)))
        return min(space, key=lambda config: nvlink_model.collective(collective, config).seconds()).protocol

    assert best(16 * KIB) is Protocol.LL
    assert best(256 * MIB) is Protocol.SIMPLE


def test_threads_hardly_matter(pcie_model: ContentionModel) -> None:
    """Fact (c3): from 64 to 512 threads x falls by less than a tenth."""
    slow, fast = (pcie_model.collective(Collective(AR, 32 * MIB, 8), ring(4, 64 * KIB, n)).seconds() for n in (64, 512))
    assert fast < slow < 1.1 * fast


def test_the_slower_link_between_nodes_bounds_a_ring_over_both(pcie_model: ContentionModel) -> None:
    inside = pcie_model.collective(Collective(AG, 256 * MIB, 8), ring())
    across = pcie_model.collective(Collective(AG, 256 * MIB, 16), ring())
    assert across.link_bytes_per_s == 11.5e9
    assert across.seconds() > 2 * inside.seconds()


def test_an_all_to_all_over_nodes_shares_the_node_s_card(pcie_model: ContentionModel) -> None:
    """Each of 8 GPUs sends half of its bytes through one 11.5 GB/s card."""
    config = CommConfig(num_channels=16)
    cost = pcie_model.collective(Collective(CollectiveKind.ALL_TO_ALL, 256 * MIB, 16), config)
    assert cost.seconds() == pytest.approx(8 * 128 * MIB / 11.5e9, rel=0.05)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_an_all_to_all_inside_a_node_takes_a_step_for_each_other_rank(
    pcie_model: ContentionModel, plausible: Profile, num_ranks: int
) -> None:
    """Pairs of tiny messages cost steps alone: n - 1 of them, each as long as one hop of a gather's ring."""
    config = CommConfig(protocol=Protocol.LL, num_channels=1, num_threads=512, chunk_bytes=8 * KIB)
    tiny = Collective(CollectiveKind.ALL_TO_ALL, num_ranks, num_ranks)
    gather = Collective(AG, num_ranks, num_ranks)
    cost = pcie_model.collective(tiny, config)
    ring_cost = pcie_model.collective(gather, replace(config, algorithm=RING))
    assert (cost.steps_s, cost.hops_s) == pytest.approx((ring_cost.steps_s, ring_cost.hops_s))
    step_s = 0.25 * 3.5e-6  # LL's part of a step's overhead, as in `by_the_specification`
    assert cost.steps_s == pytest.approx((num_ranks - 1) * step_s)
    assert cost.hops_s == pytest.approx((num_ranks - 1) * 2e-6)


def test_fifo_follows_the_slice_and_ends_at_four_mebibytes_a_channel(pcie_model: ContentionModel) -> None:
    big = Collective(AG, 1024 * MIB, 8)
    sizes = {chunk: pcie_model.collective(big, ring(2, chunk)).fifo_bytes for chunk in (64 * KIB, 1368 * KIB, 2 * MIB)}
    assert sizes == {64 * KIB: 2 * 8 * 32 * KIB, 1368 * KIB: 2 * 4 * 684 * KIB, 2 * MIB: 2 * 4 * MIB}


def test_a_fifo_in_host_memory_takes_no_device_bandwidth(pcie: Cluster, plausible: Profile) -> None:
    shared = ContentionModel(replace(pcie, intra=replace(pcie.intra, host_fifo=True)), plausible)
    assert shared.collective(Collective(AR, 32 * MIB, 8), ring()).touches == plausible.user_traffic


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        (AR, ring(84), "num_channels is 84, but A40 has 84 SMs"),
        (AG, replace(ring(), algorithm=TREE), "algorithm is tree; all_gather has ring"),
        (CollectiveKind.ALL_TO_ALL, ring(chunk_bytes=MIB), "algorithm is ring; all_to_all has none"),
        (AR, replace(ring(), protocol=Protocol.LL128), "protocol is ll128; all_reduce has simple, ll here"),
        (AR, ring(transport=Transport.SHM), "no transport knob"),
        (AR, replace(ring(), algorithm=TREE), "chunk_bytes is 2097152; all_reduce with simple takes at most 524288"),
    ],
)
def test_what_cannot_run_is_refused_in_words(
    pcie_model: ContentionModel, kind: CollectiveKind, config: CommConfig, words: str
) -> None:
    with pytest.raises(SpaceError, match=words):
        pcie_model.collective(Collective(kind, 32 * MIB, 8), config)


def test_more_ranks_than_gpus_are_refused(pcie_model: ContentionModel) -> None:
    with pytest.raises(JobError, match="32 ranks do not fit"):
        pcie_model.collective(Collective(AR, MIB, 32), ring())
