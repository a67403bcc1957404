"""The times in which a settled job was slower for a while: told to the user, and a measure of how long to wait."""

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

REMEMBERED: Final = 20
"""The latest phases that say how long one may last."""
TOLD: Final = 200
"""The latest phases that figures are of."""


@dataclass(frozen=True, slots=True)
class SlowPhase:
    """Steps in a row that took `ratio` times as long, in the median, as those around them; over, or taken for good."""

    num_steps: int
    ratio: float
    is_over: bool = True


class SlowPhases:
    """The slow phases of a job, also across several searches."""

    def __init__(self) -> None:
        self._latest: deque[SlowPhase] = deque(maxlen=TOLD)
        self._num_over = 0

    @property
    def num_over(self) -> int:
        """Phases that ended by themselves: disturbances."""
        return self._num_over

    @property
    def longest_steps(self) -> int:
        """The longest of those remembered; one that was taken for good counts as far as it was seen."""
        return max((phase.num_steps for phase in [*self._latest][-REMEMBERED:]), default=0)

    def add(self, phase: SlowPhase) -> None:
        """The next phase."""
        self._latest.append(phase)
        self._num_over += phase.is_over

    def words(self) -> str:
        """How many were over by themselves, how long they were and how much slower; nothing if there were none."""
        over = [phase for phase in self._latest if phase.is_over]
        if not over:
            return ""
        lengths = [phase.num_steps for phase in over]
        phases = "1 slow phase" if self._num_over == 1 else f"{self._num_over} slow phases"
        return (
            f"{phases} of {median(lengths):.0f} steps in the median, {max(lengths)} at most, ended without us; steps "
            f"took {median(phase.ratio for phase in over):.2f} times as long"
        )
