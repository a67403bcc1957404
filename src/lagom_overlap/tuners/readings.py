"""What single measurements say, before any model: their noise, what they leave exposed, which is faster."""

from collections.abc import Iterable, Sequence
from math import hypot, sqrt
from statistics import median
from typing import Final

from lagom_overlap.tuners.curves import Floats
from lagom_overlap.tuners.problem import IQR_OF_SIGMA, Measurement

LEAST_GAIN: Final = 0.002
"""The smallest gain that counts, as a share of the makespan. Chosen, not measured."""
EXPOSED: Final = 0.02
"""Faster implementations are tried if exposed communication is at least this share of the makespan. Chosen, not
measured: below it there is little to win by faster communication."""
IQR_LOST: Final = 1.2
"""The inclusive interquartile range of k draws is expected to be 1 - 1.2 / k of the distribution's: 0.42 for two. Right
within 5%."""
LEAST_ERRORS: Final = 0.15
"""The smallest gain that counts, in standard errors of the difference.

Of moves that change nothing, 40% (two repeats) to 44% (fifteen) pass. False progress does little harm, because the
verdict judges the result in pairs.
"""
MEDIAN_TO_MEAN: Final = 1.2533
"""Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2)."""
LEAST_SIGMA: Final = 0.002
"""Lower bound on the noise, because a few repeats may agree by chance. Chosen, not measured."""
MOST_ERRORS: Final = 1
"""The models overrule measured times only within this many standard errors of a difference."""


def exposed_s(measured: Measurement) -> float:
    """What of the makespan is communication that no computation hides, in seconds."""
    return max(0.0, measured.makespan_s - measured.comp_s)


def is_exposed(measured: Measurement) -> bool:
    """Whether enough communication is exposed that a faster one is worth looking for."""
    return exposed_s(measured) > EXPOSED * measured.makespan_s


def sigma_s(measured: Measurement) -> float:
    """The standard deviation of one repeat's makespan in seconds, from the interquartile range of the few repeats."""
    if measured.num_repeats < 2:
        return 0.0
    return measured.makespan_iqr_s / (IQR_OF_SIGMA * (1 - IQR_LOST / measured.num_repeats))


def noise_s(old: Measurement, new: Measurement) -> float:
    """The standard error of the difference of two medians."""
    return MEDIAN_TO_MEAN * hypot(*(sigma_s(each) / sqrt(each.num_repeats) for each in (old, new)))


def gains(old: Measurement, new: Measurement) -> bool:
    """Whether the new measurement is faster by more than counts and more than the noise explains."""
    return old.makespan_s - new.makespan_s > max(LEAST_GAIN * old.makespan_s, LEAST_ERRORS * noise_s(old, new))


def sigma_of(measured: Iterable[Measurement]) -> float | None:
    """The standard error of a measured makespan, as a share of it; None if no measurement has repeats."""
    errors = [sigma_s(each) / each.makespan_s / sqrt(each.num_repeats) for each in measured if each.num_repeats > 1]
    return max(LEAST_SIGMA, MEDIAN_TO_MEAN * median(errors)) if errors else None


def fastest(sigma: float, expected: Floats, measured: Sequence[Measurement]) -> int:
    """The fastest arm by the models among those that were measured to gain; the default (0) if there is none.

    Arms whose measured time is above the fastest by more than the noise explains are left out.
    """
    others = [number for number in range(1, len(measured)) if gains(measured[0], measured[number])]
    doubt = sqrt(2) * sigma
    most_s = (1 + MOST_ERRORS * doubt) * min((measured[number].makespan_s for number in others), default=0.0)
    others = [number for number in others if measured[number].makespan_s <= most_s]
    least = min((float(expected[number]) for number in others), default=float(expected[0]))
    if least >= (1 - max(LEAST_GAIN, LEAST_ERRORS * doubt)) * expected[0]:
        return 0
    return next(number for number in others if expected[number] <= (1 + LEAST_GAIN) * least)
