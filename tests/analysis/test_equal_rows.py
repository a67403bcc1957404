import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.analysis.equal_rows import equal_rows

WIDE = st.sampled_from([-(2**61), -5, -1, 0, 1, 2, 7, 10**9, 2**61])


@given(st.lists(st.tuples(WIDE, WIDE, st.integers(-3, 3), WIDE, WIDE), min_size=1, max_size=40))
def test_it_finds_what_a_sort_of_rows_finds(rows):
    table = np.array(rows, dtype=np.int64)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    ours = equal_rows(table)
    assert ours[0].tolist() == first.tolist()
    assert ours[1].tolist() == inverse.ravel().tolist()


@pytest.mark.parametrize("width", [0, 3])
def test_no_rows_have_no_equals(width):
    first, inverse = equal_rows(np.empty((0, width), dtype=np.int64))
    assert len(first) == len(inverse) == 0
