"""The tuner over all groups: every trial advances all groups that are not finished."""

from collections.abc import Mapping

from lagom_overlap.backends.base import Assignment, Outcome
from lagom_overlap.tune.base import Problems, Trial, check_outcomes, problems_by_name
from lagom_overlap.tune.just_enough.pool import Pool
from lagom_overlap.tune.just_enough.search import GroupSearch, Patience


class JustEnough:
    """A `Tuner`."""

    def __init__(self, problems: Problems, *, seed: int = 0, **kw) -> None:
        self._problems = problems_by_name(problems)
        patience = Patience(**kw)
        pool = Pool()
        self._searches = {name: GroupSearch(problem, patience, seed, pool) for name, problem in self._problems.items()}
        self._asked: Trial | None = None
        self._num_told = 0

    def ask(self) -> Trial | None:
        """The next probe of every group that is not finished; None when all are."""
        if self._asked is None:
            probes = {name: search.probe for name, search in self._searches.items() if search.probe is not None}
            if probes:
                self._asked = Trial(
                    number=self._num_told,
                    assignments={name: probe.assignment for name, probe in probes.items()},
                    reasons={name: probe.reason for name, probe in probes.items()},
                )
        return self._asked

    def tell(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """Takes the outcomes, then plans each group's next probe."""
        if self._asked is None or trial != self._asked:
            raise ValueError(f"told trial {trial.number}, which is not the one just asked for")
        check_outcomes(self._problems, trial.assignments, outcomes)
        self._asked = None
        self._num_told += 1
        for name in trial.assignments:
            self._searches[name].tell(outcomes[name])
        for name in trial.assignments:
            self._searches[name].plan()

    def recommend(self) -> Mapping[str, Assignment]:
        """What each group's search stands by now; the default where it knows nothing."""
        return {name: search.stand for name, search in self._searches.items()}
