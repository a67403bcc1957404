"""Phases in which a settled job was slower for a while: reported to the user, and used to decide how long to wait."""

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

REMEMBERED: Final = 20
"""How many of the latest phases decide how long to wait. Chosen: an old disturbance should not delay alarms for
ever."""
REPORTED: Final = 200
"""How many of the latest phases the reported medians cover. Bounds memory."""


@dataclass(frozen=True, slots=True)
class SlowPhase:
    """Consecutive steps with a median of `ratio` times the steps around them; over, or counted as a lasting change."""

    num_steps: int
    ratio: float
    is_over: bool = True


class SlowPhases:
    """The slow phases of a job, also across several searches."""

    def __init__(self) -> None:
        self._latest: deque[SlowPhase] = deque(maxlen=REPORTED)
        self._num_over = 0

    @property
    def num_over(self) -> int:
        """Phases that ended by themselves."""
        return self._num_over

    @property
    def longest_steps(self) -> int:
        """Steps of the longest remembered phase; a lasting change counts as far as it was observed."""
        return max((phase.num_steps for phase in [*self._latest][-REMEMBERED:]), default=0)

    def add(self, phase: SlowPhase) -> None:
        """Adds a phase."""
        self._latest.append(phase)
        self._num_over += phase.is_over

    def words(self) -> str:
        """Number, length and slow-down of the phases that ended by themselves; "" if there were none."""
        over = [phase for phase in self._latest if phase.is_over]
        if not over:
            return ""
        lengths = [phase.num_steps for phase in over]
        phases = "1 slow phase" if self._num_over == 1 else f"{self._num_over} slow phases"
        return (
            f"{phases} ended by themselves (median {median(lengths):.0f} steps, longest {max(lengths)}; steps took "
            f"{median(phase.ratio for phase in over):.2f} times as long)"
        )
