"""Several tuners on one job, one search after the other, so that the verdict can compare what each ends with."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from lagom_overlap.tuners.base import Problems, Trial, Tuner
from lagom_overlap.tuners.one_trial import OneTrial
from lagom_overlap.tuners.problem import Assignment, Outcome


class InTurns(OneTrial):
    """A `Tuner` that is the first of `tuners`, then the others, each by its name; it recommends what the first does.

    A search ends after `max_measurements`, so that a long one leaves some to those behind it.

    Raises:
        ValueError: if there are fewer than two tuners, or `max_measurements` is below 1.
    """

    def __init__(self, problems: Problems, tuners: Mapping[str, Tuner], max_measurements: int) -> None:
        super().__init__(problems)
        if len(tuners) < 2 or max_measurements < 1:
            raise ValueError(f"needs two tuners and a measurement for each, got {list(tuners)} and {max_measurements}")
        self._tuners = dict(tuners)
        self._most = max_measurements
        self._waiting = list(tuners)
        self._inner: Trial | None = None
        self._counts: Counter[str] = Counter()

    @property
    def names(self) -> tuple[str, ...]:
        """The tuners, in order."""
        return tuple(self._tuners)

    @property
    def searching(self) -> str | None:
        """Whose search is under way; None once all are over."""
        return self._waiting[0] if self._waiting else None

    @property
    def num_measurements(self) -> Mapping[str, int]:
        """Told trials by tuner."""
        return self._counts

    def recommend(self) -> Mapping[str, Assignment]:
        """The first tuner's recommendation."""
        return self._tuners[self.names[0]].recommend()

    def results(self) -> dict[str, Mapping[str, Assignment]]:
        """What each tuner recommends; the default where it has not begun."""
        return {name: tuner.recommend() for name, tuner in self._tuners.items()}

    def _next(self) -> Trial | None:
        while self._waiting:
            name = self._waiting[0]
            trial = self._tuners[name].ask() if self._counts[name] < self._most else None
            if trial is not None:
                self._inner = trial
                reasons = {group: f"{name}: {reason}" for group, reason in trial.reasons.items()}
                return replace(trial, number=self._num_told, reasons=reasons)
            self._waiting.pop(0)
        return None

    def _take(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        assert self._inner is not None, "told before asked"
        name = self._waiting[0]
        self._counts[name] += 1
        self._tuners[name].tell(self._inner, outcomes)
