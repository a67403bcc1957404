"""The rules by which a line is judged, the same for every figure.

a range        direction only if the median of ours has at least half of the gain in the range's middle and no case of
               ours is over 1 % on the other side of 1; reproduced if also every case lies in it, widened by 2 %
a number       direction only with at least half of the published gain; reproduced if also within 5 %
a statement    reproduced if true of every case; direction only if true of more than half of them
    without values direction only if all is true: the sizes are ours, so more cannot be said

A line that agrees with what was put into it is built in, whatever the rule says (`as_built_in`). Every line of the
Lagom paper is, under the profile that was fitted to that paper's range (`under_profile`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from lagom_overlap.papers.reproduce.result import Line, ReproducedVerdict

RANGE_SLACK: Final = 0.02
"""Of the ends of a published range. Chosen."""
NUMBER_SLACK: Final = 0.05
"""Of a single published number. Chosen."""
OTHER_SIDE: Final = 0.01
"""Beyond 1 by more than this on the wrong side, the direction is not reproduced."""
LEAST_SHARE: Final = 0.5
"""Of a published gain: less is no direction."""
FITTED_PROFILES: Final = ("paper_scale",)
"""Fitted to the Lagom paper's end-to-end range."""


def judge_range(values: Sequence[float], low: float, high: float) -> ReproducedVerdict:
    """Values (speedups) against a published range."""
    side = 1.0 if low >= 1 else -1.0
    if not _has_half(median(values), (low + high) / 2) or any(side * (value - 1) < -OTHER_SIDE for value in values):
        return ReproducedVerdict.NOT
    in_range = all(low * (1 - RANGE_SLACK) <= value <= high * (1 + RANGE_SLACK) for value in values)
    return ReproducedVerdict.REPRODUCED if in_range else ReproducedVerdict.DIRECTION


def judge_number(value: float, published: float) -> ReproducedVerdict:
    """A value (a speedup or ratio) against a published one."""
    if not _has_half(value, published):
        return ReproducedVerdict.NOT
    near = abs(value / published - 1) <= NUMBER_SLACK
    return ReproducedVerdict.REPRODUCED if near else ReproducedVerdict.DIRECTION


def _has_half(value: float, published: float) -> bool:
    """Whether a ratio is on the published side of 1, at least half as far from it."""
    gain = published - 1
    return gain != 0 and (value - 1) / gain >= LEAST_SHARE


def judge_cases(as_said: Sequence[bool]) -> ReproducedVerdict:
    """A statement over cases."""
    if as_said and all(as_said):
        return ReproducedVerdict.REPRODUCED
    return ReproducedVerdict.DIRECTION if 2 * sum(as_said) > len(as_said) else ReproducedVerdict.NOT


def judge_direction(as_said: Sequence[bool]) -> ReproducedVerdict:
    """A statement whose sizes or values the paper does not give."""
    return ReproducedVerdict.DIRECTION if as_said and all(as_said) else ReproducedVerdict.NOT


def as_built_in(verdict: ReproducedVerdict) -> ReproducedVerdict:
    """The verdict of a line whose value was built in: agreeing proves nothing, disagreeing still fails."""
    return ReproducedVerdict.NOT if verdict is ReproducedVerdict.NOT else ReproducedVerdict.BUILT_IN


def under_profile(lines: Iterable[Line], profile: str) -> list[Line]:
    """Lines of the Lagom paper as a profile allows them to be judged."""
    if profile not in FITTED_PROFILES:
        return list(lines)
    return [
        replace(
            line,
            verdict=as_built_in(line.verdict),
            taken=f"{line.taken}; the size of contention, fitted to the paper's end-to-end range",
        )
        for line in lines
    ]


def spread(values: Sequence[float], suffix: str = "") -> str:
    """`1.02-1.07 (median 1.04)`, or the one value."""
    low, high = f"{min(values):.2f}{suffix}", f"{max(values):.2f}{suffix}"
    return low if low == high else f"{low}-{high} (median {median(values):.2f}{suffix})"
