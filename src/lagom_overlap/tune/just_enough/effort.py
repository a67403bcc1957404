"""How much a group's search may cost."""

from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.errors import SpaceError, UnknownNameError


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """When a group's search ends.

    Up to `max_explore` measurements, `num_draws` forecasts that could as well be true are asked for something better
    before the race begins; the race ends when the expected loss against the closest rival is below `tolerated_loss`
    (a share), an arm was measured `max_repeats` times, or after `max_measurements`.
    """

    num_draws: int
    max_explore: int
    tolerated_loss: float
    max_repeats: int
    max_measurements: int

    def under(self, sigma: float) -> "Effort":
        """The effort where one measurement has this noise: on a noisy machine the search looks around and races longer.

        All but the number of draws grows with the noise over `USUAL_NOISE`, at most `MOST_EFFORT` times.
        """
        times = times_usual(sigma)
        return replace(
            self,
            max_explore=round(times * self.max_explore),
            tolerated_loss=times * self.tolerated_loss,
            max_repeats=round(times * self.max_repeats),
            max_measurements=round(times * self.max_measurements),
        )


USUAL_NOISE: Final = 0.03
"""Noise of one measurement, as a share, up to which an effort is what it says."""
MOST_EFFORT: Final = 2.0
EFFORTS: Final = {
    "quick": Effort(num_draws=1, max_explore=5, tolerated_loss=0.02, max_repeats=3, max_measurements=12),
    "normal": Effort(num_draws=4, max_explore=8, tolerated_loss=0.004, max_repeats=5, max_measurements=24),
    "thorough": Effort(num_draws=12, max_explore=20, tolerated_loss=0.001, max_repeats=15, max_measurements=60),
}
"""By name; figures in the tables are of "normal" unless they say otherwise."""


def times_usual(sigma: float) -> float:
    """The noise over the usual, between 1 and `MOST_EFFORT`."""
    return min(max(sigma / USUAL_NOISE, 1.0), MOST_EFFORT)


def effort_named(name: str) -> Effort:
    """The effort of a name.

    Raises:
        UnknownNameError: if there is none.
    """
    if name not in EFFORTS:
        raise UnknownNameError.among("effort", name, EFFORTS)
    return EFFORTS[name]


def check_confidence(confidence: float) -> float:
    """The confidence, in standard deviations.

    Raises:
        SpaceError: if it is negative.
    """
    if not confidence >= 0:
        raise SpaceError(f"confidence is {confidence}, must be at least 0")
    return confidence
