"""What was measured, arm by arm: how noisy it is, and whether one arm is better than another beyond doubt."""

from collections.abc import Iterator
from math import inf, log, sqrt
from statistics import fmean
from typing import Final

from lagom_overlap.backends.base import Assignment, Failure, Measurement, Outcome

PRIOR_SIGMA: Final = 0.02
"""Noise of a single run before it was seen, as a share."""
PRIOR_WEIGHT: Final = 4.0
"""How many repeated values that belief is worth."""
LEAST_SIGMA: Final = 1e-3
TOLERATED: Final = 0.005
"""A share by which an adopted arm may be slower without harm."""


class Arms:
    """The outcomes of every assignment tried."""

    def __init__(self, default: Assignment) -> None:
        self._default = default
        self.runs: dict[Assignment, list[Measurement]] = {}
        self._failures: set[Assignment] = set()
        self.sigma = PRIOR_SIGMA
        self.gap_s = 0.0

    def add(self, assignment: Assignment, outcome: Outcome) -> None:
        """Takes an outcome; a failure stays one."""
        if isinstance(outcome, Failure):
            self._failures.add(assignment)
            self.runs.pop(assignment, None)
        elif assignment not in self._failures:
            self.runs.setdefault(assignment, []).append(outcome)
        self.sigma = self._sigma()
        gaps = [run.makespan_s - max(run.total_comm_s, run.comp_s) for done in self.runs.values() for run in done]
        self.gap_s = max(0.0, fmean(gaps)) if gaps else 0.0

    def knows(self, assignment: Assignment) -> bool:
        """Whether it was tried."""
        return assignment in self.runs or assignment in self._failures

    def failed(self, assignment: Assignment) -> bool:
        """Whether it cannot run."""
        return assignment in self._failures

    def ran(self, assignment: Assignment) -> bool:
        """Whether it was measured."""
        return assignment in self.runs

    def num(self, assignment: Assignment) -> int:
        """How often it was measured."""
        return len(self.runs.get(assignment, ()))

    def mean_s(self, assignment: Assignment) -> float:
        """Its mean makespan; infinite if it never ran."""
        done = self.runs.get(assignment)
        return fmean(run.makespan_s for run in done) if done else inf

    def is_better(self, arm: Assignment, than: Assignment, confidence: float) -> bool:
        """Whether `arm` is no more than tolerably slower, beyond doubt, and faster on average."""
        mine, other = self.mean_s(arm), self.mean_s(than)
        if not mine < other:
            return False
        if mine <= 0:
            return True
        doubt = self.sigma * sqrt(1 / self.num(arm) + 1 / self.num(than))
        return log(other / mine) + log(1 + TOLERATED) > confidence * doubt

    def _sigma(self) -> float:
        """From repeats of one arm, else the belief; identical repeats mean that there is no noise."""
        squares, num = 0.0, 0
        for values in self._repeated():
            mean = fmean(values)
            if mean > 0:
                squares += sum((value / mean - 1) ** 2 for value in values)
                num += len(values) - 1
        if num and squares == 0:
            return LEAST_SIGMA
        mixed = sqrt((squares + PRIOR_WEIGHT * PRIOR_SIGMA**2) / (num + PRIOR_WEIGHT))
        return max(LEAST_SIGMA, mixed)

    def _repeated(self) -> Iterator[list[float]]:
        for done in self.runs.values():
            if len(done) > 1:
                yield [run.comp_s for run in done]
                yield from ([run.comm_s[j] for run in done] for j in range(len(done[0].comm_s)))
