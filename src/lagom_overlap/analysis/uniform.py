"""Random numbers for a bootstrap: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), counted, so that an array is one step.

NumPy has better generators; loading them takes a fifth of all the memory that reading a small trace does.
"""

from math import prod
from typing import Final

import numpy as np

from lagom_overlap.trace.gpu_trace import Floats

# SplitMix64's increment (2**64 over the golden ratio), multipliers and shifts.
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT: Final = np.uint64(31)
_MANTISSA_SHIFT: Final = np.uint64(11)
"""Leaves the upper 53 bits: the precision of a float64."""


class Uniform:
    """A stream of uniform numbers; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._state = np.uint64(seed % 2**64)
        self._num_drawn = 0

    def words(self, num: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        """The next words of 64 bits."""
        counter = np.arange(self._num_drawn + 1, self._num_drawn + num + 1, dtype=np.uint64)
        self._num_drawn += num
        mixed = counter * _GAMMA + self._state
        for shift, factor in _MIX:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
        return mixed ^ (mixed >> _LAST_SHIFT)

    def draw(self, *shape: int) -> Floats:
        """The next numbers, at least 0 and below 1."""
        uniform: Floats = (self.words(prod(shape)) >> _MANTISSA_SHIFT).astype(np.float64) * 2.0**-53
        return uniform.reshape(shape)
