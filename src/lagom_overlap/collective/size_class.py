"""Classes of sizes: what calls have in common whose sizes change from step to step (batches of variable length, MoE).

A class of w octaves holds the sizes from 2^(20 + w j) bytes to just below 2^(20 + w (j + 1)); smaller calls, which are
left alone anyway, are all of one class. A class goes by its smallest size: what may be set for that, may be for all of
its calls. Widths are those of `WIDTHS`, of which each divides the next, so classes nest: calls that are of one class at
one width are so at every larger one. Width 0 leaves every size to itself. Sizes decide, never times, and a collective
has one size on all of its ranks, so all of them put it into one class.
"""

from typing import Final

LEAST_BYTES: Final = 1 << 20
"""Where classes begin: smaller calls take tens of microseconds, the launch and not the channels."""
WIDTHS: Final = (0, 1, 2, 4, 64)
"""Octaves; the last is one class for all."""
_MOST_BYTES: Final = 1 << 48


def class_bytes(num_bytes: int, octaves: int) -> int:
    """The size that the class of a size goes by."""
    if octaves == 0:
        return num_bytes
    if num_bytes < LEAST_BYTES:
        return 1
    above = num_bytes.bit_length() - LEAST_BYTES.bit_length()
    return LEAST_BYTES << above // octaves * octaves


def class_range(num_bytes: int, octaves: int) -> tuple[int, int]:
    """The first and last bytes of a size's class."""
    first = class_bytes(num_bytes, octaves)
    if octaves == 0:
        return first, first
    if first < LEAST_BYTES:
        return first, LEAST_BYTES - 1
    return first, min((first << octaves) - 1, _MOST_BYTES)
