"""Descent from the default: collectives give up channels and chunk size as long as the makespan falls.

Ours, not a paper's. Lagom climbs from minimal resources and stops where the sum of communication is shorter than the
computation. A running job starts well above that. And where one of several collectives has nothing to hide behind (the
last bucket of a backward pass, the first layer's gather), the sums say "hidden" although the makespan shows otherwise.
So this search starts at the default, judges by the makespan Z, and moves all collectives at once:

    1. Halve the channels, then quarter the chunks, of all collectives that have any to give up.
    2. Where Z does not fall because the exposed communication, E = Z - Y, rises by more than the computation Y gains,
       the last collectives stay behind: as many as account for the rise, because an in-order stream ends with what is
       exposed.
    3. Where communication is exposed, try each other algorithm and protocol once and take the fastest for every
       collective by its own time x_j. After the steps down, try the most channels and the largest chunk if the
       default's are not known. Each of these steps is taken once and nobody stays behind: the curves go further in
       fewer measurements.
    4. Up to `MOST_MEASURED` measurements, try what two curves through all measurements (`curves.py`) expect to gain
       most: any setting for all collectives, or for the first or last ones of the stream. More channels, other
       algorithms and protocols only where communication was exposed; nothing that may be twice as slow, and nothing
       more than a step away from what was measured. Where collectives wait for kernels (`waiting.py`), also a setting
       for each collective alone: there the makespan depends on which of them fits in front of which kernel. When
       nothing new promises a gain, the remaining measurements repeat the best and its possible rivals.
    5. Recommend the fastest measured assignment by these curves, which average out the noise of single measurements
       and the factor by which some were slow as a whole. It must be faster than the default by `LEAST_GAIN`, also as
       measured; otherwise the default is recommended.

A knob that has not moved keeps the engine's own value. Where that is not known (`ConfigSpace.default`), steps down
start from the largest allowed value, which is then a setting of its own.

Steps are judged by times without the factor by which, according to the curves, a measurement was slow as a whole. A
step counts as progress if it gains `LEAST_GAIN`, and `LEAST_ERRORS` standard errors of the difference. The number of
measurements grows at most with the logarithm of the number of collectives: after `BLAMING_RETREATS` retreats the moving
collectives are halved. A group in which each of many collectives needs its own setting ends where steps of all, of the
first or of the last ones end. The search is unguarded: the default comes first, and `Guarded` compares with it.
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
"""The smallest gain that counts as progress, as a share of the makespan. Chosen, not measured."""
EXPOSED: Final = 0.02
"""Faster implementations are tried if exposed communication is at least this share of the makespan. Chosen, not
measured: below it there is little to win by faster communication."""
BLAMED: Final = 0.8
"""The last collectives stay behind once their own slow-downs add up to this share of the rise in exposed communication.
Below 1 because measured times are noisy; chosen, not measured."""
IQR_LOST: Final = 1.2
"""The inclusive interquartile range of k draws is expected to be 1 - 1.2 / k of the distribution's: 0.42 for two. Right
within 5%."""
LEAST_ERRORS: Final = 0.15
"""The smallest gain that counts as progress, in standard errors of the difference.

Of moves that change nothing, 40% (two repeats) to 44% (fifteen) pass; with 1.0 it is 12 to 16%, but then nothing was
adopted on the emulated FSDP2 job. Its best gain is 2.3%: in the worst of ten seeds the search lost 1.5% of it with
0.25, 0.9% with this value, and 0.9% with 0. False progress does little harm, because the verdict judges the result in
pairs.
"""
MEDIAN_TO_MEAN: Final = 1.2533
"""Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2)."""
BLAMING_RETREATS: Final = 2
"""Retreats per move after which the moving collectives are at least halved each time. Bounds the measurements."""
FEWEST_FITTED: Final = 2
"""Measurements below which the curves are not used: one measurement says nothing about other settings."""
LEAST_SIGMA: Final = 0.002
"""Lower bound on the noise, because a few repeats may agree by chance. Chosen, not measured."""

MOST_ERRORS: Final = 1
"""The curves overrule measured times only within this many standard errors of a difference."""
MOST_MEASURED: Final = 12
"""Measurements after which the search ends, the default included; the steps down alone may take more."""
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
    """One group's search: where every collective stands, and all measurements so far."""

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
        """The fastest by the curves, once they are fitted; before that, where the steps led."""
        return self._assignment(self.places) if self._fitted is None else self._fitted

    def run(self) -> Generator[Probe, Outcome, None]:
        if self._exposed_share > EXPOSED:
            yield from self._other_ways()
        for words, move in (*STEPS, *(FASTER if self._exposed_share > EXPOSED else ())):
            yield from self._go(words, move)
        yield from self._refine()

    @property
    def _known(self) -> dict[Assignment, Outcome]:
        """The latest outcome of every assignment that was tried."""
        return dict(self._asked)

    @property
    def _exposed_share(self) -> float:
        return _exposed_s(self.now) / self.now.makespan_s if self.now.makespan_s > 0 else 0.0

    @property
    def _is_exposed(self) -> bool:
        """Whether the default leaves communication exposed."""
        return _exposed_s(self._first) > EXPOSED * self._first.makespan_s

    def _assignment(self, places: Sequence[Place]) -> Assignment:
        triples = zip(places, self._starts, self._problem.default, strict=True)
        return tuple(default if place == start else place.config for place, start, default in triples)

    def _go(self, words: str, move: Move) -> Generator[Probe, Outcome, None]:
        """Repeats the move while it gains, with fewer collectives where the last ones become exposed."""
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
        """Tries every algorithm and protocol once, then the fastest of each collective together if they differ."""
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
        if self._curves(self._choices(), self._observed()).waits:  # their times contain their waits
            return
        if self._assignment(tried) not in self._known:
            outcome = yield from self._measure(tried, "the fastest implementation of each collective")
            if isinstance(outcome, Measurement):
                now, outcome = self._evened(self.places), self._evened(tried)
                if _gains(now, outcome):
                    self.places, self.now = tried, outcome

    def _evened(self, places: Sequence[Place]) -> Measurement:
        """The measurement of these places, without the factor by which it was slow as a whole."""
        assignment, observed = self._assignment(places), self._observed()
        outcome = self._known[assignment]
        assert isinstance(outcome, Measurement), "a failed measurement has no times"
        if len(observed) < FEWEST_SLOW:
            return outcome
        curves = self._curves(self._choices(), observed)
        number = [each for each, _ in observed].index(assignment)
        return _evened(outcome, curves, number)

    def _refine(self) -> Generator[Probe, Outcome, None]:
        """Tries what the curves expect to gain most; in the end the fastest by them is recommended."""
        choices = self._choices()
        while (observed := self._observed()) and len(observed) >= FEWEST_FITTED:
            curves = self._curves(choices, observed)
            arms = self._clean(curves)
            draws = curves.draws(curves.places(arms))
            best = _fastest(curves, draws[:, 0], [self._mean_evened(curves, arm) for arm in arms])
            self._fitted = arms[best]
            if len(self._asked) >= MOST_MEASURED:
                return
            candidate, reason = self._most_promising(curves, choices, draws[best]), "largest expected gain"
            if candidate is None:
                candidate, reason = self._most_doubtful(arms, draws, best), "re-measuring the best candidates"
            if candidate is None:
                return
            outcome = yield Probe(assignment=candidate, reason=reason, incumbent=self._fitted)
            self._asked.append((candidate, outcome))

    def _observed(self) -> list[tuple[Assignment, Measurement]]:
        """The measurements in order, without failures."""
        return [(tried, outcome) for tried, outcome in self._asked if isinstance(outcome, Measurement)]

    def _clean(self, curves: Curves) -> list[Assignment]:
        """The default, and the assignments with a measurement that was not slow as a whole."""
        clean = [tried for number, (tried, _) in enumerate(self._observed()) if curves.slowed(number) == 1]
        return list(dict.fromkeys((self._problem.default, *clean)))

    def _mean_evened(self, curves: Curves, arm: Assignment) -> Measurement:
        """The first clean measurement of an assignment with the mean makespan of all clean ones.

        If the default has no clean measurement, all of its measurements count.
        """
        repeats = [(number, each) for number, (tried, each) in enumerate(self._observed()) if tried == arm]
        clean = [(number, each) for number, each in repeats if curves.slowed(number) == 1]
        evened = [_evened(each, curves, number) for number, each in clean or repeats]
        return replace(evened[0], makespan_s=fmean(each.makespan_s for each in evened))

    def _most_doubtful(
        self, arms: Sequence[Assignment], draws: npt.NDArray[np.float64], best: int
    ) -> Assignment | None:
        """The best or its strongest rival, whichever has fewer readings; None if no rival may be faster."""
        readings = Counter(tried for tried, _ in self._observed())
        gains = expected_gain(draws, draws[best]) / draws[best, 0]
        gains[[readings[arm] >= MOST_READINGS for arm in arms]] = 0.0
        rival = int(np.argmax(gains))
        if gains[rival] <= LEAST_EXPECTED:
            return None
        return arms[best] if readings[arms[best]] <= readings[arms[rival]] else arms[rival]

    def _curves(
        self, choices: Sequence[Sequence[Setting]], observed: Sequence[tuple[Assignment, Measurement]]
    ) -> Curves:
        settings = {setting.config: setting for own in choices for setting in own}
        for assignment, _ in observed:
            for config, space, start in zip(assignment, self._problem.spaces, self._starts, strict=True):
                settings.setdefault(config, setting_of(config, space.subspace_of(config), start))
        repeats = [
            _sigma_s(each) / each.makespan_s / sqrt(each.num_repeats) for _, each in observed if each.num_repeats > 1
        ]
        sigma = max(LEAST_SIGMA, MEDIAN_TO_MEAN * median(repeats)) if repeats else None
        key = len(observed), tuple(settings)
        if self._fit is None or self._fit[0] != key:
            curves = Curves(list(settings.values()), observed, sigma, stream=self._stream, slowed=self._slowed)
            self._stream, self._slowed = curves.stream, [curves.slowed(number) for number in range(len(observed))]
            self._fit = key, curves
        return self._fit[1]

    def _choices(self) -> list[list[Setting]]:
        """The settings that may be tried, for each collective."""
        is_exposed = self._is_exposed
        settings_by_key: dict[tuple[ConfigSpace, Place, Subspace], list[Setting]] = {}
        chosen = []
        for space, start, place in zip(self._problem.spaces, self._starts, self.places, strict=True):
            key = space, start, place.subspace
            if key not in settings_by_key:
                ways = space.subspaces if is_exposed else dict.fromkeys((start.subspace, place.subspace))
                settings_by_key[key] = [setting for way in ways for setting in settings_of(way, start)]
                most = setting_of(start.default, start.subspace, start).num_channels
                if not is_exposed:
                    settings_by_key[key] = [setting for setting in settings_by_key[key] if setting.num_channels <= most]
            chosen.append(settings_by_key[key])
        return chosen

    def _most_promising(
        self, curves: Curves, choices: Sequence[Sequence[Setting]], incumbent: npt.NDArray[np.float64]
    ) -> Assignment | None:
        """The best expected gain of one setting for all collectives that have it, or for the first or last of them."""
        candidates: dict[Assignment, None] = {}
        measured = {config for assignment, _ in self._observed() for config in assignment}
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
        failed = (tried for tried, outcome in self._asked if not isinstance(outcome, Measurement))
        known = {*self._clean(curves), *failed}
        new = [candidate for candidate in candidates if candidate not in known]
        if not new:
            return None
        draws = curves.draws(curves.places(new))
        gains = expected_gain(draws, incumbent) / incumbent[0]
        gains[np.quantile(draws, RISK, axis=1) > MOST_SLOWER * incumbent[0]] = 0.0
        best = int(np.argmax(gains))
        return new[best] if gains[best] > LEAST_EXPECTED else None

    def _own_settings(
        self,
        curves: Curves,
        choices: Sequence[Sequence[Setting]],
        near: Sequence[Setting],
        starts: Sequence[Assignment],
    ) -> dict[Assignment, None]:
        """Coordinate descent from the best start, one collective after the other, on the curves and draws of them."""
        own = [[each.config for each in settings if any(is_near(each, n) for n in near)] for settings in choices]
        improvements: dict[Assignment, None] = {}
        for draw in range(NUM_DESCENTS):
            expected = curves.expected(curves.places(starts), draw)
            at, best = starts[int(np.argmin(expected))], float(expected.min())
            for j in (j for _ in range(2) for j, configs in enumerate(own) if configs):
                tried = [(*at[:j], config, *at[j + 1 :]) for config in own[j]]
                values = curves.expected(curves.places(tried), draw)
                if values.min() < best * (1 - LEAST_EXPECTED):
                    at, best = tried[int(np.argmin(values))], float(values.min())
                    improvements[at] = None
        return improvements

    def _num_hidden(self) -> int:
        """How many collectives come before those at the end that the default leaves exposed."""
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


def _fastest(curves: Curves, expected: npt.NDArray[np.float64], measured: Sequence[Measurement]) -> int:
    """The fastest arm by the curves among those that were measured to gain; the default (0) if there is none.

    Arms whose measured time is above the fastest by more than the noise explains are left out.
    """
    others = [number for number in range(1, len(measured)) if _gains(measured[0], measured[number])]
    doubt = sqrt(2) * curves.sigma
    most_s = (1 + MOST_ERRORS * doubt) * min((measured[number].makespan_s for number in others), default=0.0)
    others = [number for number in others if measured[number].makespan_s <= most_s]
    least = min((float(expected[number]) for number in others), default=float(expected[0]))
    if least >= (1 - max(LEAST_GAIN, LEAST_ERRORS * doubt)) * expected[0]:
        return 0
    return next(number for number in others if expected[number] <= (1 + LEAST_GAIN) * least)


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


def _of(moved: Sequence[int], num: int) -> str:
    return "all" if len(moved) == num else f"number {', '.join(str(j) for j in moved)}"


def _exposed_s(measured: Measurement) -> float:
    return max(0.0, measured.makespan_s - measured.comp_s)


def _sigma_s(measured: Measurement) -> float:
    """The standard deviation of one repeat's makespan in seconds, from the interquartile range of the few repeats."""
    if measured.num_repeats < 2:
        return 0.0
    return measured.makespan_iqr_s / (IQR_OF_SIGMA * (1 - IQR_LOST / measured.num_repeats))


def _noise_s(old: Measurement, new: Measurement) -> float:
    """The standard error of the difference of two medians."""
    return MEDIAN_TO_MEAN * hypot(*(_sigma_s(each) / sqrt(each.num_repeats) for each in (old, new)))


def _gains(old: Measurement, new: Measurement) -> bool:
    return old.makespan_s - new.makespan_s > max(LEAST_GAIN * old.makespan_s, LEAST_ERRORS * _noise_s(old, new))


def _without_exposed(old: Measurement, new: Measurement, moved: Sequence[int]) -> Sequence[int]:
    """The collectives that may still move after the last ones became exposed; none if that is not why Z rose."""
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
    outcome = yield Probe(assignment=problem.default, reason="the default, the start of the descent")
    if not isinstance(outcome, Measurement):
        return problem.default
    descent = _Descent(problem, outcome)
    yield from descent.run()
    return descent.assignment


class Descent(GroupwiseTuner):
    """Gives up, from the default down, the resources that the makespan does not need."""

    def __init__(self, problems: Problems, *, seed: int = 0) -> None:
        super().__init__(problems, _search)
