from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.cost.lagom_equations import (
    Waves,
    eq1_makespan,
    eq5_dispatch,
    eq6_kernel_time,
    eq6_wave_time,
    l2_miss_share,
    traffic_bytes_per_s,
)
from lagom_overlap.hardware import load_preset


def waves_of(num_blocks: float, per_sm: float, *, quantisation: float = 1.0, **sms: float) -> float:
    return eq5_dispatch(num_blocks, per_sm, **sms).count(quantisation)  # type: ignore[arg-type]


def fluid(num_channels: int, num_sms: int) -> float:
    return waves_of(1e6, 1, num_sms=num_sms, num_channels=num_channels, quantisation=0.0)


def test_the_makespan_is_the_longer_of_the_two_streams() -> None:
    assert eq1_makespan(3.0, 1.75) == eq1_makespan(1.75, 3.0) == 3.0


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
    """A grid of 132 blocks on 132 SMs: "2x as long" during any NCCL kernel (pytorch#143988)."""
    assert waves_of(132, 1, num_sms=132) == 1.0
    assert [waves_of(132, 1, num_sms=132, num_channels=n) for n in (1, 24, 66)] == [2.0, 2.0, 2.0]


def test_multiples_of_80_tiles_bear_four_channels_on_an_a40_but_not_eight() -> None:
    for tiles, alone, beside_eight in ((960, 12, 13), (1280, 16, 17), (320, 4, 5), (160, 2, 3)):
        waves = [waves_of(tiles, 1, num_sms=84, num_channels=n) for n in (0, 4, 8)]
        assert waves == [alone, alone, beside_eight]


def test_small_blocks_keep_their_share_of_a_taken_sm() -> None:
    """84 SMs x 16 blocks; during 8 communication blocks 76 x 16 + 8 x 12 = 1312 fit."""
    waves = waves_of(13120, 16, num_sms=84, num_channels=8, shared_blocks_per_sm=12)
    assert waves == 10.0


def test_a_grid_smaller_than_the_gpu_takes_a_whole_wave_even_when_fluid() -> None:
    assert [waves_of(40, 1, num_sms=84, quantisation=s) for s in (0.0, 1.0)] == [1.0, 1.0]
    assert waves_of(63, 1, num_sms=84, num_channels=42, quantisation=0.0) == 1.5


def test_half_quantisation_lies_half_way() -> None:
    assert waves_of(90, 1, num_sms=60, quantisation=0.5) == 1.75


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
        waves_of(
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


def test_blocks_are_dealt_to_dies_in_turn_and_the_fullest_decides() -> None:
    """MI300X, 1184 tiles: 148 on each of 8 dies of 38; 16 channels leave 36, so 4 whole waves and 4 more tiles each."""
    assert eq5_dispatch(1184, 1, num_sms=304, num_xcds=8) == Waves(3, 304, 8 * (148 - 3 * 38))
    beside = eq5_dispatch(1184, 1, num_sms=304, num_channels=16, num_xcds=8)
    assert beside == Waves(4, 288, 8 * (148 - 4 * 36))
    assert (beside.count(), beside.count(0.0)) == (5.0, pytest.approx(148 / 36))


@pytest.mark.parametrize(("grid", "waves"), [(224, 1), (240, 1), (241, 2), (248, 2), (256, 2)])
def test_a_static_grid_that_meets_too_many_channels_takes_a_second_pass(grid: int, waves: int) -> None:
    """256 CUs on 8 dies beside 16 channels: 30 left on each die, so 241 blocks put a 31st on one."""
    assert eq5_dispatch(grid, 1, num_sms=256, num_channels=16, num_xcds=8).count() == waves


@pytest.mark.parametrize(("grid", "waves"), [(224, 1), (225, 2), (240, 2)])
def test_channels_that_crowd_on_half_of_the_dies_leave_a_static_grid_less(grid: int, waves: int) -> None:
    """The report on MI350: the cliff begins between 224 and 228 blocks, 28 on each die, where 16 channels run."""
    gpu = load_preset("mi350x").gpu
    assert (gpu.num_xcds, gpu.channel_xcds) == (8, 4)
    waited = eq5_dispatch(grid, 1, num_sms=gpu.num_sms, num_channels=16, num_xcds=8, channel_xcds=gpu.channel_xcds)
    assert waited.count() == waves


def test_a_grid_whose_blocks_fetch_tiles_loses_only_what_it_no_longer_finds() -> None:
    """1024 tiles, 304 CUs, 32 channels: 256 resident blocks are not displaced, 304 are 272."""
    sms = {"num_sms": 304, "num_channels": 32, "num_xcds": 8}
    assert eq5_dispatch(1024, 1, grid=256, **sms) == Waves(4, 256, 0)
    assert eq5_dispatch(1024, 1, grid=304, **sms) == Waves(3, 272, 1024 - 3 * 272)


def test_blocks_that_miss_their_wave_spill_but_never_from_the_first() -> None:
    """148 tiles on 37 CUs are 4 waves exactly; of the 111 after the first, 2 % miss theirs. One wave has no such."""
    sms = {"num_sms": 37, "spill": 0.02}
    assert eq5_dispatch(148, 1, **sms).count() == 5
    assert eq5_dispatch(37, 1, **sms).count() == 1


def test_each_wave_moves_the_bytes_of_its_own_blocks() -> None:
    """By hand, p = 2: a wave of 4 blocks takes sqrt(3^2 + 4^2) = 5, one block alone sqrt(3^2 + 1) s."""
    waves = Waves(2, 4, 1)
    times = {"block_bytes": 1.0, "free_bytes_per_s": 1.0, "norm": 2.0}
    assert eq6_kernel_time(3.0, waves, quantisation=1.0, **times) == pytest.approx(2 * 5 + 10**0.5)
    assert eq6_kernel_time(3.0, waves, quantisation=0.0, **times) == pytest.approx(2 * 5 + 5 / 4)
    assert eq6_kernel_time(3.0, Waves(0, 4, 2), quantisation=1.0, **times) == pytest.approx(13**0.5)


def test_with_the_paper_s_sum_the_waves_add_up_to_its_own_formula() -> None:
    waves = eq5_dispatch(1000, 2, num_sms=84, num_channels=3)
    g = waves.count()
    whole = g * eq6_wave_time(1e-3, g, num_blocks=1000, block_bytes=5e5, free_bytes_per_s=1e12)
    parts = eq6_kernel_time(1e-3, waves, block_bytes=5e5, free_bytes_per_s=1e12, norm=1.0, quantisation=1.0)
    assert parts == pytest.approx(whole, rel=1e-12)
