"""The bookkeeping of a tuner that has one trial under way at a time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from lagom_overlap.tuners.base import Problems, Trial, check_outcomes, problems_by_name
from lagom_overlap.tuners.problem import Assignment, Outcome


class OneTrial(ABC):
    """A `Tuner` whose subclasses choose the next trial, take outcomes, and recommend.

    `_num_told` numbers the trials.

    Raises:
        ValueError: if there is no group, or names repeat.
    """

    def __init__(self, problems: Problems) -> None:
        self._problems = problems_by_name(problems)
        self._num_told = 0
        self._asked: Trial | None = None

    def ask(self) -> Trial | None:
        """The next trial, the same one until it is told; None when the search is over."""
        if self._asked is None:
            self._asked = self._next()
        return self._asked

    def tell(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """Takes the outcomes of the trial just asked for, one per group in it.

        Raises:
            ValueError: if it is not the trial just asked for, or a group's outcome is missing or foreign.
        """
        if self._asked is None or trial != self._asked:
            raise ValueError(f"told trial {trial.number}, which is not the one just asked for")
        check_outcomes(self._problems, trial.assignments, outcomes)
        self._asked = None
        self._num_told += 1
        self._take(trial, outcomes)

    @abstractmethod
    def recommend(self) -> Mapping[str, Assignment]:
        """Each group's best assignment so far; the default where nothing was learned."""

    @abstractmethod
    def _next(self) -> Trial | None:
        """The next trial, numbered `_num_told`."""

    @abstractmethod
    def _take(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """Takes outcomes, already checked."""
