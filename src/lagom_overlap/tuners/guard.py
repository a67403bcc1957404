"""The guard: the default stays unless something was measured to be better. Ours, not the papers'.

One sample of each is no evidence on a noisy machine, so after the search default and candidate race: both are measured
again, in the order d c, c d, d c, which cancels drift. The candidate wins if the upper quartile of its makespan over
the default's, pair by pair and with the search's own pair, is below 1: it must win three of four pairs. The guard would
rather lose a small gain than a better default. It adopts nothing; the verdict's sequential test (sequential.py) does.
"""

from collections.abc import Mapping
from math import inf
from statistics import quantiles
from typing import Final, cast

from lagom_overlap.errors import JobError
from lagom_overlap.registry import checked_options
from lagom_overlap.tuners.base import Problems, Trial, Tuner
from lagom_overlap.tuners.one_trial import OneTrial
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome
from lagom_overlap.tuners.registry import tuner_factory
from lagom_overlap.tuners.warm_start import WarmStart

CLEAR_RATIO: Final = 1.5
"""If the times differ by more than this factor in either direction, one sample of each decides.

Under log-normal noise of sigma 0.05 the ratio of two samples has sigma 0.07, and 1.5 is 5.7 sigma away. With noise of
0.2 it is 1.4 sigma away: in 2 of 13 cases one of two equal assignments looks clearly better and stays unconfirmed.
"""


class Guarded(OneTrial):
    """A tuner around a tuner that measures the default first and keeps it as incumbent.

    A group's recommendation is the inner tuner's only if that very assignment was measured and beats the default; one
    that was never measured is measured once at the end. Where that comparison is not clear, a race of at most
    `num_confirmations` pairs follows, all such groups at once; it ends early for a group whose times repeat exactly
    (no noise), whose samples lie clearly apart, or whose candidate can no longer win. Where a search is stopped before
    that, the fastest assignment measured so far stands in for an unmeasured one, and the pairs measured so far decide.
    If the default itself cannot run, anything that did replaces it. An inner tuner that begins with the default is
    answered from the guard's own measurement; if it stands by the default in the end, guarding it costs nothing.

    Raises:
        ValueError: if there is no group, names repeat, or `num_confirmations` is negative.
    """

    def __init__(self, tuner: Tuner, problems: Problems, *, num_confirmations: int = 3) -> None:
        if num_confirmations < 0:
            raise ValueError(f"num_confirmations is {num_confirmations}, must not be negative")
        self._tuner = tuner
        super().__init__(problems)
        self._num_confirmations = num_confirmations
        self._defaults = {name: problem.default for name, problem in self._problems.items()}
        self._measured: dict[str, dict[Assignment, Outcome]] = {name: {} for name in self._problems}
        self._is_exact: dict[str, bool] = {}
        self._races: dict[str, _Race] | None = None
        self._inner: Trial | None = None

    def _take(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """Keeps the outcomes and hands the inner tuner its own."""
        if self._inner is not None:
            self._tuner.tell(self._inner, outcomes)
        for name, outcome in outcomes.items():
            self._keep(name, trial.assignments[name], outcome)
            if self._races is not None:
                self._races[name].add(_makespan_s(outcome))
        self._inner = None
        if self._num_told == 1:
            self._answer_default()

    def recommend(self) -> Mapping[str, Assignment]:
        """The inner tuner's recommendation if it was measured faster than the default, else the default."""
        return {name: self._better(name, wanted) for name, wanted in self._tuner.recommend().items()}

    def _next(self) -> Trial | None:
        """The default first, then what the inner tuner asks, what it recommends unmeasured, and the races."""
        if self._num_told == 0:
            return self._trial(self._defaults, "the default")
        if self._races is not None:
            return self._next_of_races(self._races)
        self._inner = self._tuner.ask()
        if self._inner is not None:
            return Trial(
                number=self._num_told,
                assignments=self._inner.assignments,
                reasons=self._inner.reasons,
                priorities=self._inner.priorities,
            )
        wanted = self._tuner.recommend()
        unmeasured = {name: wanted[name] for name in wanted if wanted[name] not in self._measured[name]}
        if unmeasured:
            return self._trial(unmeasured, "the tuner's recommendation, not measured yet")
        self._races = {name: self._race(name, candidate) for name, candidate in wanted.items()}
        return self._next_of_races(self._races)

    def _trial(self, assignments: Mapping[str, Assignment], reason: str) -> Trial:
        return Trial(number=self._num_told, assignments=assignments, reasons=dict.fromkeys(assignments, reason))

    def _next_of_races(self, races: Mapping[str, "_Race"]) -> Trial | None:
        going = {name: race for name, race in races.items() if not (race.is_over or self._is_exact.get(name, False))}
        if not going:
            return None
        wanted, defaults = self._tuner.recommend(), self._defaults
        assignments = {name: (defaults if race.wants_default else wanted)[name] for name, race in going.items()}
        return self._trial(assignments, "repeating default and recommendation: one sample of each is no evidence")

    def _race(self, name: str, candidate: Assignment) -> "_Race":
        differs = candidate != self._defaults[name]
        times = (_makespan_s(self._measured[name][one]) for one in (self._defaults[name], candidate))
        return _Race(*times, num_pairs=self._num_confirmations if differs else 0)

    def _answer_default(self) -> None:
        first = self._tuner.ask()
        if first is not None and dict(first.assignments) == self._defaults:
            self._tuner.tell(first, {name: self._measured[name][self._defaults[name]] for name in self._defaults})

    def _keep(self, name: str, assignment: Assignment, outcome: Outcome) -> None:
        """The latest outcome counts, but a failure stays a failure; a group is exact while all repeats are equal."""
        before = self._measured[name].get(assignment)
        if isinstance(before, Measurement):
            self._is_exact[name] = self._is_exact.get(name, True) and _times(before) == _times(outcome)
        if not isinstance(before, Failure):
            self._measured[name][assignment] = outcome

    def _better(self, name: str, wanted: Assignment) -> Assignment:
        measured, default = self._measured[name], self._defaults[name]
        if self._races is not None:
            return wanted if self._races[name].is_won else default

        def time_s(assignment: Assignment) -> float:
            return _makespan_s(measured[assignment]) if assignment in measured else inf

        candidate = wanted if wanted in measured else min(measured, key=time_s, default=default)
        return candidate if time_s(candidate) < time_s(default) else default


class _Race:
    """Default against candidate in one group, by makespans in seconds; inf is a failure, and ends it."""

    def __init__(self, default_s: float, candidate_s: float, *, num_pairs: int) -> None:
        self._default_s, self._candidate_s = [default_s], [candidate_s]
        is_close = max(default_s, candidate_s) < CLEAR_RATIO * min(default_s, candidate_s)
        self._num_pairs = 1 + (num_pairs if is_close else 0)

    def add(self, makespan_s: float) -> None:
        """Adds the makespan of the arm that was due."""
        (self._default_s if self.wants_default else self._candidate_s).append(makespan_s)

    @property
    def wants_default(self) -> bool:
        """Whether the default is due; after a complete pair, the arm that came last begins."""
        num_default, num_candidate = len(self._default_s), len(self._candidate_s)
        return num_default % 2 == 1 if num_default == num_candidate else num_default < num_candidate

    @property
    def is_won(self) -> bool:
        """Whether the candidate wins by the complete pairs so far, and never failed."""
        if inf in self._default_s + self._candidate_s:
            return inf not in self._candidate_s
        return _is_faster(self._ratios())

    @property
    def is_over(self) -> bool:
        """Whether all pairs are done, an arm failed, or the remaining pairs cannot change the result."""
        if inf in self._default_s + self._candidate_s:
            return True
        num_told, num_left = len(self._default_s), self._num_pairs - len(self._default_s)
        if num_told != len(self._candidate_s):
            return False
        is_lost = not _is_faster([*self._ratios(), *[0.0] * num_left])
        return num_left == 0 or is_lost or (num_told > 1 and _are_apart(self._default_s, self._candidate_s))

    def _ratios(self) -> list[float]:
        """Candidate over default; nothing beats a default that takes no time."""
        return [two / one if one else inf for one, two in zip(self._default_s, self._candidate_s, strict=False)]


def _is_faster(ratios: list[float]) -> bool:
    return (quantiles(ratios, n=4, method="inclusive")[-1] if len(ratios) > 1 else ratios[0]) < 1


def _are_apart(one: list[float], two: list[float]) -> bool:
    """Whether the gap between the samples is at least as wide as either of them is spread."""
    gap = max(min(one) - max(two), min(two) - max(one))
    return gap >= max(max(one) - min(one), max(two) - min(two))


def _times(outcome: Outcome) -> tuple[float, ...]:
    return () if isinstance(outcome, Failure) else (outcome.makespan_s, outcome.comp_s, *outcome.comm_s)


def _makespan_s(outcome: Outcome) -> float:
    return inf if isinstance(outcome, Failure) else outcome.makespan_s


def make_tuner(
    name: str,
    problems: Problems,
    *,
    seed: int,
    options: Mapping[str, object],
    guarded: bool,
    warm: WarmStart | None = None,
) -> Tuner:
    """The tuner of that name over these problems, inside the guard if `guarded`, begun by `warm` if given.

    Raises:
        UnknownNameError: if there is none.
        JobError: if it has no such option, or the option's value is of another type or not allowed.
    """
    factory = tuner_factory(name)
    checked = checked_options(factory, name, options)
    try:
        begin = {} if warm is None else {"warm": warm}
        tuner = cast("Tuner", factory(problems, seed=seed, **checked, **begin))
    except ValueError as error:
        raise JobError(f"tune.options of tuner {name!r}: {error}") from None
    return Guarded(tuner, problems) if guarded else tuner
