"""Eqs 4 to 6 of the Lagom paper as printed, by hand, and where they differ from the repaired form."""

import pytest

from lagom_overlap.cost.lagom_equations import eq5_dispatch, eq6_kernel_time
from lagom_overlap.papers.reproduce.equations import Overlapping, printed_kernel_s, printed_wave_s, printed_waves
from lagom_overlap.workload import Kernel

KERNEL = Kernel(num_blocks=340, blocks_per_sm=1, wave_s=1e-4, block_bytes=6e5)
SMS, BANDWIDTH = 84, 600e9


def test_waves_of_fig_3_are_those_of_the_quotient_that_the_paper_measured() -> None:
    """340 blocks: 340 / 68 = 5 waves with 16 channels, 340 / 52 = 6.54 -> 7 with 32."""
    assert [printed_waves(KERNEL, SMS, channels) for channels in (16, 32)] == [5, 7]
    with pytest.raises(ValueError, match="84 channels on 84 SMs"):
        printed_waves(KERNEL, SMS, 84)


def test_a_wave_moves_its_blocks_bytes_over_what_communication_leaves() -> None:
    # 68 blocks of 600 kB over 600 - 200 GB/s are 102 us, and theta 100.
    assert printed_wave_s(KERNEL, SMS, BANDWIDTH, Overlapping(16, 200e9)) == pytest.approx(2.02e-4)


def test_whole_waves_give_the_repaired_form_and_a_last_partial_one_is_charged_in_full() -> None:
    comm = Overlapping(16, 200e9)
    for blocks, is_equal in ((340, True), (341, False)):
        kernel = Kernel(num_blocks=blocks, blocks_per_sm=1, wave_s=1e-4, block_bytes=6e5)
        repaired = eq6_kernel_time(
            1e-4,
            eq5_dispatch(blocks, 1, num_sms=SMS, num_channels=16),
            block_bytes=6e5,
            free_bytes_per_s=400e9,
            norm=1.0,
            quantisation=1.0,
        )
        printed = printed_kernel_s(kernel, SMS, BANDWIDTH, [comm])
        assert (printed == pytest.approx(repaired)) is is_equal
        assert printed >= repaired * (1 - 1e-12)


def test_each_collective_that_overlaps_a_computation_counts_it_once_more() -> None:
    """Eq. 4 as printed: two collectives in turn, twice the time; none, no time at all."""
    comm = Overlapping(8, 100e9)
    one = printed_kernel_s(KERNEL, SMS, BANDWIDTH, [comm])
    assert printed_kernel_s(KERNEL, SMS, BANDWIDTH, [comm, comm]) == pytest.approx(2 * one)
    assert printed_kernel_s(KERNEL, SMS, BANDWIDTH, []) == 0
