"""Equal rows of a table of whole numbers, found by one sort of one column: many times quicker than a sort of rows."""

from typing import Final

import numpy as np

from lagom_overlap.trace.gpu_trace import Int64

_ROOM: Final = 2**62
"""Codes stay below this, so that they fit an int64; a column that would exceed it has the codes renumbered first."""


def equal_rows(table: Int64) -> tuple[Int64, Int64]:
    """(first, inverse): the index at which each distinct row first occurs, and per row the index of its distinct row.

    Distinct rows are in lexicographic order, as of `np.unique(..., axis=0)`.
    """
    code = np.zeros(len(table), dtype=np.int64)
    if not len(table):
        return code, code
    room = 1
    for column in table.T:
        shifted = column - column.min()
        span = int(shifted.max()) + 1
        if span > 2 * len(table):  # sparse values are renumbered densely, which keeps the codes small
            values, shifted = np.unique(column, return_inverse=True)
            span = len(values)
        if room * span > _ROOM:
            values, code = np.unique(code, return_inverse=True)
            room = len(values)
        code, room = code * span + shifted, room * span
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)
