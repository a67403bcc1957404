"""The rules by which a line is judged, the same for every figure.

a range        reproduced if every case of ours lies in it, widened by 2 %; direction only if the median of ours
               and the range lie on the same side of 1 and no case of ours is over 1 % on the other
a number       reproduced within 5 %; direction only if on the same side of 1
a statement    reproduced if true of every case; direction only if true of more than half of them
    without values direction only if all is true: the sizes are ours, so more cannot be said
"""

from collections.abc import Sequence
from statistics import median
from typing import Final

from lagom_overlap.results.reproduce import ReproducedVerdict

RANGE_SLACK: Final = 0.02
NUMBER_SLACK: Final = 0.05
OTHER_SIDE: Final = 0.01


def judge_range(values: Sequence[float], low: float, high: float) -> ReproducedVerdict:
    """Values (speedups) against a published range."""
    if all(low * (1 - RANGE_SLACK) <= value <= high * (1 + RANGE_SLACK) for value in values):
        return ReproducedVerdict.REPRODUCED
    side = 1.0 if low >= 1 else -1.0
    if side * (median(values) - 1) > 0 and all(side * (value - 1) >= -OTHER_SIDE for value in values):
        return ReproducedVerdict.DIRECTION
    return ReproducedVerdict.NOT


def judge_number(value: float, published: float) -> ReproducedVerdict:
    """A value (a speedup or ratio) against a published one."""
    if abs(value / published - 1) <= NUMBER_SLACK:
        return ReproducedVerdict.REPRODUCED
    return ReproducedVerdict.DIRECTION if (value - 1) * (published - 1) > 0 else ReproducedVerdict.NOT


def judge_cases(held: Sequence[bool]) -> ReproducedVerdict:
    """A statement over cases."""
    if held and all(held):
        return ReproducedVerdict.REPRODUCED
    return ReproducedVerdict.DIRECTION if 2 * sum(held) > len(held) else ReproducedVerdict.NOT


def judge_direction(held: Sequence[bool]) -> ReproducedVerdict:
    """A statement whose sizes or values the paper does not give."""
    return ReproducedVerdict.DIRECTION if held and all(held) else ReproducedVerdict.NOT


def spread(values: Sequence[float], suffix: str = "") -> str:
    """`1.02-1.07 (median 1.04)`, or the one value."""
    low, high = f"{min(values):.2f}{suffix}", f"{max(values):.2f}{suffix}"
    return low if low == high else f"{low}-{high} (median {median(values):.2f}{suffix})"
