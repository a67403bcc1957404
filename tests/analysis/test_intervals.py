import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.analysis.intervals import Intervals, depth_at_least

LAST = 60
PAIRS = st.lists(st.tuples(st.integers(0, LAST), st.integers(0, LAST)).map(lambda p: (min(p), max(p))), max_size=14)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    held = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return held[:, 0], held[:, 1]


def raster(pairs: list[tuple[int, int]]) -> np.ndarray:
    """How many intervals cover each nanosecond: the definition itself."""
    covered = np.zeros(LAST + 1, dtype=np.int64)
    for start, end in pairs:
        covered[start:end] += 1
    return covered


def raster_of(found: Intervals) -> np.ndarray:
    return raster(list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)))


@given(PAIRS)
def test_a_union_covers_each_nanosecond_that_any_interval_covers_once(pairs):
    found = Intervals.union(*columns(pairs))
    assert np.array_equal(raster_of(found), raster(pairs) > 0)
    assert found.length_ns == int((raster(pairs) > 0).sum())
    assert np.all(found.start_ns[1:] > found.end_ns[:-1])


@given(PAIRS, PAIRS)
def test_an_intersection_covers_what_both_cover(first, second):
    found = Intervals.union(*columns(first)).intersect(Intervals.union(*columns(second)))
    assert np.array_equal(raster_of(found), (raster(first) > 0) & (raster(second) > 0))


@given(PAIRS, st.integers(0, LAST), st.integers(0, LAST))
def test_lengths_inside_a_window_are_counted_nanosecond_by_nanosecond(pairs, a, b):
    start, end = min(a, b), max(a, b)
    found = Intervals.union(*columns(pairs))
    expected = int((raster(pairs)[start:end] > 0).sum())
    assert found.within(np.array([start]), np.array([end])).tolist() == [expected]
    assert found.clip(start, end).length_ns == expected
    assert found.gaps(start, end).length_ns == end - start - expected


@given(PAIRS, st.integers(1, 4))
def test_depth_is_how_many_run_at_once(pairs, depth):
    assert np.array_equal(raster_of(depth_at_least(*columns(pairs), depth)), raster(pairs) >= depth)
