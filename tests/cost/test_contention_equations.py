from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.cost.contention import (
    eq1_makespan,
    eq2_communication_time,
    eq3_computation_time,
    eq4_kernel_time,
    eq5_waves,
    eq6_wave_time,
    l2_miss_share,
    traffic_bytes_per_s,
)


def fluid(num_channels: int, num_sms: int) -> float:
    return eq5_waves(1e6, 1, num_sms=num_sms, num_channels=num_channels, quantisation=0.0)


def test_the_makespan_is_the_longer_of_the_two_sums() -> None:
    comp_s, comm_s = eq3_computation_time([1.0, 2.0]), eq2_communication_time([1.5, 0.25])
    assert (comp_s, comm_s) == (3.0, 1.75)
    assert eq1_makespan(comp_s, comm_s) == 3.0


def test_sixteen_to_thirty_two_channels_on_84_sms_cost_the_published_30_percent() -> None:
    """T1: Lagom, section 3.2: "computation time differs by 30.2 %"; SM loss alone is 68/52."""
    ratio = fluid(32, 84) / fluid(16, 84)
    assert ratio == pytest.approx(68 / 52, rel=1e-12)
    assert ratio == pytest.approx(1.302, rel=0.02)


def test_masking_compute_units_on_an_mi300x_costs_about_what_was_measured() -> None:
    """T4: ConCCL (arXiv 2412.14335) measured 17 % and 27 % without 32 and 64 of 304 compute units."""
    assert fluid(32, 304) == pytest.approx(fluid(0, 304) * 304 / 272)
    assert fluid(32, 304) / fluid(0, 304) == pytest.approx(1.17, rel=0.06)
    assert fluid(64, 304) / fluid(0, 304) == pytest.approx(1.27, rel=0.01)


def test_one_full_wave_becomes_two_as_soon_as_an_sm_is_gone() -> None:
    """A grid of 132 blocks on 132 SMs: "2x as long" beside any NCCL kernel (pytorch#143988)."""
    assert eq5_waves(132, 1, num_sms=132) == 1.0
    assert [eq5_waves(132, 1, num_sms=132, num_channels=n) for n in (1, 24, 66)] == [2.0, 2.0, 2.0]


def test_multiples_of_80_tiles_bear_four_channels_on_an_a40_but_not_eight() -> None:
    for tiles, alone, beside_eight in ((960, 12, 13), (1280, 16, 17), (320, 4, 5), (160, 2, 3)):
        waves = [eq5_waves(tiles, 1, num_sms=84, num_channels=n) for n in (0, 4, 8)]
        assert waves == [alone, alone, beside_eight]


def test_small_blocks_keep_their_share_of_a_taken_sm() -> None:
    """84 SMs x 16 blocks; beside 8 communication blocks 76 x 16 + 8 x 12 = 1312 fit."""
    waves = eq5_waves(13120, 16, num_sms=84, num_channels=8, shared_blocks_per_sm=12)
    assert waves == 10.0


def test_a_grid_smaller_than_the_gpu_takes_a_whole_wave_even_when_fluid() -> None:
    assert [eq5_waves(40, 1, num_sms=84, quantisation=s) for s in (0.0, 1.0)] == [1.0, 1.0]
    assert eq5_waves(63, 1, num_sms=84, num_channels=42, quantisation=0.0) == 1.5


def test_half_quantisation_lies_half_way() -> None:
    assert eq5_waves(90, 1, num_sms=60, quantisation=0.5) == 1.75


@given(
    blocks=st.integers(1, 10**6),
    per_sm=st.integers(1, 16),
    channels=st.integers(0, 82),
    quantisation=st.floats(0, 1),
    share=st.floats(0, 1),
)
def test_one_more_channel_never_saves_a_wave(
    blocks: int, per_sm: int, channels: int, quantisation: float, share: float
) -> None:
    fewer, more = (
        eq5_waves(
            blocks,
            per_sm,
            num_sms=84,
            num_channels=n,
            shared_blocks_per_sm=share * per_sm,
            quantisation=quantisation,
        )
        for n in (channels, channels + 1)
    )
    assert more >= fewer * (1 - 1e-12)


def test_a_kernel_is_weighted_by_how_long_each_collective_runs() -> None:
    """By hand: 2 s at 1/8 of the kernel per s, 1 s at 1/4, the last half alone at 1/4 per s takes 2 s."""
    assert eq4_kernel_time([(2.0, 8.0), (1.0, 4.0)], alone_s=4.0) == pytest.approx(5.0)
    assert eq4_kernel_time([(100.0, 8.0)], alone_s=4.0) == pytest.approx(8.0)
    assert eq4_kernel_time([], alone_s=4.0) == 4.0


def test_the_sixty_one_channels_of_autoccl_cost_less_than_their_waves_because_they_end_early() -> None:
    """Untimed, 61 of 84 SMs mean 84/23 = 3.65x; over a tenth of the kernel they mean much less."""
    whole = fluid(61, 84) / fluid(0, 84)
    assert whole == pytest.approx(84 / 23)
    assert eq4_kernel_time([(0.1, whole)], alone_s=1.0) == pytest.approx(1.0 + 0.1 * (1 - 23 / 84))


def test_a_wave_adds_its_transfer_as_printed() -> None:
    """10 waves of 84 blocks x 1 MB at 420 GB/s: 0.2 ms each, after 0.3 ms of computation."""
    times = {"num_blocks": 840, "block_bytes": 1e6, "free_bytes_per_s": 420e9}
    assert eq6_wave_time(0.3e-3, 10, **times) == pytest.approx(0.5e-3)
    assert eq6_wave_time(0.3e-3, 10, **times, norm=inf) == 0.3e-3
    assert eq6_wave_time(0.3e-3, 10, **times, norm=2.0) == pytest.approx((0.09 + 0.04) ** 0.5 * 1e-3)


def test_a_kernel_moves_the_same_bytes_however_many_waves_it_takes() -> None:
    """The printed Eq. 6 would charge the last, partial wave for a full one."""
    fixed = {"num_blocks": 100, "block_bytes": 6e6, "free_bytes_per_s": 600e9}
    assert [waves * eq6_wave_time(0.0, waves, **fixed) for waves in (1, 2, 7)] == pytest.approx([1e-3] * 3)


@given(norm=st.floats(1.0, 50.0), theta=st.floats(0.0, 1.0), total_bytes=st.floats(1.0, 1e9))
def test_a_wave_lasts_between_the_longer_part_and_the_sum(norm: float, theta: float, total_bytes: float) -> None:
    transfer_s = total_bytes / 1e9
    wave_s = eq6_wave_time(theta, 1.0, num_blocks=1, block_bytes=total_bytes, free_bytes_per_s=1e9, norm=norm)
    assert max(theta, transfer_s) * (1 - 1e-12) <= wave_s <= (theta + transfer_s) * (1 + 1e-12)


def test_traffic_counts_user_buffer_and_fifo_and_stops_at_its_ceiling() -> None:
    """A FIFO as large as its share of the L2 misses half of the time: 1 + 2 / 2 touches."""
    miss = l2_miss_share(3e6, 6e6, 0.5)
    assert miss == 0.5
    assert traffic_bytes_per_s(44e9, 1 + 2 * miss, amplification=1.0, ceiling_bytes_per_s=510e9) == 88e9
    assert traffic_bytes_per_s(44e9, 2.0, amplification=9.0, ceiling_bytes_per_s=510e9) == 510e9
