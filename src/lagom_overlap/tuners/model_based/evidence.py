"""What was measured, arm by arm, and how noisy it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Final

import numpy as np

from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome

PRIOR_SIGMA: Final = 0.02
"""Noise of a measurement before it was seen, as a share."""
PRIOR_WEIGHT: Final = 4.0
"""How many repeated values that posterior is worth."""
LATE: Final = 0.15
"""A time this far above the lower median of its arm is of a rank that was late."""
LEAST_PAIRS: Final = 4
PAIRS_WEIGHT: Final = 1.0
"""How many pairs the noise of single measurements is worth where the spread of pairs is asked for."""
LEAST_TIME_S: Final = 1e-9
LEAST_SIGMA: Final = 1e-3
"""Where repeats are identical."""


@dataclass(frozen=True, slots=True)
class Lead:
    """The mean logarithm of paired ratios, its standard error, and the degrees of freedom of that."""

    mean: float
    error: float
    dof: float

    def is_beyond(self, confidence: float, tolerated: float) -> bool:
        """Whether the lead is by that many standard deviations above -tolerated.

        The quantile is Student's, to first order in 1 / dof (Fisher and Cornish, 1960).
        """
        quantile = confidence + (confidence**3 + confidence) / (4 * self.dof)
        return self.mean > 0 and self.mean + tolerated > quantile * self.error


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
        self._makespans_s: dict[Assignment, float] = {}
        self._told: list[tuple[Assignment, float]] = []

    def add(self, assignment: Assignment, outcome: Outcome) -> None:
        """Takes an outcome; what failed once stays failed."""
        if isinstance(outcome, Failure):
            self._failures.add(assignment)
            self.runs.pop(assignment, None)
            self._spreads.pop(assignment, None)
            self._makespans_s.pop(assignment, None)
        elif assignment not in self._failures:
            done = self.runs.setdefault(assignment, [])
            done.append(outcome)
            if len(done) > 1:
                self._spreads[assignment] = _spread(done)
            self._told.append((assignment, outcome.makespan_s))
            self._makespans_s[assignment] = usual([run.makespan_s for run in done])
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
        """Its usual makespan; infinite if it never ran."""
        return self._makespans_s.get(assignment, inf)

    @property
    def num_runs(self) -> int:
        """Measurements of all arms."""
        return len(self._told)

    def lead(self, arm: Assignment, other: Assignment) -> Lead | None:
        """How much faster an arm is than another, pair by pair; None without `LEAST_PAIRS` pairs.

        A run of either and the next run of the other, in the order told, make a pair, each run in one pair at most:
        what is slow for a while is slow for both.
        """
        logs, waiting = [], None
        for told, makespan_s in self._told:
            if told not in (arm, other):
                continue
            if waiting is None or waiting[0] == told:
                waiting = told, makespan_s
            else:
                ratio = log(max(makespan_s, LEAST_TIME_S) / max(waiting[1], LEAST_TIME_S))
                logs.append(ratio if told == other else -ratio)
                waiting = None
        if len(logs) < LEAST_PAIRS:
            return None
        dof = len(logs) - 1 + PAIRS_WEIGHT
        mean = sum(logs) / len(logs)
        squares = sum((value - mean) ** 2 for value in logs) + PAIRS_WEIGHT * 2 * self.sigma**2
        return Lead(mean, sqrt(squares / dof / len(logs)), dof)

    def _noise(self) -> float:
        """From repeats of one arm and the prior; identical repeats mean that there is none."""
        squares = sum(spread[0] for spread in self._spreads.values())
        num = sum(spread[1] for spread in self._spreads.values())
        if num and squares == 0:
            return LEAST_SIGMA
        return max(LEAST_SIGMA, sqrt((squares + PRIOR_WEIGHT * PRIOR_SIGMA**2) / (num + PRIOR_WEIGHT)))


def usual(times_s: Sequence[float]) -> float:
    """What an arm usually takes: the mean of its repeats, but for those that are far later than the others.

    A rank that is late makes a time longer, nothing makes one shorter: the lower median says what is usual, and what is
    more than `LATE` above it is left out.
    """
    if len(times_s) == 1:
        return times_s[0]
    ordered = sorted(times_s)
    middle_s = ordered[(len(ordered) - 1) // 2]
    kept = [time_s for time_s in ordered if time_s <= (1 + LATE) * middle_s]
    return sum(kept) / len(kept)


def _spread(done: Sequence[Measurement]) -> tuple[float, int]:
    """Sum of squared relative deviations of Y and every x_j over an arm's repeats, and the degrees of freedom."""
    values = np.array([(run.comp_s, *run.comm_s) for run in done])
    mean = values.mean(axis=0)
    away = values[:, mean > 0] / mean[mean > 0] - 1
    return float((away**2).sum()), away.shape[1] * (len(done) - 1)
