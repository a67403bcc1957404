"""Tunes both sides of the contention: the SM carve-out follows the channels, around any search over the collectives.

Ours, not a paper's. A persistent kernel that counts on every SM pays for one SM that a collective holds: a whole second
pass where its tiles are dealt beforehand, a round or two with cuBLAS on an H100 (`cost.persistent`, measured); with
as many SMs carved out it loses just their share. Searching both
sides as a product multiplies the measurements; but the best pairs lie near one line, where the carve-out is the
smallest allowed one that holds the channels. On that line a persistent kernel behaves like a plain one,
lambda / (lambda - NC), which is what searches over collectives expect. So

    1. default  measured first; inside `Guarded` that is the guard's own measurement
    2. search   the inner tuner searches the collectives, every assignment launched with its matching carve-out
    3. worth    its result with and without the carve-out: one that gains less than `LEAST_GAIN` is dropped
    4. again    only where that result is faster without, or the default is faster than either (the collectives cover
                little of the computation, or the allowed carve-outs are too coarse), the inner tuner searches once more
                with the computation untouched
    5. order    each allowed launch order and stream priority, against the result so far

In steps 3 and 5 what sets more has to prove itself: one measurement, and only if it promises a gain up to
`MOST_REPEATS` until the gain is beyond `CONFIDENCE` standard errors. A group with nothing to try on the computation's
side is the inner tuner's alone. Groups that share one setting (scope "step") take the largest carve-out that any of
them needs, and are compared by the sum of their makespans.

It is no guard: put `Guarded` around it (`lagom tune` does).

Limits: pairs off the line are not looked for, but for no carve-out at all. Channels that an engine does not tell
(an untouched default on real NCCL) have no matching carve-out. The collectives of one stream are taken to run one after
the other, those of several at the same time.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, log, sqrt
from statistics import fmean
from types import MappingProxyType
from typing import ClassVar, Final, cast

from lagom_overlap.collective import (
    UNTOUCHED_LAUNCH,
    LaunchConfig,
    LaunchOrder,
    LaunchScope,
    StreamPriority,
    Transport,
    launch_of,
    launched,
)
from lagom_overlap.tuners.base import Problems, Trial, Tuner
from lagom_overlap.tuners.one_trial import OneTrial
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Outcome
from lagom_overlap.tuners.registry import OURS, tuner_factory

LEAST_GAIN: Final = 0.01
"""A setting of the computation's side that gains less is dropped. Chosen, not measured."""
CONFIDENCE: Final = 1.8
"""Standard errors by which a setting must be faster to be kept: one-sided 96% under normal noise."""
MOST_REPEATS: Final = 4
"""Measurements of one arm in a comparison at most. Bounds its cost; chosen, not measured."""
LEAST_S: Final = 1e-12
"""Shorter times are taken as this: a logarithm needs a positive number."""
PRIOR_SIGMA: Final = 0.02
"""Noise of one measurement, as a share, assumed until something was measured twice. Chosen, not measured."""

Assignments = Mapping[str, Assignment]
"""By group name."""
Dress = Callable[[Assignments], dict[str, Assignment]]
"""Gives assignments of the collectives their launches."""


def channels_needed(problem: GroupProblem, assignment: Assignment) -> int | None:
    """SMs that the collectives of a group hold at once; None where a configuration does not say."""
    by_stream: dict[str, int] = {}
    for op, config in zip(problem.group.comms, assignment, strict=True):
        channels = 0 if config.transport is Transport.COPY_ENGINE else config.num_channels
        if channels is None:
            return None
        by_stream[op.stream] = max(by_stream.get(op.stream, 0), channels)
    return sum(by_stream.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What is to be measured next, and why, by group."""

    assignments: Assignments
    reasons: Mapping[str, str]
    priorities: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))


_Asking = Generator[_Wish, Mapping[str, Outcome], None]
"""A part of the search: yields what it wants measured, is sent the outcomes."""
_Asked = Generator[tuple[Assignments, str], None, None]
"""The search of one unit: yields what it wants measured, and why."""


class AroundInner(OneTrial):
    """The search of both sides around `make_inner(problems)`, which searches the collectives.

    Raises:
        ValueError: if there is no group, names repeat, or groups that share a setting have different values to try.
    """

    searches_launches: ClassVar[bool] = True

    def __init__(self, problems: Problems, make_inner: Callable[[Problems], Tuner]) -> None:
        super().__init__(problems)
        self._make_inner = make_inner
        self._units = _units(problems)
        self._unit_of = {name: unit for unit in self._units for name in unit}
        self._incumbent: dict[str, Assignment] = {name: problem.default for name, problem in self._problems.items()}
        self._latest = dict(self._incumbent)
        self._times: dict[tuple[str, Assignment], list[float]] = {}
        self._search = self._both_sides()
        self._wish = next(self._search, None)

    def _next(self) -> Trial | None:
        """The inner tuner's trials with their launches, then those of the computation's side."""
        wish = self._wish
        if wish is None:
            return None
        return Trial(
            number=self._num_told,
            assignments=dict(wish.assignments),
            reasons=wish.reasons,
            priorities=wish.priorities,
        )

    def _take(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        for name, outcome in outcomes.items():
            makespan_s = inf if isinstance(outcome, Failure) else outcome.makespan_s
            self._times.setdefault((name, trial.assignments[name]), []).append(makespan_s)
        try:
            self._wish = self._search.send(outcomes)
        except StopIteration:
            self._wish = None

    def recommend(self) -> Mapping[str, Assignment]:
        """What each group stands by; nothing that sets the computation's side unless it ran."""
        return {
            name: incumbent
            if launch_of(incumbent).is_untouched or self._ran(name, incumbent)
            else self._problems[name].default
            for name, incumbent in self._incumbent.items()
        }

    def _ran(self, name: str, assignment: Assignment) -> bool:
        times = self._times.get((name, assignment))
        return times is not None and inf not in times

    def _both_sides(self) -> _Asking:
        everyone = tuple(self._problems)
        if self._units:
            why = "the default"
            yield _Wish(assignments=self._defaults(everyone), reasons=dict.fromkeys(everyone, why))
        yield from self._inner(everyone, self._matched)
        worse: list[str] = []
        yield from self._side_by_side({unit: self._worth(unit, worse) for unit in self._units})
        if worse:
            before = dict(self._incumbent)
            yield from self._inner(tuple(worse), _plain)
            units = [unit for unit in self._units if unit[0] in worse]
            yield from self._side_by_side({unit: self._settle(unit, before) for unit in units})
        yield from self._side_by_side({unit: self._reorder(unit) for unit in self._units})

    def _inner(self, names: tuple[str, ...], dress: Dress) -> _Asking:
        """Runs the inner tuner over some groups; its recommendation becomes their incumbent."""
        tuner = self._make_inner(tuple(self._problems[name] for name in names))
        while (trial := tuner.ask()) is not None:
            self._latest |= trial.assignments
            outcomes = yield _Wish(
                assignments=dress(trial.assignments), reasons=trial.reasons, priorities=trial.priorities
            )
            tuner.tell(trial, outcomes)
            self._take_stand(tuner, dress)
        self._take_stand(tuner, dress)

    def _take_stand(self, tuner: Tuner, dress: Dress) -> None:
        recommended = tuner.recommend()
        self._latest |= recommended
        self._incumbent |= dress(recommended)

    def _matched(self, assignments: Assignments) -> dict[str, Assignment]:
        """Every assignment with the smallest allowed carve-out that holds its unit's channels."""
        return {name: launched(assignment, self._matching(name)) for name, assignment in assignments.items()}

    def _matching(self, name: str) -> LaunchConfig:
        unit = self._unit_of.get(name, ())
        needed = [channels_needed(self._problems[other], self._latest[other]) for other in unit]
        stated = [channels for channels in needed if channels is not None]
        if not stated or len(stated) < len(needed):
            return UNTOUCHED_LAUNCH
        return LaunchConfig(sm_carveout=self._problems[name].launches.carveout_for(max(stated)))

    # Pairs of settings of one unit. -----------------------------------------------------------------------------------

    def _worth(self, unit: tuple[str, ...], worse: list[str]) -> _Asked:
        """Drops a carve-out that gains nothing; groups that may do better without one are added to `worse`."""
        carved = {name: self._incumbent[name] for name in unit}
        plain = _plain(carved)
        if carved == plain:
            return
        why = "the same channels with and without a carve-out"
        if not (yield from self._proves_itself(plain, carved, why)):
            self._incumbent |= plain
            if self._gain(plain, carved) < -LEAST_GAIN:
                worse += unit
                return
        tuned, default = {name: self._incumbent[name] for name in unit}, self._defaults(unit)
        if (yield from self._proves_itself(tuned, default, "the default against the best so far")):
            self._incumbent |= default
            worse += unit

    def _settle(self, unit: tuple[str, ...], before: Assignments) -> _Asked:
        """Keeps the first search's result unless the second search found something faster."""
        second = {name: self._incumbent[name] for name in unit}
        earlier = {name: before[name] for name in unit}
        why = "the best without a carve-out against the best before"
        if second != earlier and not (yield from self._proves_itself(earlier, second, why)):
            self._incumbent |= earlier

    def _reorder(self, unit: tuple[str, ...]) -> _Asked:
        """Tries each order and priority; what gains is kept."""
        space = self._problems[unit[0]].launches
        values: tuple[LaunchOrder | StreamPriority, ...] = (*space.orders, *space.priorities)
        for value in values:
            now = {name: self._incumbent[name] for name in unit}
            tried = {name: _changed(assignment, value) for name, assignment in now.items()}
            words = f"{value} priority" if isinstance(value, StreamPriority) else value.replace("_", " ")
            if (yield from self._proves_itself(now, tried, f"the same with {words}")):
                self._incumbent |= tried

    def _proves_itself(
        self, incumbent: Assignments, challenger: Assignments, why: str
    ) -> Generator[tuple[Assignments, str], None, bool]:
        """Whether the challenger is faster beyond the noise, with as few measurements as that takes."""
        for arms in (incumbent, challenger):
            if not self._num(arms):
                yield arms, why
        while self._gain(incumbent, challenger) >= LEAST_GAIN:
            if self._gain(incumbent, challenger) > CONFIDENCE * self._standard_error(incumbent, challenger):
                return True
            arms = incumbent if self._num(incumbent) <= self._num(challenger) else challenger
            if self._num(arms) >= MOST_REPEATS:
                return False
            yield arms, why
        return False

    def _defaults(self, names: tuple[str, ...]) -> dict[str, Assignment]:
        return {name: self._problems[name].default for name in names}

    def _num(self, arms: Assignments) -> int:
        return min(len(self._times.get(arm, ())) for arm in arms.items())

    def _gain(self, incumbent: Assignments, challenger: Assignments) -> float:
        """How much faster the challenger is, as a logarithm; -infinity if it cannot run."""
        incumbent_s, challenger_s = self._cost_s(incumbent), self._cost_s(challenger)
        if challenger_s == inf:
            return -inf
        return inf if incumbent_s == inf else log(max(incumbent_s, LEAST_S) / max(challenger_s, LEAST_S))

    def _standard_error(self, incumbent: Assignments, challenger: Assignments) -> float:
        return max(map(self._sigma, incumbent)) * sqrt(1 / self._num(incumbent) + 1 / self._num(challenger))

    def _sigma(self, name: str) -> float:
        """Noise of one measurement of a group as a share; 0 where all repeats are equal."""
        repeated = [times for (other, _), times in self._times.items() if other == name and len(times) > 1]
        ratios = [time_s / fmean(times) - 1 for times in repeated if 0 < fmean(times) < inf for time_s in times]
        if not ratios or not any(ratios):
            return 0.0 if ratios else PRIOR_SIGMA
        return sqrt((sum(r**2 for r in ratios) + 2 * PRIOR_SIGMA**2) / (len(ratios) - len(repeated) + 2))

    def _cost_s(self, arms: Assignments) -> float:
        """The mean makespan of a unit in a step, infinite where a group cannot run."""
        return sum(self._problems[name].group.count * fmean(self._times[name, arm]) for name, arm in arms.items())

    def _side_by_side(self, searches: Mapping[tuple[str, ...], _Asked]) -> _Asking:
        """All units' searches at once, each with its next measurement in the same trial."""
        waiting = {unit: wish for unit, search in searches.items() if (wish := next(search, None)) is not None}
        while waiting:
            assignments = {name: arm for arms, _ in waiting.values() for name, arm in arms.items()}
            yield _Wish(assignments=assignments, reasons={n: why for arms, why in waiting.values() for n in arms})
            waiting = {unit: wish for unit in waiting if (wish := next(searches[unit], None)) is not None}


class BothSides(AroundInner):
    """Settings of collectives, by the tuner `inner`, together with those of the computation.

    Raises:
        UnknownNameError: if there is no such inner tuner.
    """

    def __init__(self, problems: Problems, *, seed: int = 0, inner: str = OURS) -> None:
        make_inner = tuner_factory(inner)
        super().__init__(problems, lambda some: cast("Tuner", make_inner(some, seed=seed)))


def _units(problems: Problems) -> list[tuple[str, ...]]:
    """The groups that share a setting: each group of scope "group" alone, all groups of scope "step" together.

    Groups without anything to try are left out.
    """
    touched = [problem for problem in problems if not problem.launches.is_untouched]
    shared = [problem for problem in touched if problem.launches.scope is LaunchScope.STEP]
    if len({problem.launches for problem in shared}) > 1:
        raise ValueError("groups of one step share a setting of the computation's side, but not the values to try")
    units: list[tuple[str, ...]] = [
        (problem.group.name,) for problem in touched if problem.launches.scope is LaunchScope.GROUP
    ]
    return [*units, tuple(problem.group.name for problem in shared)] if shared else units


def _plain(assignments: Assignments) -> dict[str, Assignment]:
    return {name: launched(assignment, UNTOUCHED_LAUNCH) for name, assignment in assignments.items()}


def _changed(assignment: Assignment, value: LaunchOrder | StreamPriority) -> Assignment:
    launch = launch_of(assignment)
    if isinstance(value, LaunchOrder):
        return launched(assignment, replace(launch, order=value))
    return launched(assignment, replace(launch, priority=value))
