"""The effort of a group's search, and the detection of a job that has changed.

A batch of another shape makes all earlier measurements wrong. A computation time far from what the same assignment took
before, or from a trusted surrogate, raises a suspicion: the default is measured at once. If its time has changed in the
same direction, the job has changed, and everything before the suspicion is forgotten. If not, only that measurement was
off (a late rank), and it is forgotten instead. Communication times do not count: a neighbour's traffic comes and goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Final

from lagom_overlap.errors import SpaceError, UnknownNameError
from lagom_overlap.tuners.model_based.evidence import Arms
from lagom_overlap.tuners.model_based.search_space import LEAST_S
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome

CHANGED: Final = 0.2
"""The logarithm of a computation time over the expected one that is suspicious, on top of the noise. Chosen."""
NUM_SIGMAS: Final = 3.0
"""Standard deviations of noise that are added to it."""


class Drift:
    """All outcomes in order, and the arms that they make up; `is_suspicious` until the default is measured again."""

    def __init__(self, default: Assignment) -> None:
        self._default = default
        self._observed: list[tuple[Assignment, Outcome]] = []
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
        return len(self._observed)

    def see(self, assignment: Assignment, outcome: Outcome, expected_comp_s: float | None) -> bool:
        """Takes an outcome; `expected_comp_s` is a trusted surrogate's. True if everything before was forgotten."""
        before = self.arms.runs.get(assignment, ())
        expected_s = _comp_s(before) if before else expected_comp_s
        if self._suspect is None:  # the noise as it was before any suspicion
            self._tolerance = CHANGED + NUM_SIGMAS * self.arms.sigma
        change = self._change(outcome, expected_s)
        self._observed.append((assignment, outcome))
        if self._suspect is not None and assignment == self._default:
            return self._judge(self._suspect, outcome)
        self.arms.add(assignment, outcome)
        if change and self._suspect is None and self.arms.num(self._default):
            self._suspect, self._is_longer = len(self._observed) - 1, change > 0
        return False

    def _judge(self, suspect: int, outcome: Outcome) -> bool:
        before = [run for arm, run in self._observed[:suspect] if arm == self._default and not isinstance(run, Failure)]
        change = self._change(outcome, _comp_s(before) if before else None)
        has_changed = change != 0 and (change > 0) == self._is_longer
        without = self._observed[:suspect] + self._observed[suspect + 1 :]
        self._observed = self._observed[suspect:] if has_changed else without
        self._suspect = None
        self.arms = Arms()
        for arm, observed in self._observed:
            self.arms.add(arm, observed)
        return has_changed

    def _change(self, outcome: Outcome, expected_s: float | None) -> float:
        """The logarithm of the change of the computation time; 0 if none was expected or it may be noise."""
        if isinstance(outcome, Failure) or expected_s is None:
            return 0.0
        change = log(max(outcome.comp_s, LEAST_S) / max(expected_s, LEAST_S))
        return change if abs(change) > self._tolerance else 0.0


def _comp_s(runs: Sequence[Measurement]) -> float:
    return sum(run.comp_s for run in runs) / len(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """When a group's search ends.

    Up to `max_explore` measurements, `num_draws` surrogates drawn from the posterior look for something better before
    the race begins; the race ends when the expected loss against the closest rival is below `tolerated_loss` (a share),
    an arm was measured `max_repeats` times, or after `max_measurements`.
    """

    num_draws: int
    max_explore: int
    tolerated_loss: float
    max_repeats: int
    max_measurements: int

    def under(self, sigma: float) -> "Effort":
        """The effort at this noise of one measurement: on a noisy machine the search explores and races longer.

        Everything but the number of draws grows with the noise over `USUAL_NOISE`, at most `MOST_EFFORT` times.
        """
        times = times_usual(sigma)
        return replace(
            self,
            max_explore=round(times * self.max_explore),
            tolerated_loss=times * self.tolerated_loss,
            max_repeats=round(times * self.max_repeats),
            max_measurements=round(times * self.max_measurements),
        )


USUAL_NOISE: Final = 0.03
"""Noise of one measurement, as a share, up to which efforts are not scaled. Chosen, not measured."""
MOST_EFFORT: Final = 2.0
"""Bounds the cost of a search on a very noisy machine."""
EFFORTS: Final = {
    "quick": Effort(num_draws=1, max_explore=5, tolerated_loss=0.02, max_repeats=3, max_measurements=12),
    "normal": Effort(num_draws=4, max_explore=8, tolerated_loss=0.004, max_repeats=5, max_measurements=24),
    "thorough": Effort(num_draws=12, max_explore=20, tolerated_loss=0.001, max_repeats=15, max_measurements=60),
}
"""By name; figures in the tables are of "normal" unless they say otherwise."""


def times_usual(sigma: float) -> float:
    """The noise over the usual, between 1 and `MOST_EFFORT`."""
    return min(max(sigma / USUAL_NOISE, 1.0), MOST_EFFORT)


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
