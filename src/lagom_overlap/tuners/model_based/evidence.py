"""The measurements, arm by arm, and their noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Final

import numpy as np

from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome

PRIOR_SIGMA: Final = 0.02
"""Prior noise of one measurement, as a share. Chosen, not measured."""
PRIOR_WEIGHT: Final = 4.0
"""How many repeated values that prior is worth."""
LATE: Final = 0.15
"""A time more than this share above the lower median of its arm counts as delayed by a late rank."""
LEAST_PAIRS: Final = 4
"""Pairs below which paired ratios are not used: too few for a standard error."""
PAIRS_WEIGHT: Final = 1.0
"""How many pairs the noise of single measurements is worth in the spread of pairs."""
LEAST_TIME_S: Final = 1e-9
"""Shorter times are taken as this: a logarithm needs a positive number."""
LEAST_SIGMA: Final = 1e-3
"""The noise if repeats are identical: keeps variances positive."""


@dataclass(frozen=True, slots=True)
class Lead:
    """The mean logarithm of paired ratios, its standard error, and the degrees of freedom of that."""

    mean: float
    error: float
    dof: float

    def is_beyond(self, confidence: float, tolerated: float) -> bool:
        """Whether the lead exceeds -tolerated by that many standard deviations.

        The quantile is Student's, to first order in 1 / dof (Fisher and Cornish, 1960).
        """
        quantile = confidence + (confidence**3 + confidence) / (4 * self.dof)
        return self.mean > 0 and self.mean + tolerated > quantile * self.error


class Arms:
    """The outcomes of every assignment tried; `sigma` is the noise of one measurement as a share.

    `gap_s` is the mean time by which the makespan exceeds the longer stream (launches, waits between the streams).
    """

    def __init__(self) -> None:
        self.runs: dict[Assignment, list[Measurement]] = {}
        self.sigma = PRIOR_SIGMA
        self.gap_s = 0.0
        self._failures: set[Assignment] = set()
        self._spreads: dict[Assignment, tuple[float, int]] = {}
        self._makespans_s: dict[Assignment, float] = {}
        self._observed: list[tuple[Assignment, float]] = []

    def add(self, assignment: Assignment, outcome: Outcome) -> None:
        """Takes an outcome; what failed once stays failed."""
        if isinstance(outcome, Failure):
            self._failures.add(assignment)
            self.runs.pop(assignment, None)
            self._spreads.pop(assignment, None)
            self._makespans_s.pop(assignment, None)
        elif assignment not in self._failures:
            repeats = self.runs.setdefault(assignment, [])
            repeats.append(outcome)
            if len(repeats) > 1:
                self._spreads[assignment] = _spread(repeats)
            self._observed.append((assignment, outcome.makespan_s))
            self._makespans_s[assignment] = usual([run.makespan_s for run in repeats])
        gaps = [run.makespan_s - max(run.total_comm_s, run.comp_s) for repeats in self.runs.values() for run in repeats]
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
        return len(self._observed)

    def lead(self, arm: Assignment, other: Assignment) -> Lead | None:
        """How much faster an arm is than another, pair by pair; None with fewer than `LEAST_PAIRS` pairs.

        A run of one and the next run of the other make a pair, each run in at most one pair: a phase in which the
        machine is slow then affects both.
        """
        logs, waiting = [], None
        for arm_told, makespan_s in self._observed:
            if arm_told not in (arm, other):
                continue
            if waiting is None or waiting[0] == arm_told:
                waiting = arm_told, makespan_s
            else:
                ratio = log(max(makespan_s, LEAST_TIME_S) / max(waiting[1], LEAST_TIME_S))
                logs.append(ratio if arm_told == other else -ratio)
                waiting = None
        if len(logs) < LEAST_PAIRS:
            return None
        dof = len(logs) - 1 + PAIRS_WEIGHT
        mean = sum(logs) / len(logs)
        squares = sum((value - mean) ** 2 for value in logs) + PAIRS_WEIGHT * 2 * self.sigma**2
        return Lead(mean, sqrt(squares / dof / len(logs)), dof)

    def _noise(self) -> float:
        """The noise from repeats of the same arm and the prior; identical repeats mean that there is none."""
        squares = sum(spread[0] for spread in self._spreads.values())
        num = sum(spread[1] for spread in self._spreads.values())
        if num and squares == 0:
            return LEAST_SIGMA
        return max(LEAST_SIGMA, sqrt((squares + PRIOR_WEIGHT * PRIOR_SIGMA**2) / (num + PRIOR_WEIGHT)))


def usual(times_s: Sequence[float]) -> float:
    """An arm's usual time: the mean of its repeats without those that are far longer than the others.

    A late rank makes a time longer, and nothing makes one shorter; so the lower median is typical, and times more than
    `LATE` above it are left out.
    """
    if len(times_s) == 1:
        return times_s[0]
    ordered = sorted(times_s)
    middle_s = ordered[(len(ordered) - 1) // 2]
    kept = [time_s for time_s in ordered if time_s <= (1 + LATE) * middle_s]
    return sum(kept) / len(kept)


def _spread(repeats: Sequence[Measurement]) -> tuple[float, int]:
    """Sum of squared relative deviations of Y and every x_j over an arm's repeats, and the degrees of freedom."""
    values = np.array([(run.comp_s, *run.comm_s) for run in repeats])
    mean = values.mean(axis=0)
    away = values[:, mean > 0] / mean[mean > 0] - 1
    return float((away**2).sum()), away.shape[1] * (len(repeats) - 1)
