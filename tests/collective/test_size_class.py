"""Classes of sizes cover all sizes once, and nest."""

from itertools import pairwise

import pytest

from lagom_overlap.collective import CollectiveKind, CommunicatorId, ConfigKey
from lagom_overlap.collective.sites import cycles_of
from lagom_overlap.collective.size_class import LEAST_BYTES, WIDTHS, class_bytes, class_range

MIB = 1 << 20
SIZES = sorted({size + d for size in (1, 4096, *(MIB << n for n in range(29))) for d in (-1, 0, 1) if size + d > 0})


@pytest.mark.parametrize("octaves", WIDTHS)
def test_a_class_goes_by_its_smallest_size_and_holds_its_own(octaves):
    for size in SIZES:
        first, last = class_range(size, octaves)
        assert first <= size <= last or size > 1 << 48
        assert first == class_bytes(size, octaves) == class_bytes(first, octaves)
        if last < 1 << 48:
            assert class_bytes(last, octaves) == first
            assert class_bytes(last + 1, octaves) == last + 1  # the next one begins there


def test_the_classes_of_one_octave_are_powers_of_two():
    assert [class_bytes(size * MIB, 1) // MIB for size in (1, 2, 3, 4, 7, 8, 100)] == [1, 2, 2, 4, 4, 8, 64]
    assert class_range(100 * MIB, 2) == (64 * MIB, 256 * MIB - 1)
    assert class_range(LEAST_BYTES - 1, 4) == (1, LEAST_BYTES - 1)
    assert class_range(5, 0) == (5, 5)


def test_what_is_of_one_class_stays_so_at_every_larger_width():
    for narrow, wide in pairwise(WIDTHS):
        for size in SIZES:
            assert class_bytes(class_bytes(size, narrow), wide) == class_bytes(size, wide)


def test_a_cycle_leaves_out_what_is_left_alone() -> None:
    name = CommunicatorId(description="all", ranks=(0, 1))
    keys = [
        ConfigKey(communicator=name, kind=CollectiveKind.ALL_REDUCE, num_bytes=size, occurrence=0)
        for size in (LEAST_BYTES - 1, LEAST_BYTES)
    ]
    assert cycles_of(keys) == {name: (keys[1],)}
