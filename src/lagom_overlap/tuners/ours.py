"""The search `ours`: two families of models, weighed by what they foretold, choose the next whole assignment.

Ours, not a paper's. A measurement costs training steps, so each one is chosen for what it is expected to gain:

    1. Measure the default, then what an earlier run ended with, if there is one. Where communication is exposed, also
       each other algorithm and protocol, and half the channels and a quarter of the chunk, each once.
    2. Fit two families to all measurements:
         curves     `curves.py`: two smooth curves and their error, Gaussian processes that know no formula, played
                    through an in-order stream whose collectives may wait for producers or kernels (`waiting.py`)
         machine    `machine/`: a formula of wire and computations with some fifteen constants and a small remainder
       Both foretell a makespan before it is measured. The weight of the machine is w = 1 / (1 + exp(-sum d)), where d
       is, for each measurement, the log density that the machine gave it less that of the curves
       (`machine/evidence.py`). A right formula leads after a few measurements, a wrong one soon has no weight.
    3. Ask for the assignment with the largest expected gain over the best, (1 - w) E_curves + w E_machine of
       max(0, Z_best - Z). Questions are whole assignments: one setting for all collectives, for the first or last of
       the stream, for those that wait and those that do not, one for each collective (coordinate search on curves that
       wait), and the best assignments on the machine and on draws of it.
    4. Where nothing new promises `LEAST_EXPECTED`, measure the best and its possible rivals again.
    5. Recommend the fastest of the measured by both families. It must be faster than the default by
       `readings.LEAST_GAIN`, also as measured; otherwise the default is recommended.

**How long.** A short job stops after `MOST_MEASURED` measurements. A job of which `job_measurements` more windows are
to come goes on while these would save more than the question costs: left * gain > excess + `SWITCHING`, in makespans,
where the excess is how much slower than the best the question is expected to be; at most `MOST_ANYTIME` measurements.

After the opening (1.) nothing is asked for that may be `MOST_SLOWER` times as slow as the best, and by the curves only
what is a step from what was measured. Nothing takes more channels than the default before something exposes its
communication: the curves look at the default, the machine at all that was measured.

The search is unguarded: the default comes first, and `Guarded` compares with it.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import fmean
from typing import Final

import numpy as np
import numpy.typing as npt

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.curves import Curves, Floats, Places, Setting, expected_gain
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search
from lagom_overlap.tuners.machine.evidence import ForecastScores
from lagom_overlap.tuners.machine.posterior import Machine, Pool, earlier_pool
from lagom_overlap.tuners.machine.search_space import Surfaces
from lagom_overlap.tuners.places import FARTHEST, Place, between, in_way, setting_of, settings_of, start_of
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement, Outcome
from lagom_overlap.tuners.readings import exposed_s, fastest, is_exposed, sigma_of
from lagom_overlap.tuners.waiting import Stream
from lagom_overlap.tuners.warm_start import WarmStart

MOST_MEASURED: Final = 12
"""Measurements after which the search of a short job ends, the default included."""
MOST_ANYTIME: Final = 48
"""Measurements after which any search ends. Bounds the computation, which grows with them."""
SWITCHING: Final = 0.02
"""What a measurement costs in makespans even if it is as fast as the best: settings are swapped twice. Chosen."""
MOST_WAYS: Final = 5
"""Other algorithms and protocols that are measured before the families choose. Bounds the measurements."""
LEAST_EXPECTED: Final = 0.0003
"""The smallest expected gain, as a share of the makespan, that is worth a measurement. Chosen, not measured."""
NUM_DESCENTS: Final = 4
"""Curves (the mean and draws) on which a setting for each collective alone is searched. Bounds the computation."""
RISK: Final = 0.9
"""The quantile of the predicted makespan to which `MOST_SLOWER` applies."""
MOST_SLOWER: Final = 2.0
"""No setting is tried whose makespan, at the quantile `RISK`, is more than this many times the best: the job trains
while it is measured."""
MOST_READINGS: Final = 3
"""Measurements of one assignment at most."""
SHARES: Final = (0.6, 0.3, 1.0, 0.0)
"""Where the default cannot run: positions in the logarithmic ranges to try in its place. Chosen, not measured."""

Move = Callable[[Place], Place]
STEPS: Final[tuple[tuple[str, Move], ...]] = (
    ("half the channels", lambda place: place.channels_times(1 / 2)),
    ("a quarter of the chunk", lambda place: place.chunk_times(1 / 4)),
    ("slices of a quarter, twice the channels", Place.sliced),
    ("the most channels", Place.most_channels),
    ("the largest chunk", Place.largest_chunk),
)
"""Tried once each where communication is exposed; the last three only move knobs that the engine kept to itself."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """Both families after all measurements so far, the machine's weight, and what it favours.

    Draws are in units of the shortest measured makespan, (assignments, draws), the expected one first.
    """

    curves: Curves
    machine: Machine
    weight: float
    favoured: list[Assignment]

    def draws(self, places: Places) -> tuple[Floats, Floats | None]:
        """Of the curves and, once it is fitted, of the machine."""
        machine = None
        if self.machine.is_fitted:
            machine = self.machine.draws(list(self.curves.settings), places) / self.curves.unit_s
        return self.curves.draws(places), machine

    def gains(self, places: Places, incumbent: tuple[Floats, Floats | None]) -> tuple[Floats, Floats]:
        """The expected gains over the incumbent, as shares, and how much slower than it is expected, by both families.

        What may be far slower gains nothing.
        """
        gains, excess = np.zeros(len(places)), np.zeros(len(places))
        for weight, draws, now in zip((1 - self.weight, self.weight), self.draws(places), incumbent, strict=True):
            if draws is not None and now is not None and weight > 0:
                gain = expected_gain(draws, now) / now[0]
                gain[~(np.quantile(draws, RISK, axis=1) <= MOST_SLOWER * now[0])] = 0.0
                gains += weight * gain
                excess += weight * np.nan_to_num(np.maximum(0.0, draws[:, 0] / now[0] - 1))
        return gains, excess


@dataclass(frozen=True, slots=True)
class _Standing:
    """The arms that may be recommended, the number of the best, and the draws of all by both families."""

    arms: list[Assignment]
    best: int
    draws: Floats
    machine: Floats | None

    @property
    def incumbent(self) -> tuple[Floats, Floats | None]:
        """The draws of the best."""
        return self.draws[self.best], None if self.machine is None else self.machine[self.best]


class GroupSearch:
    """One group's search: all measurements so far, and what was foretold of them; `run` is its generator."""

    def __init__(self, problem: GroupProblem, machine: Machine, earlier: Assignment | None, job_measurements: int):
        self._problem, self._machine, self._earlier, self._job = problem, machine, earlier, job_measurements
        self._starts = [start_of(space, own) for space, own in zip(problem.spaces, problem.default, strict=True)]
        self._start_settings = [setting_of(start.default, start.subspace, start) for start in self._starts]
        self._asked: list[tuple[Assignment, Outcome]] = []
        self._evidence = ForecastScores()
        self._stream = Stream.of(problem.group)
        self._slowed: list[float] = []
        self._best = problem.default
        self._choices: list[list[Setting]] = []
        self._choices_by: dict[tuple[bool, bool], list[list[Setting]]] = {}

    def run(self) -> Search:
        """The search as a generator."""
        yield from self._ask(self._problem.default, "the default, the start of the search")
        yield from self._replace_default()
        if not self._observed():
            return self._problem.default
        if self._earlier is not None:
            yield from self._ask(self._earlier, "warm start: the result of an earlier run")
        elif self._is_exposed:
            yield from self._open()
        while True:
            self._choices = self._allowed()
            fit = self._fit(self._choices)
            standing = self._standing(fit)
            self._best = standing.arms[standing.best]
            question, reason = self._most_promising(fit, standing), "largest expected gain"
            if question is None:
                question, reason = self._most_doubtful(fit, standing), "re-measuring the best candidates"
            if question is None:
                return self._best
            self._foretell(fit, question)
            yield from self._ask(question, reason)

    # Questions

    def _ask(self, assignment: Assignment, reason: str) -> Generator[Probe, Outcome, None]:
        outcome = yield Probe(assignment=assignment, reason=reason, incumbent=self._best)
        self._asked.append((assignment, outcome))

    def _replace_default(self) -> Generator[Probe, Outcome, None]:
        """Where the default cannot run: settings between the extremes, until one does."""
        for share in SHARES:
            if self._observed():
                break
            yield from self._ask(
                tuple(between(space, share) for space in self._problem.spaces),
                "the default cannot run: resources between the extremes",
            )
        if observed := self._observed():
            self._best = observed[0][0]

    def _open(self) -> Generator[Probe, Outcome, None]:
        """Each other algorithm and protocol, then each step from the fastest so far, once."""
        spaces, places = self._problem.spaces, self._starts
        fastest_s = self._first.makespan_s
        moves = [
            (f"other algorithms and protocols, number {index}", partial(self._in_way, index))
            for index in range(max(len(space.subspaces) for space in spaces))
        ]
        moves = [each for each in moves if each[1](self._starts) != self._starts][:MOST_WAYS]
        moves += [(words, partial(_moved, move)) for words, move in STEPS]
        for words, move in moves:
            tried = move(places if move.func is _moved else self._starts)
            assignment = tuple(
                default if place == start else place.config
                for place, start, default in zip(tried, self._starts, self._problem.default, strict=True)
            )
            if assignment in dict(self._asked) or len(self._asked) >= MOST_MEASURED:
                continue
            moved = [(start, place) for start, place in zip(self._starts, tried, strict=True) if place != start]
            is_counted = any(start.is_counted_from_the_most(place) for start, place in moved)
            self._foretell(self._fit([*self._allowed(), self._settings(assignment)]), assignment)
            yield from self._ask(assignment, f"{words}{', counted from the most' if is_counted else ''}")
            outcome = self._asked[-1][1]
            if isinstance(outcome, Measurement) and outcome.makespan_s < fastest_s:
                places, fastest_s = tried, outcome.makespan_s

    def _in_way(self, index: int, places: Sequence[Place]) -> list[Place]:
        return [in_way(space, index, place) for space, place in zip(self._problem.spaces, places, strict=True)]

    def _allows(self, gain: float, excess: float) -> bool:
        """Whether a question pays: the rule of cost at the top of this module."""
        num = len(self._asked)
        left = self._job - max(0, num - MOST_MEASURED)
        if num < MOST_ANYTIME and left * gain > excess + SWITCHING:
            return True
        return num < MOST_MEASURED and gain > LEAST_EXPECTED

    def _most_promising(self, fit: _Fit, standing: _Standing) -> Assignment | None:
        """The assignment, of those never measured, with the largest expected gain; None if none pays."""
        curves = fit.curves
        candidates = self._candidates(curves)
        if fit.favoured:
            candidates = np.concatenate([candidates, curves.places(fit.favoured)])
        failed = [tried for tried, outcome in self._asked if not isinstance(outcome, Measurement)]
        known = {tuple(row) for row in curves.places([*standing.arms, *failed]).tolist()}
        rows = [row for row in dict.fromkeys(map(tuple, candidates.tolist())) if row not in known]
        if not rows:
            return None
        new = np.array(rows, dtype=np.intp)
        gains, excess = fit.gains(new, standing.incumbent)
        best = int(np.argmax(gains))
        return curves.assignment(new[best]) if self._allows(float(gains[best]), float(excess[best])) else None

    def _candidates(self, curves: Curves) -> Places:
        """One setting for a part of the collectives, the others as in the best; each one's own where they wait."""
        is_near, excluded = self._near(curves), self._excluded()
        own = [
            np.array([place for place in curves.indices(config for config in configs) if is_near[place]], dtype=np.intp)
            for configs in (
                [setting.config for setting in settings if setting.config not in bar]
                for settings, bar in zip(self._choices, excluded, strict=True)
            )
        ]
        base, split = curves.places([self._best])[0], self._num_hidden()
        rows, waits = [base], [curves.begins_late(j) for j in range(len(own))]
        sets = [set(places.tolist()) for places in own]
        for place in sorted(set().union(*sets)):
            having = [j for j, places in enumerate(sets) if place in places]
            late = [j for j in having if waits[j]]
            parts = [*_parts(having, sum(j < split for j in having)), late, [j for j in having if j not in late]]
            for members in parts:
                row = base.copy()
                row[list(members)] = place
                rows.append(row)
        candidates = np.unique(np.array(rows), axis=0)
        return _own_settings(curves, own, candidates) if curves.may_wait else candidates

    def _near(self, curves: Curves) -> npt.NDArray[np.bool_]:
        """Which settings are at most a step from one that was measured; for algorithms never measured from any."""
        measured = np.unique(curves.places([assignment for assignment, _ in self._observed()]))
        settings = list(curves.settings.values())
        logs = np.log([(each.num_channels, each.chunk_bytes) for each in settings])
        ways = [(each.config.algorithm, each.config.protocol) for each in settings]
        way = np.array([ways.index(each) for each in ways])
        is_near = (np.abs(logs[:, None] - logs[None, measured]) <= np.log(FARTHEST)).all(axis=2)
        is_alike = (way[:, None] == way[None, measured]) | ~np.isin(way, way[measured])[:, None]
        return np.asarray((is_near & is_alike).any(axis=1))

    def _most_doubtful(self, fit: _Fit, standing: _Standing) -> Assignment | None:
        """The best or its strongest rival, whichever has fewer readings; None if that does not pay."""
        arms, best = standing.arms, standing.arms[standing.best]
        readings = Counter(tried for tried, _ in self._observed())
        gains, excess = fit.gains(fit.curves.places(arms), standing.incumbent)
        gains[[readings[arm] >= MOST_READINGS for arm in arms]] = 0.0
        rival = int(np.argmax(gains))
        if not self._allows(float(gains[rival]), float(excess[rival])):
            return None
        return best if readings[best] <= readings[arms[rival]] else arms[rival]

    def _excluded(self) -> list[set[CommConfig]]:
        """By collective, what was in an assignment that failed and never ran: any of it may be the cause."""
        ran = [{assignment[j] for assignment, _ in self._observed()} for j in range(len(self._starts))]
        failed = [tried for tried, outcome in self._asked if not isinstance(outcome, Measurement)]
        return [{tried[j] for tried in failed} - ran[j] for j in range(len(self._starts))]

    # What is known

    @property
    def _first(self) -> Measurement:
        """The default's first measurement, or what ran in its place."""
        return self._observed()[0][1]

    @property
    def _is_exposed(self) -> bool:
        """Whether the default leaves communication exposed."""
        return is_exposed(self._first)

    @property
    def _trades(self) -> bool:
        """Whether anything measured left communication exposed: then faster communication is worth something."""
        return any(is_exposed(each) for _, each in self._observed())

    def _num_hidden(self) -> int:
        """How many collectives come before those at the end that the default leaves exposed."""
        left_s, num = exposed_s(self._first), len(self._starts)
        while num and left_s > self._first.comm_s[num - 1] / 2:
            num -= 1
            left_s -= self._first.comm_s[num]
        return num

    def _observed(self) -> list[tuple[Assignment, Measurement]]:
        """The measurements in order, without failures."""
        return [(tried, outcome) for tried, outcome in self._asked if isinstance(outcome, Measurement)]

    def _allowed(self) -> list[list[Setting]]:
        """The settings that the curves may ask for, for each collective.

        Where the default hides communication no more channels than its own; and no other algorithm or protocol before
        something was measured that does not.
        """
        standing = self._trades, self._is_exposed
        if standing not in self._choices_by:
            self._choices_by[standing] = self._choices_of(trades=standing[0], is_exposed=standing[1])
        return self._choices_by[standing]

    def _choices_of(self, *, trades: bool, is_exposed: bool) -> list[list[Setting]]:
        by_space: dict[tuple[object, Place], list[Setting]] = {}
        for space, start in zip(self._problem.spaces, self._starts, strict=True):
            if (space, start) not in by_space:
                ways = space.subspaces if trades else (start.subspace,)
                most = setting_of(start.default, start.subspace, start).num_channels
                settings = [setting for way in ways for setting in settings_of(way, start)]
                by_space[space, start] = [each for each in settings if is_exposed or each.num_channels <= most]
        return [by_space[pair] for pair in zip(self._problem.spaces, self._starts, strict=True)]

    def _settings(self, assignment: Assignment) -> list[Setting]:
        triples = zip(assignment, self._problem.spaces, self._starts, strict=True)
        return [setting_of(config, space.subspace_of(config), start) for config, space, start in triples]

    def _repeats(self, curves: Curves, arm: Assignment) -> list[Measurement]:
        """The measurements of an assignment that were not slow as a whole, all if none is, without that factor."""
        repeats = [(number, each) for number, (tried, each) in enumerate(self._observed()) if tried == arm]
        clean = [(number, each) for number, each in repeats if curves.slowed(number) == 1]
        return [_evened(each, curves, number) for number, each in clean or repeats]

    def _arms(self, curves: Curves) -> list[Assignment]:
        """The default, and the assignments with a measurement that was not slow as a whole."""
        observed = self._observed()
        clean = [tried for number, (tried, _) in enumerate(observed) if curves.slowed(number) == 1]
        return list(dict.fromkeys((observed[0][0], *clean)))

    def _standing(self, fit: _Fit) -> _Standing:
        """The best of the arms, by both families."""
        arms = self._arms(fit.curves)
        draws, machine = fit.draws(fit.curves.places(arms))
        repeats = [self._repeats(fit.curves, arm) for arm in arms]
        means = [replace(each[0], makespan_s=fmean(run.makespan_s for run in each)) for each in repeats]
        expected = draws[:, 0]
        if machine is not None:  # what it has no place for is as it was measured
            measured = np.array([each.makespan_s for each in means]) / fit.curves.unit_s
            machine = np.where(np.isnan(machine), measured[:, None], machine)
            expected = (1 - fit.weight) * expected + fit.weight * machine[:, 0]
        return _Standing(arms, fastest(fit.curves.sigma, expected, means), draws, machine)

    # The families

    def _fit(self, choices: Sequence[Sequence[Setting]]) -> _Fit:
        """Both families, fitted to all measurements so far; `choices` are the settings that may be asked about."""
        settings = [setting for own in choices for setting in own]
        curves = self._curves(settings)
        self._machine.fit({arm: self._repeats(curves, arm) for arm in self._arms(curves)}, curves.sigma)
        favoured = self._favoured()
        new = [each for one in favoured for each in self._settings(one) if each.config not in curves.settings]
        if new:
            curves = self._curves([*settings, *new], like=curves)
        return _Fit(curves, self._machine, self._weight(curves), favoured)

    def _favoured(self) -> list[Assignment]:
        """What the machine favours; before anything measured left communication exposed, as in `_allowed`."""
        if not self._machine.is_fitted:
            return []
        most = [inf if self._trades else float(start.num_channels) for start in self._start_settings]
        pairs = list(zip(self._problem.spaces, self._starts, strict=True))
        favoured = [
            tuple(start.as_default(space, config) for config, (space, start) in zip(one, pairs, strict=True))
            for one in self._machine.favourites(self._best, self._excluded(), most)
        ]
        if self._trades:
            return favoured
        return [
            one
            for one in favoured
            if all(space.subspace_of(c) == start.subspace for c, (space, start) in zip(one, pairs, strict=True))
        ]

    def _curves(self, settings: Iterable[Setting], like: Curves | None = None) -> Curves:
        observed = self._observed()
        by_config = {setting.config: setting for setting in settings}
        for assignment, _ in self._asked:
            for setting in self._settings(assignment):
                by_config.setdefault(setting.config, setting)
        sigma = sigma_of(measured for _, measured in observed)
        curves = Curves(list(by_config.values()), observed, sigma, stream=self._stream, slowed=self._slowed, like=like)
        self._stream, self._slowed = curves.stream, [curves.slowed(number) for number in range(len(observed))]
        return curves

    def _foretell(self, fit: _Fit, assignment: Assignment) -> None:
        """Keeps what both families expect of the next measurement."""
        curves, machine = fit.draws(fit.curves.places([assignment]))
        if machine is not None:
            machine = machine * fit.curves.unit_s
        self._evidence.foretell(len(self._observed()), curves * fit.curves.unit_s, machine)

    def _weight(self, curves: Curves) -> float:
        """The machine's weight after all measurements so far; the curves have the rest."""
        num = len(self._observed())
        return self._evidence.weight(num, curves.makespan, curves.sigma) if self._machine.is_fitted else 0.0


def _moved(move: Move, places: Sequence[Place]) -> list[Place]:
    return [move(place) for place in places]


def _own_settings(curves: Curves, own: Sequence[npt.NDArray[np.intp]], starts: Places) -> Places:
    """The starts, and what coordinate search from the best of them passes through.

    One collective after the other, twice, on the mean curves and on draws of them at once.
    """
    draws = np.repeat(np.arange(NUM_DESCENTS), len(starts))
    values = curves.expected(np.tile(starts, (NUM_DESCENTS, 1)), draws).reshape(NUM_DESCENTS, -1)
    at, best_s = starts[values.argmin(axis=1)].copy(), values.min(axis=1)
    passed = [starts]
    for j in (j for _ in range(2) for j in range(len(own)) if len(own[j])):
        tried = np.repeat(at, len(own[j]), axis=0)
        tried[:, j] = np.tile(own[j], NUM_DESCENTS)
        draws = np.repeat(np.arange(NUM_DESCENTS), len(own[j]))
        values = curves.expected(tried, draws).reshape(NUM_DESCENTS, -1)
        is_better = values.min(axis=1) < best_s * (1 - LEAST_EXPECTED)
        at[is_better, j] = own[j][values.argmin(axis=1)[is_better]]
        best_s = np.minimum(best_s, values.min(axis=1))
        passed.append(at[is_better])
    return np.concatenate(passed)


def _evened(measured: Measurement, curves: Curves, number: int) -> Measurement:
    """The measurement without the factor by which it was slow as a whole, and the makespan from all its times."""
    factor = curves.slowed(number)
    return replace(
        measured,
        makespan_s=curves.makespan(number),
        comp_s=measured.comp_s / factor,
        comm_s=tuple(each / factor for each in measured.comm_s),
    )


def _parts(members: Sequence[int], num_hidden: int) -> list[Sequence[int]]:
    """All members, and the first and last ones, cut at quarters and around the first exposed one.

    The first `num_hidden` of them are hidden.
    """
    num = len(members)
    cuts = {round(num * part / 4) for part in (1, 2, 3)} | {1, num - 1, num_hidden - 1, num_hidden, num_hidden + 1}
    halves = [part for cut in sorted(cuts) if 0 < cut < num for part in (members[:cut], members[cut:])]
    return [members, *halves]


class OurSearch(GroupwiseTuner):
    """Our search, over all groups of an iteration at once: what one group shows helps the others.

    `job_measurements` is how many more windows of a measurement's length the job will run (0: a short job, which stops
    after `MOST_MEASURED`). `warm` is what other runs say; the group's own measurements may refuse it.

    Raises:
        ValueError: if `job_measurements` is negative.
    """

    def __init__(
        self, problems: Problems, *, seed: int = 0, job_measurements: int = 0, warm: WarmStart | None = None
    ) -> None:
        if job_measurements < 0:
            raise ValueError(f"job_measurements is {job_measurements}, must be at least 0")
        surfaces = Surfaces()
        pool = Pool(None if warm is None else earlier_pool(warm, surfaces))

        def search(problem: GroupProblem) -> Search:
            machine = Machine(problem, seed=seed, pool=pool, surfaces=surfaces)
            earlier = None if warm is None else warm.first_probe(problem)
            return GroupSearch(problem, machine, earlier, job_measurements).run()

        super().__init__(problems, search)
