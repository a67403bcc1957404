"""Size classes, for calls whose sizes change from step to step (batches of variable length, MoE).

A class of w octaves holds the sizes from 2^(20 + w j) bytes to just below 2^(20 + w (j + 1)); smaller calls, which are
never tuned, form one class. A class is named after its smallest size: a setting that is allowed for that size is
allowed for the whole class. The widths are `WIDTHS`; each divides the next, so classes nest: calls that share a class
at one width share one at every larger width. At width 0 every size is its own class. Only sizes decide, never times,
and a collective has the same size on all of its ranks, so all ranks put it into the same class.
"""

from typing import Final

LEAST_BYTES: Final = 1 << 20
"""Where classes begin: smaller calls take tens of microseconds, which is launch latency that no channel count
changes."""
WIDTHS: Final = (0, 1, 2, 4, 64)
"""Octaves; the last is one class for all."""
_MOST_BYTES: Final = 1 << 48
"""The upper end of the last class, and the largest size of the plug-in's table (`MAX_BYTES`)."""


def is_small(num_bytes: int) -> bool:
    """Whether a call of this size is left alone."""
    return num_bytes < LEAST_BYTES


def class_bytes(num_bytes: int, octaves: int) -> int:
    """The smallest size of the class, which names it."""
    if octaves == 0:
        return num_bytes
    if is_small(num_bytes):
        return 1
    above = num_bytes.bit_length() - LEAST_BYTES.bit_length()
    return LEAST_BYTES << above // octaves * octaves


def class_range(num_bytes: int, octaves: int) -> tuple[int, int]:
    """The first and last bytes of a size's class."""
    first = class_bytes(num_bytes, octaves)
    if octaves == 0:
        return first, first
    if is_small(first):
        return first, LEAST_BYTES - 1
    return first, min((first << octaves) - 1, _MOST_BYTES)
