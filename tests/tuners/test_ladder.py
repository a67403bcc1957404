"""The rungs as positions on lattices, worked by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol, Subspace
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.hardware import load_preset
from lagom_overlap.tuners.ladder import LADDERS, PROPORTIONAL, THIRDS, UNIT, Ladder, ladder_named, round_up, rungs
from lagom_overlap.units import KIB, MIB


def values(subspace: Subspace, ladder: Ladder) -> list[tuple[int | None, int | None]]:
    return [(subspace.num_channels[i], subspace.chunk_bytes[j]) for i, j in rungs(subspace, ladder)]


def test_the_thirds_of_2_kb_to_2_mb_are_the_sizes_that_the_paper_reports() -> None:
    """linspace(2 KB, 2048 KB, 4) = 2, 684, 1366, 2048 KB (spec, Lagom section 2.1b)."""
    targets = [THIRDS.chunk_target(rung, 2 * KIB, 2048 * KIB) for rung in range(5)]
    assert [round(target / KIB) for target in targets] == [2, 684, 1366, 2048, 2048]


def test_both_readings_agree_on_the_reported_rungs_and_differ_at_the_bottom() -> None:
    """C = channels x 341.3 KB: 682.7 and 1365.3 KB, on the 2 KB grid 684 and 1366 KB."""
    proportional = [PROPORTIONAL.chunk_target(rung, 2 * KIB, 2048 * KIB) / KIB for rung in range(4)]
    assert proportional == pytest.approx([2048 / 6, 2048 / 3, 2 * 2048 / 3, 2048])


def test_chunks_of_an_engine_without_slices_are_climbed_as_they_are() -> None:
    # Thirds of 1..4 MiB are 2 and 3 MiB, in the chunk itself.
    gloo = Subspace(num_channels=(1, 2, 3, 8), chunk_bytes=(MIB, 2 * MIB, 3 * MIB, 4 * MIB))
    assert values(gloo, THIRDS) == [(1, MIB), (2, 2 * MIB), (8, 3 * MIB), (8, 4 * MIB)]


def test_a_rung_between_two_allowed_values_is_rounded_up() -> None:
    space = Subspace(num_channels=(1, 3, 5, 8), chunk_bytes=(10, 30, 35, 100))
    # Channels 2, 4, 8 -> 3, 5, 8; chunks 40, 70, 100 -> 100.
    assert values(space, THIRDS) == [(1, 10), (3, 100), (5, 100), (8, 100)]


def test_slices_are_converted_where_the_protocol_is_simple() -> None:
    chunks = (8 * KIB, 1366 * KIB, 1368 * KIB, 2048 * KIB)
    simple = Subspace(
        algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=(1, 2, 4, 8, 16), chunk_bytes=chunks
    )
    wanted = [(1, 8 * KIB), (2, 1368 * KIB), (4, 1366 * KIB), (8, 2048 * KIB), (16, 2048 * KIB)]
    assert values(simple, THIRDS) == wanted
    ll = Subspace(algorithm=Algorithm.RING, protocol=Protocol.LL, num_channels=(1, 2, 4), chunk_bytes=(4, 8, 12, 16))
    assert values(ll, THIRDS) == [(1, 4), (2, 8), (4, 12), (4, 16)]


def test_in_the_simulators_own_space_the_paper_s_pair_is_a_rung() -> None:
    """Ring and Simple on an A40: rounded up, 688 KB became the whole buffer, and the third rung a smaller chunk."""
    cluster = load_preset("a40_nvlink", 1)
    model = ContentionModel(cluster, load_profile("plausible"))
    space = model.space(Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8))
    simple = next(one for one in space.subspaces if (one.algorithm, one.protocol) == (Algorithm.RING, Protocol.SIMPLE))
    for ladder in (THIRDS, PROPORTIONAL):
        assert (2, 1368 * KIB) in values(simple, ladder)


@settings(max_examples=200)
@given(
    channels=st.sets(st.integers(1, 64), min_size=1, max_size=16),
    chunks=st.sets(st.integers(1, 1024), min_size=1, max_size=16),
    protocol=st.sampled_from([None, *Protocol]),
    ladder=st.sampled_from(sorted(LADDERS.values(), key=lambda one: one.name)),
)
def test_no_knob_ever_falls(channels: set[int], chunks: set[int], protocol: Protocol | None, ladder: Ladder) -> None:
    """By more than the paper's own 2 KB between its two pairs; the climb begins at the least and ends at the most."""
    subspace = Subspace(
        protocol=protocol,
        num_channels=tuple(sorted(channels)),
        chunk_bytes=tuple(2 * KIB * value for value in sorted(chunks)),
    )
    climb = values(subspace, ladder)
    assert climb[0] == (subspace.num_channels[0], subspace.chunk_bytes[0])
    assert climb[-1] == (subspace.num_channels[-1], subspace.chunk_bytes[-1])
    for before, after in pairwise(climb):
        assert after != before
        assert (after[0] or 0) >= (before[0] or 0)
        assert (after[1] or 0) >= (before[1] or 0) - 2 * KIB


def test_a_chunk_stays_where_the_next_rung_s_would_be_smaller() -> None:
    """Slices from 300 KB, a quarter of the least chunk: a third up 883 KB, two to a chunk; two thirds up 1466, one."""
    chunks = tuple(value * KIB for value in (1200, 1466, 1766, 2048))
    space = Subspace(protocol=Protocol.SIMPLE, num_channels=(1, 2, 4, 8), chunk_bytes=chunks)
    climb = [(1, 1200), (2, 1766), (4, 1766), (8, 2048)]
    assert values(space, THIRDS) == [(channels, chunk * KIB) for channels, chunk in climb]


def test_the_smallest_step_is_one_more_value_of_each_knob() -> None:
    space = Subspace(num_channels=(1, 2, 3, 4), chunk_bytes=(10, 20))
    assert values(space, UNIT) == [(1, 10), (2, 20), (3, 20), (4, 20)]


def test_a_single_value_and_a_missing_knob_leave_the_other_axis_to_climb() -> None:
    assert values(Subspace(num_channels=(1, 2, 4)), THIRDS) == [(1, None), (2, None), (4, None)]
    assert values(Subspace(chunk_bytes=(10, 20, 30, 40)), THIRDS) == [(None, 10), (None, 20), (None, 30), (None, 40)]
    assert values(Subspace(), THIRDS) == [(None, None)]
    assert values(Subspace(num_channels=(3,), chunk_bytes=(7,)), PROPORTIONAL) == [(3, 7)]


def test_rounding_up_stops_at_the_largest_value() -> None:
    assert [round_up((1, 4, 9), wanted) for wanted in (0.5, 1, 1.1, 4, 9, 99)] == [0, 0, 1, 1, 2, 2]


def test_an_unknown_ladder_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'thirds'"):
        ladder_named("third")
