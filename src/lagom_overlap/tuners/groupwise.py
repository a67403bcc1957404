"""From a search over one group to a tuner over all groups of an iteration.

A search is a generator: it yields a `Probe`, is sent the outcome, and returns the assignment that it recommends. Every
trial advances all unfinished groups, because one training step runs them all.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from lagom_overlap.tuners.base import Problems, Trial
from lagom_overlap.tuners.one_trial import OneTrial
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An assignment of one group to measure, the reason, and the best assignment so far.

    `incumbent` None: unchanged. `priorities` holds the metric H by collective name, finite values only.
    """

    assignment: Assignment
    reason: str
    incumbent: Assignment | None = None
    priorities: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


Search = Generator[Probe, Outcome, Assignment]
"""A search over one group."""


def group_random(seed: int, problem: GroupProblem) -> Random:
    """The group's own random stream, so that groups do not depend on each other's progress."""
    return Random(f"{seed}/{problem.group.name}")


class _Run:
    """One group's search: the probe that waits for its outcome, and the incumbent, which is never one that failed."""

    def __init__(self, problem: GroupProblem, search: Search) -> None:
        self._default = problem.default
        self._search = search
        self._failed: set[Assignment] = set()
        self.incumbent = problem.default
        self.probe: Probe | None = None
        try:
            self._take(next(search))
        except StopIteration as end:
            self._settle(end.value)

    def tell(self, outcome: Outcome) -> None:
        assert self.probe is not None, "told a finished search"
        if isinstance(outcome, Failure):
            self._failed.add(self.probe.assignment)
        try:
            self._take(self._search.send(outcome))
        except StopIteration as end:
            self.probe = None
            self._settle(end.value)

    def _take(self, probe: Probe) -> None:
        assert len(probe.assignment) == len(self._default), "a probe of another group"
        self.probe = probe
        self._settle(self.incumbent if probe.incumbent is None else probe.incumbent)

    def _settle(self, wanted: Assignment) -> None:
        if wanted not in self._failed:
            self.incumbent = wanted
        elif self.incumbent in self._failed:
            self.incumbent = self._default


class GroupRun(Protocol):
    """One group's part of a search: its next probe (None at the end) and its best assignment so far."""

    probe: Probe | None
    incumbent: Assignment

    def tell(self, outcome: Outcome) -> None:
        """Takes the outcome of the probe just asked for."""


Run = TypeVar("Run", bound=GroupRun)


class SideBySide(OneTrial, Generic[Run]):
    """A `Tuner` that advances the searches of all groups side by side; `begin` makes a group's."""

    def __init__(self, problems: Problems, begin: Callable[[GroupProblem], Run]) -> None:
        super().__init__(problems)
        self._runs = {name: begin(problem) for name, problem in self._problems.items()}

    def recommend(self) -> Mapping[str, Assignment]:
        """Each group's best assignment so far; the default where nothing was learned."""
        return {name: run.incumbent for name, run in self._runs.items()}

    def _next(self) -> Trial | None:
        """The next probe of every group that is not finished; None when all are."""
        probes = {name: run.probe for name, run in self._runs.items() if run.probe is not None}
        if not probes:
            return None
        return Trial(
            number=self._num_told,
            assignments={name: probe.assignment for name, probe in probes.items()},
            reasons={name: probe.reason for name, probe in probes.items()},
            priorities={name: dict(probe.priorities) for name, probe in probes.items() if probe.priorities},
        )

    def _take(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        for name in trial.assignments:
            self._runs[name].tell(outcomes[name])


class GroupwiseTuner(SideBySide[_Run]):
    """A `Tuner` that runs one generator per group in parallel; subclasses provide the search.

    A search runs up to its first probe when the tuner is built, so a bad option is refused there.
    """

    def __init__(self, problems: Problems, search: Callable[[GroupProblem], Search]) -> None:
        super().__init__(problems, lambda problem: _Run(problem, search(problem)))
