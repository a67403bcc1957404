"""Whether one arm is faster than another: the median of paired ratios, with an interval that assumes no distribution.

The interval lies between two order statistics of the ratios: that the median of the distribution lies outside has the
probability of as many heads or fewer in as many tosses of a fair coin (Conover, Practical Nonparametric Statistics,
section 3.2). It supposes that rounds do not hang together; a load that changes slowly makes it too narrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Final

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Comparison:
    """Median ratio of a baseline's time to an arm's (above 1: the arm is faster) and its interval; inf if unknown."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, or `not separable`."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "not separable"

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}), {self.verdict}"


def compared(baseline_s: Sequence[float], arm_s: Sequence[float], *, confidence: float = CONFIDENCE) -> Comparison:
    """The comparison of paired times, at least one; with too few for the confidence the interval is everything."""
    ratios = sorted(base / arm for base, arm in zip(baseline_s, arm_s, strict=True))
    rank = _rank(len(ratios), confidence)
    low, high = (ratios[rank - 1], ratios[-rank]) if rank else (0.0, float("inf"))
    return Comparison(median(ratios), low, high)


def _rank(num_pairs: int, confidence: float) -> int:
    """The largest k such that the k-th smallest and k-th largest hold the median that surely; 0 if none does."""
    outside, rank = 0.0, 0
    for below in range(num_pairs // 2):
        outside += 2 * comb(num_pairs, below) / 2**num_pairs
        if outside > 1 - confidence:
            break
        rank = below + 1
    return rank
