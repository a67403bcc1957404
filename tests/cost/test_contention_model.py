from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol, SpaceLimits, Transport
from lagom_overlap.cost import Collectives, ContentionModel, LinkSource, Profile, load_profile
from lagom_overlap.cost.nccl.fitted_links import link_of
from lagom_overlap.cost.nccl.machines import on_topology
from lagom_overlap.cost.nccl.wire import wire_terms
from lagom_overlap.errors import JobError, SpaceError
from lagom_overlap.hardware import Cluster, load_preset, preset_names
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, Kernel, MemoryBound, OverlapGroup

AG = Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8)
AR = Collective(CollectiveKind.ALL_REDUCE, 32 * MIB, 8)


def test_a_paper_profile_s_default_is_the_paper_s(nvlink: Cluster, pcie: Cluster, plausible: Profile) -> None:
    """Lagom, section 4.3: NC = 8, C = 2 MB; NCCL 2.18.3 takes 256 threads on links up to 12 GB/s."""
    paper = replace(plausible, collectives=Collectives.PAPER)
    assert ContentionModel(nvlink, paper).default_config(AG) == CommConfig(
        algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=8, num_threads=512, chunk_bytes=2 * MIB
    )
    assert ContentionModel(pcie, paper).default_config(replace(AG, num_ranks=16)).num_threads == 256
    assert ContentionModel(pcie, paper).default_config(AG).num_channels == 4


@pytest.mark.parametrize(
    ("preset", "kind", "num_bytes", "expected"),
    [
        # Printed by NCCL 2.30.7 itself on such topologies (the project's golden output, Nov 2026).
        ("a100_dgx", CollectiveKind.ALL_REDUCE, 64 * MIB, (Algorithm.RING, Protocol.SIMPLE, 24)),
        ("a100_dgx", CollectiveKind.ALL_REDUCE, 4 * MIB, (Algorithm.RING, Protocol.LL128, 24)),
        ("h100_dgx", CollectiveKind.ALL_REDUCE, 64 * MIB, (Algorithm.NVLS, Protocol.SIMPLE, 16)),
    ],
)
def test_the_default_is_nccl_s_own_choice_by_size_and_machine(
    plausible: Profile, preset: str, kind: CollectiveKind, num_bytes: int, expected: tuple[object, ...]
) -> None:
    config = ContentionModel(load_preset(preset), plausible).default_config(Collective(kind, num_bytes, 8))
    assert (config.algorithm, config.protocol, config.num_channels) == expected


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("kind", list(CollectiveKind))
def test_every_default_can_run_and_lies_in_its_space(plausible: Profile, preset: str, kind: CollectiveKind) -> None:
    model = ContentionModel(load_preset(preset, max(2, 16 // load_preset(preset).gpus_per_node)), plausible)
    for num_bytes, num_ranks in product([1, 64 * KIB, 4 * MIB, 512 * MIB], (2, 8, 16)):
        collective = Collective(kind, num_bytes, num_ranks)
        default = model.default_config(collective)
        space = model.space(collective, SpaceLimits(num_threads=(default.num_threads or 0,)))
        assert default in space.subspaces[0]
        assert model.collective(collective, CommConfig()).seconds() > 0


@pytest.mark.parametrize(
    ("preset", "num_ranks", "mib", "measured_s"),
    [
        ("a100_dgx", 8, 1024, 8.19e-3),  # vTrain: 229 GB/s of bus bandwidth
        ("a100_dgx", 4, 128, 0.9986e-3),  # vTrain: 202 GB/s
        ("h100_dgx", 8, 32, 0.196e-3),  # vidur h100_dgx: 300 GB/s, through NVLS
        ("a40_bridged", 8, 128, 8.7e-3),  # vidur a40
        ("a40_bridged", 2, 128, 3.14e-3),
    ],
)
def test_an_untouched_all_reduce_takes_the_measured_time(
    plausible: Profile, preset: str, num_ranks: int, mib: int, measured_s: float
) -> None:
    model = ContentionModel(load_preset(preset), plausible)
    cost = model.collective(Collective(CollectiveKind.ALL_REDUCE, mib * MIB, num_ranks), CommConfig())
    assert cost.seconds() == pytest.approx(measured_s, rel=0.06)


@pytest.mark.parametrize("preset", ["a100_dgx", "h100_dgx", "a40_bridged"])
@pytest.mark.parametrize("kind", [CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL])
@pytest.mark.parametrize("num_bytes", [MIB, 64 * MIB, 1024 * MIB])
def test_what_nobody_touched_takes_what_the_fitted_link_says(
    plausible: Profile, preset: str, kind: CollectiveKind, num_bytes: int
) -> None:
    """From 1 MiB, where links were measured, the default's channels, threads and chunks cost little beyond the wire."""
    collective, cluster = Collective(kind, num_bytes, 8), load_preset(preset)
    link = link_of(cluster, 8)
    assert link is not None
    expected = wire_terms(*on_topology(collective, cluster)).seconds(link)
    found = ContentionModel(cluster, plausible).collective(collective, CommConfig()).seconds()
    assert expected <= found <= 1.12 * expected


def test_a_stated_link_is_taken_as_stated(plausible: Profile) -> None:
    model = ContentionModel(load_preset("a100_dgx"), replace(plausible, links=LinkSource.STATED))
    assert model.collective(AR, CommConfig()).link_bytes_per_s == 206e9


def test_fewer_channels_slow_nvls_down_only_below_what_its_switch_needs(plausible: Profile) -> None:
    model = ContentionModel(load_preset("h100_dgx"), plausible)
    collective = Collective(CollectiveKind.ALL_REDUCE, 256 * MIB, 8)
    times = {
        n: model.collective(collective, CommConfig(algorithm=Algorithm.NVLS, num_channels=n)).seconds()
        for n in (2, 12, 16)
    }
    assert times[2] > 2 * times[16]
    assert times[12] < 1.05 * times[16]


def test_copy_engines_leave_every_sm_to_computation(plausible: Profile) -> None:
    model = ContentionModel(load_preset("h100_dgx"), plausible)
    kernel = Kernel(num_blocks=132, blocks_per_sm=1, wave_s=1e-4, block_bytes=0.0)
    copied = model.collective(replace(AG, num_bytes=512 * MIB), CommConfig(transport=Transport.COPY_ENGINE))
    assert copied.num_channels == 0
    assert model.running_times([kernel], [copied]).kernel_s == model.running_times([kernel], []).kernel_s
    assert copied.seconds() > copied.wire_bytes / copied.link_bytes_per_s
    assert copied.seconds(memory_load=1.0) > copied.seconds()
    with pytest.raises(SpaceError, match="copy engines carry all-gathers"):
        model.collective(AR, CommConfig(transport=Transport.COPY_ENGINE))
    assert list(model.space(AG, SpaceLimits(transports=(Transport.COPY_ENGINE,)))) == [
        CommConfig(transport=Transport.COPY_ENGINE)
    ]
    with pytest.raises(SpaceError, match="does not carry all_reduce"):
        model.space(AR, SpaceLimits(transports=(Transport.COPY_ENGINE,)))


def test_a_group_of_one_gpu_per_node_shares_the_node_s_cards(plausible: Profile) -> None:
    """Eight data-parallel groups of a node, one ring each: an eighth of the cards for each."""
    model = ContentionModel(load_preset("a100_dgx", 2), plausible)
    spread = Collective(CollectiveKind.ALL_REDUCE, 256 * MIB, 2, num_nodes=2)
    cost = model.collective(spread, CommConfig())
    assert cost.link_bytes_per_s == pytest.approx(192e9 / 8, rel=0.1)
    assert cost.seconds() > 256 * MIB / (192e9 / 8)


def test_untouched_knobs_are_filled_from_the_default(nvlink_model: ContentionModel) -> None:
    assert nvlink_model.effective(AG, CommConfig()) == nvlink_model.default_config(AG)
    tree = nvlink_model.effective(AR, CommConfig(algorithm=Algorithm.TREE, num_channels=3))
    assert (tree.num_channels, tree.num_threads, tree.chunk_bytes) == (3, 544, 512 * KIB)
    assert nvlink_model.effective(AR, CommConfig(protocol=Protocol.LL)).chunk_bytes == 32 * KIB


def test_a_collective_alone_and_a_kernel_alone_take_their_own_times(nvlink_model: ContentionModel) -> None:
    cost = nvlink_model.collective(AG, CommConfig())
    assert nvlink_model.running_times([], [cost]).comm_s == (cost.seconds(),)
    kernel = Kernel(num_blocks=168, blocks_per_sm=1, wave_s=1e-4, block_bytes=0.0)
    assert nvlink_model.running_times([kernel], []).kernel_s == (2e-4,)


def test_a_kernel_of_small_blocks_loses_a_quarter_of_the_sms_taken(nvlink: Cluster, plausible: Profile) -> None:
    """Beside 8 channels 76 x 16 + 8 x 12 of its 84 x 16 blocks fit; a kernel of large blocks loses the 8 SMs."""
    model = ContentionModel(nvlink, replace(plausible, quantisation=0.0))
    small = Kernel(num_blocks=10**6, blocks_per_sm=16, wave_s=1e-6, block_bytes=0.0)
    large = replace(small, blocks_per_sm=2)
    slower = [model.kernel_seconds(k, num_channels=8) / model.kernel_seconds(k) for k in (small, large)]
    assert slower == pytest.approx([1344 / 1312, 84 / 76])


def test_a_polluted_cache_costs_a_kernel_more_traffic(nvlink: Cluster, plausible: Profile) -> None:
    """A FIFO of half the L2 misses half of the time (phi = 1/2): with gamma = 1 a kernel moves 1.5 times its bytes."""
    model = ContentionModel(nvlink, replace(plausible, pollution=1.0))
    kernel = Kernel(num_blocks=84, blocks_per_sm=1, wave_s=1e-12, block_bytes=1e6)
    polluted = model.kernel_seconds(kernel, fifo_bytes=3_000_000)
    assert polluted == pytest.approx(1.5 * model.kernel_seconds(kernel), rel=1e-6)


def test_two_kernels_take_turns(nvlink_model: ContentionModel) -> None:
    kernels = [nvlink_model.kernel(Gemm(4096, 2560, 2560)), nvlink_model.kernel(MemoryBound(10**8))]
    alone = [nvlink_model.running_times([kernel], []).kernel_s[0] for kernel in kernels]
    assert nvlink_model.running_times(kernels, []).kernel_s == pytest.approx([2 * time_s for time_s in alone])


def test_two_collectives_share_one_link(nvlink_model: ContentionModel) -> None:
    """Each saturates the link alone; together they take about twice as long."""
    cost = nvlink_model.collective(AG, CommConfig())
    both = nvlink_model.running_times([], [cost, cost]).comm_s
    assert both[0] == both[1] == pytest.approx(2 * cost.seconds(), rel=0.05)


def test_two_collectives_too_slow_for_the_link_do_not_hinder_each_other(nvlink_model: ContentionModel) -> None:
    cost = nvlink_model.collective(AG, CommConfig(num_channels=1, chunk_bytes=64 * KIB))
    assert nvlink_model.running_times([], [cost, cost]).comm_s == (cost.seconds(), cost.seconds())


def test_collectives_on_different_links_do_not_share(pcie_model: ContentionModel) -> None:
    inside = pcie_model.collective(AG, CommConfig())
    across = pcie_model.collective(replace(AG, num_ranks=16), CommConfig())
    assert pcie_model.running_times([], [inside, across]).comm_s == (inside.seconds(), across.seconds())


def test_collectives_that_ask_for_all_sms_leave_one(nvlink: Cluster, plausible: Profile) -> None:
    model = ContentionModel(nvlink, replace(plausible, collectives=Collectives.PAPER))
    cost = model.collective(AG, CommConfig(num_channels=60))
    kernel = Kernel(num_blocks=84, blocks_per_sm=1, wave_s=1e-4, block_bytes=0.0)
    assert model.running_times([kernel], [cost, cost]).kernel_s[0] == pytest.approx(84e-4)


_LIMITS = {
    ("a100_dgx", 2): {Protocol.LL: 22.5e9, Protocol.LL128: 8 * 20e9},
    ("a100_dgx", 4): {Protocol.LL: 19e9, Protocol.LL128: 8 * 20e9},
    ("h100_dgx", 2): {Protocol.LL: 39e9, Protocol.LL128: 8 * 36.7e9},
    ("h100_dgx", 4): {Protocol.LL: 20.4e9, Protocol.LL128: 8 * 36.7e9},
}
"""NCCL 2.30.7, tuning.cc: llMaxBws of two and of four nodes by CPU vendor; perChMaxRingLL128Bws of eight rings."""


@pytest.mark.parametrize(("preset", "num_nodes"), _LIMITS)
@pytest.mark.parametrize("protocol", [Protocol.LL, Protocol.LL128])
def test_over_nodes_a_ring_carries_no_more_than_nccl_s_protocol_allows(
    plausible: Profile, preset: str, num_nodes: int, protocol: Protocol
) -> None:
    """The wire has 180 to 360 GB/s."""
    cluster = load_preset(preset, num_nodes)
    model, limit = ContentionModel(cluster, plausible), _LIMITS[preset, num_nodes][protocol]
    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST):
        collective = Collective(kind, 1024 * MIB, 8 * num_nodes)
        config = CommConfig(algorithm=Algorithm.RING, protocol=protocol)
        cost = model.collective(collective, config)
        assert collective.wire_bytes / cost.seconds() <= limit
        assert cost.bytes_per_s() >= 0.75 * min(limit, 0.9 * cluster.inter.bytes_per_s)


def test_a_tree_of_ll_over_nodes_carries_no_more_than_nccl_s_limit(plausible: Profile) -> None:
    """tuning.cc: bytes past the root twice, at llMax = 39 GB/s and 0.85 of it for Hopper's simplest tree."""
    model = ContentionModel(load_preset("h100_dgx", 2), plausible)
    collective = Collective(CollectiveKind.ALL_REDUCE, 256 * MIB, 16)
    cost = model.collective(collective, CommConfig(algorithm=Algorithm.TREE, protocol=Protocol.LL))
    least = 2 * collective.num_bytes / (0.85 * 39e9)
    assert least <= cost.seconds() <= 1.3 * least


def test_a_slow_protocol_leaves_a_stated_link_to_others(plausible: Profile) -> None:
    """Two collectives at 22.5 GB/s each do not share a wire of 180."""
    model = ContentionModel(load_preset("a100_dgx", 2), replace(plausible, links=LinkSource.STATED))
    cost = model.collective(Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 16), CommConfig(protocol=Protocol.LL))
    assert cost.bytes_per_s() <= 22.5e9
    assert model.running_times([], [cost, cost]).comm_s == (cost.seconds(), cost.seconds())


@pytest.mark.parametrize(("preset", "num_channels"), [("a100_dgx", 24), ("a40_nvlink", 8), ("h100_dgx", 24)])
def test_a_collective_has_no_more_channels_than_its_communicator(
    plausible: Profile, preset: str, num_channels: int
) -> None:
    """Real NCCL 2.30.7 asked for 32 and 64 runs 24 on eight H100; eight A40 have four rings of two."""
    model = ContentionModel(load_preset(preset), plausible)
    most, more = (model.collective(AG, CommConfig(num_channels=n)) for n in (num_channels, 64))
    assert more == most
    assert more.num_channels == num_channels
    assert all(num_channels >= max(part.num_channels) for part in model.space(AG).subspaces)


def test_memory_contention_is_conserved_in_plausible(nvlink: Cluster, plausible: Profile) -> None:
    """However many channels, a kernel waits no longer than three touches of every byte take, 3 W / B."""
    model = ContentionModel(nvlink, plausible)
    kernel = Kernel(num_blocks=84 * 1280, blocks_per_sm=16, wave_s=1e-9, block_bytes=1e5)
    for num_channels in (1, 4, 16):
        cost = model.collective(AG, CommConfig(num_channels=num_channels))
        times = model.running_times([kernel], [cost])
        alone = model.running_times([kernel], []).kernel_s[0]
        lost = times.comm_s[0] * (1 - alone / times.kernel_s[0])
        assert lost <= 1.05 * 3 * AG.wire_bytes / 600e9


def test_paper_scale_contends_more(nvlink: Cluster, plausible: Profile) -> None:
    slowdowns = []
    for profile in (plausible, load_profile("paper_scale")):
        model = ContentionModel(nvlink, profile)
        kernel = model.kernel(MemoryBound(10**9))
        cost = model.collective(AG, CommConfig())
        slowdowns.append(
            model.running_times([kernel], [cost]).kernel_s[0] / model.running_times([kernel], []).kernel_s[0]
        )
    assert 1.05 < slowdowns[0] < 1.4
    assert slowdowns[1] > 2 * slowdowns[0]


@given(
    num_channels=st.integers(1, 60),
    chunk_bytes=st.integers(16 * KIB, 2 * MIB),
    shape=st.tuples(st.integers(64, 8192), st.integers(64, 8192), st.integers(64, 8192)),
)
def test_one_more_channel_never_speeds_up_a_kernel(
    nvlink_model: ContentionModel, num_channels: int, chunk_bytes: int, shape: tuple[int, int, int]
) -> None:
    kernel = nvlink_model.kernel(Gemm(*shape))
    fewer, more = (
        nvlink_model.running_times(
            [kernel], [nvlink_model.collective(AG, CommConfig(num_channels=c, chunk_bytes=chunk_bytes))]
        ).kernel_s[0]
        for c in (num_channels, num_channels + 1)
    )
    assert more >= fewer * (1 - 1e-4)
    assert fewer >= nvlink_model.running_times([kernel], []).kernel_s[0]


@pytest.mark.parametrize("carved", [-1, 84])
def test_a_carve_out_leaves_computation_at_least_one_sm(nvlink: Cluster, plausible: Profile, carved: int) -> None:
    with pytest.raises(JobError, match=rf"cost.sm_carveout is {carved}, must lie in 0..83 on A40"):
        ContentionModel(nvlink, plausible, carved)


def test_a_channel_that_waits_for_the_last_rank_holds_its_sm(nvlink: Cluster, plausible: Profile) -> None:
    """By hand: 8 of 84 SMs are gone for transfer and wait, so a longer fluid kernel loses 8/84 of both."""
    profile, skew_s = replace(plausible, quantisation=0.0), 3e-3
    model = ContentionModel(nvlink, profile, rank_skew_s=skew_s)
    config = CommConfig(num_channels=8)
    transfer_s = ContentionModel(nvlink, profile).collective(AR, config).seconds()
    kernel = Kernel(num_blocks=84 * 1000, blocks_per_sm=1, wave_s=1e-4, block_bytes=0.0)
    group = OverlapGroup(
        name="skewed",
        computations=(CompOp(name="gemm", work=kernel),),
        comms=(CommOp(name="ar", collective=AR),),
    )
    times = GroupSimulator(group, model).evaluate((config,))
    held_s = skew_s + transfer_s
    assert times.comm_s == pytest.approx((held_s,))
    assert times.comp_s == pytest.approx(0.1 + held_s * 8 / 84)


def test_a_channel_that_waits_moves_nothing(nvlink: Cluster, plausible: Profile) -> None:
    """Half of its time waiting, it takes half of the bandwidth on average: the same bytes in twice the time."""
    plain = ContentionModel(nvlink, plausible)
    alone_s = plain.collective(AG, CommConfig()).seconds()
    skewed = ContentionModel(nvlink, plausible, rank_skew_s=alone_s)
    assert skewed.collective(AG, CommConfig()).moving_share() == pytest.approx(0.5)
    kernel = plain.kernel(MemoryBound(10**9))
    alone, beside, waiting = (
        model.running_times([kernel], comms).kernel_s[0]
        for model, comms in (
            (plain, []),
            (plain, [plain.collective(AG, CommConfig())]),
            (skewed, [skewed.collective(AG, CommConfig())]),
        )
    )
    assert alone < waiting < beside


def test_a_skew_must_be_a_time(nvlink: Cluster, plausible: Profile) -> None:
    with pytest.raises(JobError, match="rank_skew is -1"):
        ContentionModel(nvlink, plausible, rank_skew_s=-1.0)
