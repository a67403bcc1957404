"""What was measured, arm by arm, and how noisy it is."""

from collections.abc import Iterator
from math import inf, sqrt
from statistics import fmean
from typing import Final

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

    def add(self, assignment: Assignment, outcome: Outcome) -> None:
        """Takes an outcome; what failed once stays failed."""
        if isinstance(outcome, Failure):
            self._failures.add(assignment)
            self.runs.pop(assignment, None)
        elif assignment not in self._failures:
            self.runs.setdefault(assignment, []).append(outcome)
        gaps = [run.makespan_s - max(run.total_comm_s, run.comp_s) for done in self.runs.values() for run in done]
        self.gap_s = max(0.0, fmean(gaps)) if gaps else 0.0
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
        return fmean(run.makespan_s for run in done) if done else inf

    def _noise(self) -> float:
        """From repeats of one arm and the prior; identical repeats mean that there is none."""
        squares, num = 0.0, 0
        for values in self._repeated():
            mean = fmean(values)
            if mean > 0:
                squares += sum((value / mean - 1) ** 2 for value in values)
                num += len(values) - 1
        if num and squares == 0:
            return LEAST_SIGMA
        return max(LEAST_SIGMA, sqrt((squares + PRIOR_WEIGHT * PRIOR_SIGMA**2) / (num + PRIOR_WEIGHT)))

    def _repeated(self) -> Iterator[list[float]]:
        for done in self.runs.values():
            if len(done) > 1:
                yield [run.comp_s for run in done]
                yield from ([run.comm_s[j] for run in done] for j in range(len(done[0].comm_s)))
