"""How much a group's search may cost."""

from dataclasses import dataclass
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


EFFORTS: Final = {
    "quick": Effort(num_draws=1, max_explore=5, tolerated_loss=0.02, max_repeats=3, max_measurements=12),
    "normal": Effort(num_draws=4, max_explore=8, tolerated_loss=0.004, max_repeats=5, max_measurements=24),
    "thorough": Effort(num_draws=12, max_explore=20, tolerated_loss=0.001, max_repeats=15, max_measurements=60),
}
"""By name; figures in the tables are of "normal" unless they say otherwise."""


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
