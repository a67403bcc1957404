"""Whether what is told is still of the same job: a batch of another shape makes all that was measured before it false.

A computation time far from what the same assignment took before, or from a trusted forecast, raises a suspicion: the
default is asked for at once. If its time has changed in the same direction, the job has: what came before the suspicion
is forgotten. If not, it was that one measurement (a rank that was late), which is forgotten instead. Communication is
not looked at: a neighbour's traffic comes and goes.
"""

from collections.abc import Sequence
from math import log
from typing import Final

from lagom_overlap.backends.base import Assignment, Failure, Measurement, Outcome
from lagom_overlap.tune.just_enough.evidence import Arms
from lagom_overlap.tune.just_enough.sight import LEAST_S

CHANGED: Final = 0.2
"""Logarithm of a computation time over the one it should be, noise apart, that is suspicious."""
NUM_SIGMAS: Final = 3.0


class Regime:
    """All that was told, in order, and the arms that it makes; `is_suspicious` until the default is measured again."""

    def __init__(self, default: Assignment) -> None:
        self._default = default
        self._told: list[tuple[Assignment, Outcome]] = []
        self._suspect: int | None = None
        self._is_longer = False
        self._tolerance = CHANGED
        self.arms = Arms()

    @property
    def is_suspicious(self) -> bool:
        """Whether the default should be measured next."""
        return self._suspect is not None

    @property
    def num_told(self) -> int:
        """Outcomes that count."""
        return len(self._told)

    def see(self, assignment: Assignment, outcome: Outcome, expected_comp_s: float | None) -> bool:
        """Takes an outcome; `expected_comp_s` is a trusted forecast. True if all before a suspicion was forgotten."""
        before = self.arms.runs.get(assignment, ())
        expected_s = _comp_s(before) if before else expected_comp_s
        if self._suspect is None:  # the noise as it was before any suspicion
            self._tolerance = CHANGED + NUM_SIGMAS * self.arms.sigma
        change = self._change(outcome, expected_s)
        self._told.append((assignment, outcome))
        if self._suspect is not None and assignment == self._default:
            return self._judge(self._suspect, outcome)
        self.arms.add(assignment, outcome)
        if change and self._suspect is None and self.arms.num(self._default):
            self._suspect, self._is_longer = len(self._told) - 1, change > 0
        return False

    def _judge(self, suspect: int, outcome: Outcome) -> bool:
        before = [run for arm, run in self._told[:suspect] if arm == self._default and not isinstance(run, Failure)]
        change = self._change(outcome, _comp_s(before) if before else None)
        has_changed = change != 0 and (change > 0) == self._is_longer
        self._told = self._told[suspect:] if has_changed else self._told[:suspect] + self._told[suspect + 1 :]
        self._suspect = None
        self.arms = Arms()
        for arm, told in self._told:
            self.arms.add(arm, told)
        return has_changed

    def _change(self, outcome: Outcome, expected_s: float | None) -> float:
        """The logarithm of what has changed; 0 where nothing is expected or the difference could be noise."""
        if isinstance(outcome, Failure) or expected_s is None:
            return 0.0
        change = log(max(outcome.comp_s, LEAST_S) / max(expected_s, LEAST_S))
        return change if abs(change) > self._tolerance else 0.0


def _comp_s(runs: Sequence[Measurement]) -> float:
    return sum(run.comp_s for run in runs) / len(runs)
