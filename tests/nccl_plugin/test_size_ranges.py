"""Which sizes a tuned size stands for."""

from math import sqrt

from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.nccl_plugin.size_ranges import size_ranges

MIB = 1 << 20
sizes = st.integers(1, 1 << 48)


def test_a_size_alone_stands_for_half_an_octave_either_way():
    (first, last) = size_ranges({64 * MIB: "a"})[64 * MIB]
    assert abs(first / (64 * MIB) - 1 / sqrt(2)) < 1e-6
    assert abs(last / (64 * MIB) - sqrt(2)) < 1e-6


def test_between_two_known_sizes_the_geometric_mean_divides():
    assert size_ranges({64 * MIB: "a", 100 * MIB: "b"})[64 * MIB][1] == 80 * MIB
    assert size_ranges({64 * MIB: "a"}, known=[100 * MIB])[64 * MIB][1] == 80 * MIB


def test_no_gap_is_left_between_equal_settings_but_between_different_ones():
    equal = size_ranges({16 * MIB: "a", 256 * MIB: "a"})
    assert equal[16 * MIB][1] + 1 == equal[256 * MIB][0] == 64 * MIB + 1
    different = size_ranges({16 * MIB: "a", 256 * MIB: "b"})
    assert different[16 * MIB][1] < 23 * MIB
    assert different[256 * MIB][0] > 181 * MIB


def test_small_calls_are_left_alone_unless_their_very_size_was_tuned():
    ranges = size_ranges({65536: "a", MIB: "a", MIB + 4096: "b"})
    assert ranges[65536] == (65536, 65536)
    assert ranges[MIB][0] == LEAST_BYTES == MIB


@given(st.dictionaries(sizes, st.sampled_from("ab"), max_size=12), st.lists(sizes, max_size=5))
def test_ranges_hold_their_size_and_no_other_and_do_not_overlap(settings, known):
    ranges = size_ranges(settings, known)
    assert ranges.keys() == settings.keys()
    every = [number for size in sorted(ranges) for number in (ranges[size][0], size, ranges[size][1])]
    assert every == sorted(every)
    for size, (first, last) in ranges.items():
        assert not any(first <= other <= last for other in {*settings, *known} - {size})
