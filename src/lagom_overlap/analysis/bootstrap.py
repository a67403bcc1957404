"""Intervals of slowdowns: a percentile bootstrap over kernel runs, all kernels at once.

A *cell* is a kernel's runs during some collectives. A resample draws as many runs from each cell as it has, and from
the kernel's runs alone as many as there are, one less of an even number, of which the median counts. The middle one of
d = 2m - 1 uniform draws is Beta(m, m), for which two draws suffice: (1 + sqrt(1 - U^(2/d)) cos(2 pi V)) / 2 (Ulrich,
1984; Devroye, Non-Uniform Random Variate Generation, IX.3). Beyond `_MAX_SAMPLE` runs that many, evenly spaced in order
of size, stand for all; the interval becomes wider by it.
"""

from math import prod
from typing import Final

import numpy as np

from lagom_overlap.trace.gpu_trace import Floats, Int64

# SplitMix64's increment (2**64 over the golden ratio), multipliers and shifts.
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT: Final = np.uint64(31)
_MANTISSA_SHIFT: Final = np.uint64(11)
"""Leaves the upper 53 bits: the precision of a float64."""


class Uniform:
    """A stream of uniform numbers; the same seed gives the same ones.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), counted, so that an array is one step. NumPy has better generators;
    loading them takes a fifth of all the memory that reading a small trace does.
    """

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


NUM_RESAMPLES: Final = 300
"""Enough for the ends of a 95 % interval to be stable to a tenth of its length. Bounds the computation."""
_MAX_SAMPLE: Final = 256
"""Runs of a kernel that are drawn from: more of them hardly narrow a median's interval. Bounds the computation."""
_MAX_CELLS: Final = 2000
"""Kernels whose resamples are drawn: those with the most weight. Bounds the computation."""
_MAX_DRAWS: Final = 2**17
"""Draws that are held in memory at once."""
_CONFIDENCE: Final = (2.5, 97.5)
"""Percentiles: the ends of a 95 % interval."""


def resampled_medians(values: Int64, edges: Int64, uniform: Uniform) -> Floats:
    """(resample, kernel): medians of resamples of each kernel's values, those from edges[k] to edges[k + 1], sorted."""
    first, count = edges[:-1], np.diff(edges)
    num_drawn = (np.minimum(count, _MAX_SAMPLE) - 1) // 2 * 2 + 1
    radius, angle = uniform.draw(2, NUM_RESAMPLES, len(count))
    middle = (1 + np.sqrt(1 - radius ** (2 / num_drawn)) * np.cos(2 * np.pi * angle)) / 2
    picked = first + np.minimum((middle * count).astype(np.int64), count - 1)
    medians: Floats = values[picked].astype(np.float64)
    return medians


def resampled_sums(values: Int64, edges: Int64, uniform: Uniform) -> Floats:
    """(resample, cell): sums of resamples of each cell's values, those from edges[c] to edges[c + 1]; none is empty."""
    count = np.diff(edges)
    sums = np.repeat(np.add.reduceat(values, edges[:-1])[None].astype(np.float64), NUM_RESAMPLES, axis=0)
    several = np.flatnonzero(count > 1)
    if not len(several):
        return sums
    drawn = np.minimum(count[several], _MAX_SAMPLE)
    starts = np.concatenate(([0], np.cumsum(drawn)[:-1]))
    sample = np.concatenate(
        [_thinned(values[edges[cell] : edges[cell + 1]], size) for cell, size in zip(several, drawn, strict=True)]
    )
    offset, size = np.repeat(starts, drawn), np.repeat(drawn, drawn)
    rows = max(1, _MAX_DRAWS // len(sample))
    for first in range(0, NUM_RESAMPLES, rows):
        part = sums[first : first + rows]
        picks = offset + (uniform.draw(len(part), len(sample)) * size).astype(np.int64)
        part[:, several] = np.add.reduceat(sample[picks], starts, axis=1) * (count[several] / drawn)
    return sums


def _thinned(values: Int64, num: int) -> Int64:
    """That many of the values, evenly spaced in order of size."""
    if num == len(values):
        return values
    return np.sort(values)[np.linspace(0, len(values) - 1, num).round().astype(np.int64)]


def heaviest(weight: Floats) -> Int64:
    """The cells that are resampled, in order: all, or the heaviest where there are too many."""
    if len(weight) <= _MAX_CELLS:
        return np.arange(len(weight))
    return np.sort(np.argsort(-weight, kind="stable")[:_MAX_CELLS])


def intervals(durations: Floats, bases: Floats) -> Floats:
    """(2, group): bounds of the 95 % intervals of durations over bases, both (resample, group)."""
    bounds: Floats = np.percentile(durations / np.maximum(bases, 1e-9), _CONFIDENCE, axis=0)
    return bounds
