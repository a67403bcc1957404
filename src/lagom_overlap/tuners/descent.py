"""From the default down: every collective gives back what it does not need, as long as the makespan falls.

Ours, not a paper's. Lagom climbs from minimal resources and stops where the sum of communication is shorter than the
computation. A running job starts well above that, and where one of several collectives has nothing left to hide behind
(the last bucket of a backward pass, the first layer's gather), sums say "hidden" while the makespan says otherwise. So
here the default is the start, the makespan Z is the judge, and all collectives move at once:

    1. fewer channels, by halves, then smaller chunks, by quarters, for all collectives that have any to give;
    2. where Z does not fall because what is exposed, E = Z - Y, rises by more than the computation Y gains, the last
       collectives stay behind, as many as took that much longer: an in-order stream ends with what is exposed;
    3. where communication is exposed: other algorithms and protocols, each once, the fastest of them for every
       collective by its own time x_j; after the steps down, the most channels and the largest chunk where the
       default's are not known. Each step once there, and nobody stays behind: the curves take it further in fewer
       measurements;
    4. up to `MOST_MEASURED` measurements, what two curves through all of them (`curves.py`) expect to gain most: any
       setting for all, or for the first or the last collectives of the stream. More channels, other algorithms and
       protocols only where communication was exposed; nothing that may well be twice as slow, and nothing further from
       what was measured than a step. Where collectives wait for kernels (`waiting.py`), also a setting of each one's
       own: there the makespan depends on which of them fits in front of which kernel. Where nothing new promises
       anything, what is left goes to repeats of the best and of those that may still be better;
    5. what is recommended is the fastest of the measured by these curves, which even out the noise of single
       measurements and what made some slow as a whole; the default, unless that is faster by `LEAST_GAIN` and was
       measured so.

A knob that has not moved stays the engine's own. Where that is not known (`ConfigSpace.default`), steps down count from
the most that may be asked for, which is then a setting of its own.

Steps are judged by times without the factor by which the curves say that a measurement was slow as a whole. A step
counts as progress from `LEAST_GAIN` on, or `LEAST_ERRORS` of the difference. Measurements grow with the logarithm of
the number of collectives at most: after `BLAMING_RETREATS` those that move are halved. A group in which each of many
needs something else is left where steps of all, first or last ones end. Unguarded: the default comes first, and
`Guarded` compares with it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from math import hypot, sqrt
from statistics import fmean, median
from typing import Final

import numpy as np
import numpy.typing as npt

from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.curves import Curves, Setting, expected_gain
from lagom_overlap.tuners.gaussian_process import FEWEST_SLOW
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search
from lagom_overlap.tuners.places import Place, in_way, is_near, setting_of, settings_of, start_of
from lagom_overlap.tuners.problem import IQR_OF_SIGMA, Assignment, GroupProblem, Measurement, Outcome
from lagom_overlap.tuners.waiting import Stream

LEAST_GAIN: Final = 0.002
"""A share of the makespan."""
EXPOSED: Final = 0.02
"""From this share of the makespan on, exposed communication is worth a look at faster ways."""
BLAMED: Final = 0.8
"""Of what exposed communication rose by, the share that those who stay behind must have slowed down by."""
IQR_LOST: Final = 1.2
"""The inclusive range of k draws is expected to be 1 - 1.2 / k of that: 0.42 for two, right within 5 %."""
LEAST_ERRORS: Final = 0.15
"""Of standard errors: 40 % (two repeats) to 44 % (fifteen) of the moves that change nothing pass.

A whole one lets 12 to 16 % pass, and adopted nothing on the emulated FSDP2 job. Of its best gain, 2.3 %, the worst of
ten seeds lost 1.5 with a quarter, 0.9 with this, and 0.9 with none at all. What a search ends with is judged in pairs.
"""
MEDIAN_TO_MEAN: Final = 1.2533
"""The standard error of a median in that of a mean: sqrt(pi / 2)."""
BLAMING_RETREATS: Final = 2
"""Per move, before those that move are halved at least."""
FEWEST_FITTED: Final = 2
LEAST_SIGMA: Final = 0.002
"""Repeats of few steps may agree by chance."""

MOST_ERRORS: Final = 1
"""Of standard errors of a difference: beyond that the curves do not overrule what was measured."""
MOST_MEASURED: Final = 12
"""With the default. Steps down may take more."""
LEAST_EXPECTED: Final = 0.0003
"""A share of the makespan: an expected gain below it is not worth a measurement."""
NUM_DESCENTS: Final = 4
"""Of the curves and draws of them, in which each collective's own setting is looked for."""
RISK: Final = 0.9
MOST_SLOWER: Final = 2.0
"""Nothing is asked for whose makespan, at the quantile `RISK`, is that many times the best one."""
MOST_READINGS: Final = 3
"""Of one assignment."""


Move = Callable[[Place], Place]
STEPS: Final[tuple[tuple[str, Move], ...]] = (
    ("half the channels", lambda place: place.channels_times(1 / 2)),
    ("a quarter of the chunk", lambda place: place.chunk_times(1 / 4)),
)
FASTER: Final[tuple[tuple[str, Move], ...]] = (
    ("slices of a quarter, twice the channels", Place.sliced),
    ("the most channels", Place.most_channels),
    ("the largest chunk", Place.largest_chunk),
)


class _Descent:
    """One group: where every collective stands, what that took."""

    def __init__(self, problem: GroupProblem, measured: Measurement) -> None:
        self._problem = problem
        self._starts = [start_of(space, own) for space, own in zip(problem.spaces, problem.default, strict=True)]
        self._asked: list[tuple[Assignment, Outcome]] = [(problem.default, measured)]
        self._stream = Stream.of(problem.group)
        self._slowed: list[float] = []
        self._fit: tuple[tuple[int, tuple[CommConfig, ...]], Curves] | None = None
        self.places = list(self._starts)
        self.now = self._first = measured
        self._fitted: Assignment | None = None

    @property
    def assignment(self) -> Assignment:
        """What the curves say is fastest, once they are fitted; before, where the steps led."""
        return self._assignment(self.places) if self._fitted is None else self._fitted

    def run(self) -> Generator[Probe, Outcome, None]:
        if self._exposed_share > EXPOSED:
            yield from self._other_ways()
        for words, move in (*STEPS, *(FASTER if self._exposed_share > EXPOSED else ())):
            yield from self._go(words, move)
        yield from self._refine()

    @property
    def _known(self) -> dict[Assignment, Outcome]:
        """The latest outcome of all that was asked."""
        return dict(self._asked)

    @property
    def _exposed_share(self) -> float:
        return _exposed_s(self.now) / self.now.makespan_s if self.now.makespan_s > 0 else 0.0

    @property
    def _is_exposed(self) -> bool:
        """Whether the default leaves communication exposed."""
        return _exposed_s(self._first) > EXPOSED * self._first.makespan_s

    def _assignment(self, places: Sequence[Place]) -> Assignment:
        held = zip(places, self._starts, self._problem.default, strict=True)
        return tuple(default if place == start else place.config for place, start, default in held)

    def _go(self, words: str, move: Move) -> Generator[Probe, Outcome, None]:
        """The move again and again while it gains, with fewer collectives where the last ones become exposed."""
        chosen: Sequence[int] = range(len(self.places))
        num_retreats, is_once = 0, self._is_exposed
        while chosen:
            tried = [move(place) if j in chosen else place for j, place in enumerate(self.places)]
            moved = [j for j in chosen if tried[j] != self.places[j]]
            if not moved:
                return
            is_counted = any(self.places[j].is_counted_from_the_most(tried[j]) for j in moved)
            reason = f"{words} of {_of(moved, len(tried))}{', counted from the most' if is_counted else ''}"
            outcome = yield from self._measure(tried, reason)
            if not isinstance(outcome, Measurement):
                return
            now, then = self._evened(self.places), self._evened(tried)
            if _gains(now, then):
                self.places, self.now, chosen = tried, outcome, () if is_once else moved
            elif is_once:
                return
            else:
                chosen = _without_exposed(now, then, moved)
                if num_retreats >= BLAMING_RETREATS:
                    chosen = chosen[: len(moved) // 2]
                num_retreats += 1

    def _other_ways(self) -> Generator[Probe, Outcome, None]:
        """Every algorithm and protocol once; then what was fastest for each collective, if that is a mixture."""
        base, fastest = list(self.places), list(zip(self.places, self.now.comm_s, strict=True))
        for index in range(max(len(space.subspaces) for space in self._problem.spaces)):
            tried = [in_way(space, index, place) for space, place in zip(self._problem.spaces, base, strict=True)]
            if tried == base:
                continue
            outcome = yield from self._measure(tried, f"other algorithms and protocols, number {index}")
            if not isinstance(outcome, Measurement):
                continue
            fastest = [
                min(best, (place, comm_s), key=lambda pair: pair[1])
                for best, place, comm_s in zip(fastest, tried, outcome.comm_s, strict=True)
            ]
            now, outcome = self._evened(self.places), self._evened(tried)
            if _gains(now, outcome):
                self.places, self.now = tried, outcome
        tried = [place for place, _ in fastest]
        if self._curves(self._choices(), self._told()).waits:  # their times contain their waits
            return
        if self._assignment(tried) not in self._known:
            outcome = yield from self._measure(tried, "for every collective what was fastest")
            if isinstance(outcome, Measurement):
                now, outcome = self._evened(self.places), self._evened(tried)
                if _gains(now, outcome):
                    self.places, self.now = tried, outcome

    def _evened(self, places: Sequence[Place]) -> Measurement:
        """What was told of these places, without what made that measurement slow as a whole."""
        asked, told = self._assignment(places), self._told()
        outcome = self._known[asked]
        assert isinstance(outcome, Measurement), "told of what failed"
        if len(told) < FEWEST_SLOW:
            return outcome
        curves = self._curves(self._choices(), told)
        number = [each for each, _ in told].index(asked)
        return _evened(outcome, curves, number)

    def _refine(self) -> Generator[Probe, Outcome, None]:
        """Asks what the curves expect most of; at the end, what is recommended is the fastest by them."""
        choices = self._choices()
        while (told := self._told()) and len(told) >= FEWEST_FITTED:
            curves = self._curves(choices, told)
            arms = self._clean(curves)
            draws = curves.draws(curves.places(arms))
            best = _fastest(curves, draws[:, 0], [self._mean_evened(curves, arm) for arm in arms])
            self._fitted = arms[best]
            if len(self._asked) >= MOST_MEASURED:
                return
            asked, reason = self._most_promising(curves, choices, draws[best]), "what the measurements so far promise"
            if asked is None:
                asked, reason = self._most_doubtful(arms, draws, best), "again: which of the measured is the fastest"
            if asked is None:
                return
            outcome = yield Probe(assignment=asked, reason=reason, incumbent=self._fitted)
            self._asked.append((asked, outcome))

    def _told(self) -> list[tuple[Assignment, Measurement]]:
        return [(asked, told) for asked, told in self._asked if isinstance(told, Measurement)]

    def _clean(self, curves: Curves) -> list[Assignment]:
        """The default, and what was measured without being slow as a whole: the others are only predicted."""
        told = [asked for number, (asked, _) in enumerate(self._told()) if curves.slowed(number) == 1]
        return list(dict.fromkeys((self._problem.default, *told)))

    def _mean_evened(self, curves: Curves, arm: Assignment) -> Measurement:
        """The first of an assignment's clean measurements, with the mean makespan of these; of the default, of all."""
        told = [(number, each) for number, (asked, each) in enumerate(self._told()) if asked == arm]
        clean = [(number, each) for number, each in told if curves.slowed(number) == 1]
        evened = [_evened(each, curves, number) for number, each in clean or told]
        return replace(evened[0], makespan_s=fmean(each.makespan_s for each in evened))

    def _most_doubtful(
        self, arms: Sequence[Assignment], draws: npt.NDArray[np.float64], best: int
    ) -> Assignment | None:
        """Of the best and the one that may be faster by most, the one with fewer readings; none where none may be."""
        readings = Counter(asked for asked, _ in self._told())
        gains = expected_gain(draws, draws[best]) / draws[best, 0]
        gains[[readings[arm] >= MOST_READINGS for arm in arms]] = 0.0
        rival = int(np.argmax(gains))
        if gains[rival] <= LEAST_EXPECTED:
            return None
        return arms[best] if readings[arms[best]] <= readings[arms[rival]] else arms[rival]

    def _curves(self, choices: Sequence[Sequence[Setting]], told: Sequence[tuple[Assignment, Measurement]]) -> Curves:
        settings = {setting.config: setting for own in choices for setting in own}
        for assignment, _ in told:
            for config, space, start in zip(assignment, self._problem.spaces, self._starts, strict=True):
                settings.setdefault(config, setting_of(config, space.subspace_of(config), start))
        repeats = [
            _sigma_s(each) / each.makespan_s / sqrt(each.num_repeats) for _, each in told if each.num_repeats > 1
        ]
        sigma = max(LEAST_SIGMA, MEDIAN_TO_MEAN * median(repeats)) if repeats else None
        key = len(told), tuple(settings)
        if self._fit is None or self._fit[0] != key:
            curves = Curves(list(settings.values()), told, sigma, stream=self._stream, slowed=self._slowed)
            self._stream, self._slowed = curves.stream, [curves.slowed(number) for number in range(len(told))]
            self._fit = key, curves
        return self._fit[1]

    def _choices(self) -> list[list[Setting]]:
        """Of each collective, what may be asked for."""
        is_exposed = self._is_exposed
        found: dict[tuple[ConfigSpace, Place, Subspace], list[Setting]] = {}
        chosen = []
        for space, start, place in zip(self._problem.spaces, self._starts, self.places, strict=True):
            key = space, start, place.subspace
            if key not in found:
                ways = space.subspaces if is_exposed else dict.fromkeys((start.subspace, place.subspace))
                found[key] = [setting for way in ways for setting in settings_of(way, start)]
                most = setting_of(start.default, start.subspace, start).num_channels
                if not is_exposed:
                    found[key] = [setting for setting in found[key] if setting.num_channels <= most]
            chosen.append(found[key])
        return chosen

    def _most_promising(
        self, curves: Curves, choices: Sequence[Sequence[Setting]], incumbent: npt.NDArray[np.float64]
    ) -> Assignment | None:
        """One setting for all collectives that have it, or for the first or last of them, the others as they are."""
        candidates: dict[Assignment, None] = {}
        measured = {config for assignment, _ in self._told() for config in assignment}
        settings = {setting.config: setting for own in choices for setting in own}
        near = [each for config, each in curves.settings.items() if config in measured]
        num_hidden = self._num_hidden()
        for config in (config for config, each in settings.items() if any(is_near(each, one) for one in near)):
            having = [j for j, own in enumerate(choices) if any(setting.config == config for setting in own)]
            for members in _parts(having, bisect_left(having, num_hidden)):
                tried = list(self.assignment)
                for j in members:
                    tried[j] = config
                candidates[tuple(tried)] = None
        if curves.waits:
            candidates |= self._own_settings(curves, choices, near, list(candidates))
        known = {*self._clean(curves), *(one for one, told in self._asked if not isinstance(told, Measurement))}
        asked = [candidate for candidate in candidates if candidate not in known]
        if not asked:
            return None
        draws = curves.draws(curves.places(asked))
        gains = expected_gain(draws, incumbent) / incumbent[0]
        gains[np.quantile(draws, RISK, axis=1) > MOST_SLOWER * incumbent[0]] = 0.0
        best = int(np.argmax(gains))
        return asked[best] if gains[best] > LEAST_EXPECTED else None

    def _own_settings(
        self,
        curves: Curves,
        choices: Sequence[Sequence[Setting]],
        near: Sequence[Setting],
        starts: Sequence[Assignment],
    ) -> dict[Assignment, None]:
        """From the best start, the best setting of one collective after the other, by the curves and draws of them."""
        own = [[each.config for each in held if any(is_near(each, one) for one in near)] for held in choices]
        found: dict[Assignment, None] = {}
        for draw in range(NUM_DESCENTS):
            expected = curves.expected(curves.places(starts), draw)
            at, best = starts[int(np.argmin(expected))], float(expected.min())
            for j in (j for _ in range(2) for j, configs in enumerate(own) if configs):
                tried = [(*at[:j], config, *at[j + 1 :]) for config in own[j]]
                values = curves.expected(curves.places(tried), draw)
                if values.min() < best * (1 - LEAST_EXPECTED):
                    at, best = tried[int(np.argmin(values))], float(values.min())
                    found[at] = None
        return found

    def _num_hidden(self) -> int:
        """The collectives before those at the end that the default leaves exposed."""
        exposed_s, num = _exposed_s(self._first), len(self._starts)
        while num and exposed_s > self._first.comm_s[num - 1] / 2:
            num -= 1
            exposed_s -= self._first.comm_s[num]
        return num

    def _measure(self, places: Sequence[Place], reason: str) -> Generator[Probe, Outcome, Outcome]:
        assignment = self._assignment(places)
        if assignment not in self._known:
            outcome = yield Probe(assignment=assignment, reason=reason, incumbent=self.assignment)
            self._asked.append((assignment, outcome))
        return self._known[assignment]


def _fastest(curves: Curves, expected: npt.NDArray[np.float64], told: Sequence[Measurement]) -> int:
    """The first of the fastest by the curves that was itself measured to gain; the default, where none does.

    Of what is known to be slower than the fastest by more than noise explains, none.
    """
    others = [number for number in range(1, len(told)) if _gains(told[0], told[number])]
    doubt = sqrt(2) * curves.sigma
    most_s = (1 + MOST_ERRORS * doubt) * min((told[number].makespan_s for number in others), default=0.0)
    others = [number for number in others if told[number].makespan_s <= most_s]
    least = min((float(expected[number]) for number in others), default=float(expected[0]))
    if least >= (1 - max(LEAST_GAIN, LEAST_ERRORS * doubt)) * expected[0]:
        return 0
    return next(number for number in others if expected[number] <= (1 + LEAST_GAIN) * least)


def _evened(measured: Measurement, curves: Curves, number: int) -> Measurement:
    """The times without what made the measurement slow as a whole, the makespan by all that was told."""
    factor = curves.slowed(number)
    return replace(
        measured,
        makespan_s=curves.makespan(number),
        comp_s=measured.comp_s / factor,
        comm_s=tuple(each / factor for each in measured.comm_s),
    )


def _parts(members: Sequence[int], num_hidden: int) -> list[Sequence[int]]:
    """All, and the first and the last ones by quarters, and around where communication is exposed.

    The first `num_hidden` of them are hidden.
    """
    num = len(members)
    cuts = {round(num * part / 4) for part in (1, 2, 3)} | {1, num - 1, num_hidden - 1, num_hidden, num_hidden + 1}
    halves = [part for cut in sorted(cuts) if 0 < cut < num for part in (members[:cut], members[cut:])]
    return [members, *halves]


def _of(moved: Sequence[int], num: int) -> str:
    return "all" if len(moved) == num else f"number {', '.join(str(j) for j in moved)}"


def _exposed_s(measured: Measurement) -> float:
    return max(0.0, measured.makespan_s - measured.comp_s)


def _sigma_s(measured: Measurement) -> float:
    """The standard deviation of one repeat's makespan, by the interquartile range of the few there are."""
    if measured.num_repeats < 2:
        return 0.0
    return measured.makespan_iqr_s / (IQR_OF_SIGMA * (1 - IQR_LOST / measured.num_repeats))


def _noise_s(old: Measurement, new: Measurement) -> float:
    """The standard error of the difference of two medians."""
    return MEDIAN_TO_MEAN * hypot(*(_sigma_s(each) / sqrt(each.num_repeats) for each in (old, new)))


def _gains(old: Measurement, new: Measurement) -> bool:
    return old.makespan_s - new.makespan_s > max(LEAST_GAIN * old.makespan_s, LEAST_ERRORS * _noise_s(old, new))


def _without_exposed(old: Measurement, new: Measurement, moved: Sequence[int]) -> Sequence[int]:
    """Those that may move though the others became exposed; none where that is not why the makespan rose."""
    risen_s, gained_s = _exposed_s(new) - _exposed_s(old), old.comp_s - new.comp_s
    if risen_s <= 0 or gained_s <= LEAST_GAIN * old.makespan_s:
        return ()
    slower_s = 0.0
    for number, j in reversed(list(enumerate(moved))):
        slower_s += max(0.0, new.comm_s[j] - old.comm_s[j])
        if slower_s >= BLAMED * risen_s:
            return moved[:number]
    return ()


def _search(problem: GroupProblem) -> Search:
    outcome = yield Probe(assignment=problem.default, reason="the default, where the descent begins")
    if not isinstance(outcome, Measurement):
        return problem.default
    descent = _Descent(problem, outcome)
    yield from descent.run()
    return descent.assignment


class Descent(GroupwiseTuner):
    """Gives back, from the default down, what the makespan does not need."""

    def __init__(self, problems: Problems, *, seed: int = 0) -> None:
        super().__init__(problems, _search)
