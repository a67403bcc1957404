"""The guard: the default stays unless something was measured to be better. Ours, not the papers'."""

from collections.abc import Mapping
from math import inf

from lagom_overlap.backends.base import Assignment, Failure, Outcome
from lagom_overlap.tune.base import Problems, Trial, Tuner, check_outcomes, problems_by_name


class Guarded:
    """A tuner around a tuner that measures the default first and keeps it as incumbent.

    A group's recommendation is the inner tuner's only if that very assignment was measured and its makespan is below
    the default's; one that was never measured is measured once at the end. Where a search is stopped before that, the
    fastest assignment measured so far stands in for it. If the default itself cannot run, anything that did replaces
    it. An inner tuner that begins with the default is answered from the guard's own measurement, so guarding it costs
    nothing.
    """

    def __init__(self, tuner: Tuner, problems: Problems) -> None:
        self._tuner = tuner
        self._problems = problems_by_name(problems)
        self._defaults = {name: problem.default for name, problem in self._problems.items()}
        self._measured: dict[str, dict[Assignment, Outcome]] = {name: {} for name in self._problems}
        self._asked: Trial | None = None
        self._inner: Trial | None = None
        self._num_told = 0

    def ask(self) -> Trial | None:
        """The default first, then what the inner tuner asks, last what it recommends unmeasured."""
        if self._asked is None:
            self._asked = self._next()
        return self._asked

    def tell(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """Keeps the outcomes and hands the inner tuner its own.

        Raises:
            ValueError: if it is not the trial just asked for, or a group's outcome is missing or foreign.
        """
        if self._asked is None or trial != self._asked:
            raise ValueError(f"told trial {trial.number}, which is not the one just asked for")
        check_outcomes(self._problems, trial.assignments, outcomes)
        if self._inner is not None:
            self._tuner.tell(self._inner, outcomes)
        for name, outcome in outcomes.items():
            self._keep(name, trial.assignments[name], outcome)
        self._asked = self._inner = None
        self._num_told += 1
        if self._num_told == 1:
            self._answer_default()

    def recommend(self) -> Mapping[str, Assignment]:
        """The inner recommendation where it was measured better than the default, else the default."""
        return {name: self._better(name, wanted) for name, wanted in self._tuner.recommend().items()}

    def _next(self) -> Trial | None:
        if self._num_told == 0:
            reasons = dict.fromkeys(self._defaults, "the default, as the incumbent")
            return Trial(number=0, assignments=self._defaults, reasons=reasons)
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
        if not unmeasured:
            return None
        reasons = dict.fromkeys(unmeasured, "what the tuner recommends, never measured so far")
        return Trial(number=self._num_told, assignments=unmeasured, reasons=reasons)

    def _answer_default(self) -> None:
        first = self._tuner.ask()
        if first is not None and dict(first.assignments) == self._defaults:
            self._tuner.tell(first, {name: self._measured[name][self._defaults[name]] for name in self._defaults})

    def _keep(self, name: str, assignment: Assignment, outcome: Outcome) -> None:
        """The latest outcome counts, but a failure stays a failure."""
        if not isinstance(self._measured[name].get(assignment), Failure):
            self._measured[name][assignment] = outcome

    def _better(self, name: str, wanted: Assignment) -> Assignment:
        times = {assignment: _makespan_s(outcome) for assignment, outcome in self._measured[name].items()}
        default = self._defaults[name]
        candidate = wanted if wanted in times else min(times, key=times.__getitem__, default=default)
        return candidate if times.get(candidate, inf) < times.get(default, inf) else default


def _makespan_s(outcome: Outcome) -> float:
    return inf if isinstance(outcome, Failure) else outcome.makespan_s
