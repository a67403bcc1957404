"""Whether one arm is faster than another: the median of paired ratios with a distribution-free interval.

The interval lies between two order statistics of the ratios; the binomial distribution of a fair coin gives the
probability that the true median lies outside (Conover, Practical Nonparametric Statistics, section 3.2). It assumes
independent rounds; a load that changes slowly makes it too narrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Final

CONFIDENCE: Final = 0.95
"""The customary level; nothing is adopted by this interval (see `sequential`)."""


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
    """The comparison of paired times, at least one pair; with too few for the confidence the interval is unbounded."""
    ratios = sorted(base / arm for base, arm in zip(baseline_s, arm_s, strict=True))
    rank = _rank(len(ratios), confidence)
    low, high = (ratios[rank - 1], ratios[-rank]) if rank else (0.0, float("inf"))
    return Comparison(median(ratios), low, high)


def _rank(num_pairs: int, confidence: float) -> int:
    """The largest k for which the k-th smallest and k-th largest ratio enclose the median; 0 if there is none."""
    outside, rank = 0.0, 0
    for below in range(num_pairs // 2):
        outside += 2 * comb(num_pairs, below) / 2**num_pairs
        if outside > 1 - confidence:
            break
        rank = below + 1
    return rank
