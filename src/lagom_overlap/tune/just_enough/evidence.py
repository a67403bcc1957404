"""What was measured, arm by arm, and how noisy it is."""

from collections.abc import Sequence
from math import inf, sqrt
from typing import Final

import numpy as np

from lagom_overlap.backends.base import Assignment, Failure, Measurement, Outcome

PRIOR_SIGMA: Final = 0.02
"""Noise of a measurement before it was seen, as a share."""
PRIOR_WEIGHT: Final = 4.0
"""How many repeated values that belief is worth."""
LEAST_SIGMA: Final = 1e-3
"""Where repeats are identical."""


class Arms:
    """The outcomes of every assignment tried; `sigma` is the noise of one measurement as a share.

    `gap_s` is the mean of what the makespan is longer than both streams (launches, waits between them).
    """

    def __init__(self) -> None:
        self.runs: dict[Assignment, list[Measurement]] = {}
        self.sigma = PRIOR_SIGMA
        self.gap_s = 0.0
        self._failures: set[Assignment] = set()
        self._spreads: dict[Assignment, tuple[float, int]] = {}

    def add(self, assignment: Assignment, outcome: Outcome) -> None:
        """Takes an outcome; what failed once stays failed."""
        if isinstance(outcome, Failure):
            self._failures.add(assignment)
            self.runs.pop(assignment, None)
            self._spreads.pop(assignment, None)
        elif assignment not in self._failures:
            done = self.runs.setdefault(assignment, [])
            done.append(outcome)
            if len(done) > 1:
                self._spreads[assignment] = _spread(done)
        gaps = [run.makespan_s - max(run.total_comm_s, run.comp_s) for done in self.runs.values() for run in done]
        self.gap_s = max(0.0, sum(gaps) / len(gaps)) if gaps else 0.0
        self.sigma = self._noise()

    def knows(self, assignment: Assignment) -> bool:
        """Whether it was tried."""
        return assignment in self.runs or assignment in self._failures

    def failed(self, assignment: Assignment) -> bool:
        """Whether it cannot run."""
        return assignment in self._failures

    def num(self, assignment: Assignment) -> int:
        """How often it was measured."""
        return len(self.runs.get(assignment, ()))

    def mean_s(self, assignment: Assignment) -> float:
        """Its mean makespan; infinite if it never ran."""
        done = self.runs.get(assignment)
        return sum(run.makespan_s for run in done) / len(done) if done else inf

    def _noise(self) -> float:
        """From repeats of one arm and the prior; identical repeats mean that there is none."""
        squares = sum(spread[0] for spread in self._spreads.values())
        num = sum(spread[1] for spread in self._spreads.values())
        if num and squares == 0:
            return LEAST_SIGMA
        return max(LEAST_SIGMA, sqrt((squares + PRIOR_WEIGHT * PRIOR_SIGMA**2) / (num + PRIOR_WEIGHT)))


def _spread(done: Sequence[Measurement]) -> tuple[float, int]:
    """Sum of squared relative deviations of Y and every x_j over an arm's repeats, and the degrees of freedom."""
    values = np.array([(run.comp_s, *run.comm_s) for run in done])
    mean = values.mean(axis=0)
    away = values[:, mean > 0] / mean[mean > 0] - 1
    return float((away**2).sum()), away.shape[1] * (len(done) - 1)
