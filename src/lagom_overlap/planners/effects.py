"""What one setting of a framework is predicted to bring."""

from dataclasses import dataclass
from typing import Final

MIN_GAIN: Final = 0.01
"""Of the step: below, a prediction says nothing; steps of one program scatter by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchAdvice:
    """One setting: the predicted step with all advised settings but this one, and with this one too (s)."""

    switch: str
    without_s: float
    with_s: float

    @property
    def gain(self) -> float:
        """How much longer the step is without it, relative to the step with it."""
        return self.without_s / self.with_s - 1.0
