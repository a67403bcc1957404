"""Lagom: climb from minimal resources, the collective with the cheapest gain first, until communication is hidden.

Xu et al., "Lagom: Unleashing the Power of Communication and Computation Overlapping for Distributed LLM Training"
(arXiv 2602.20656v1), sections 3.3 and 3.4: Eq. 7, Algorithms 1 and 2.

    paper        here                          unit
    s_j          a CommConfig                  -
    x_j          Measurement.comm_s[j]         s
    X, Y, Z      total_comm_s, comp_s, makespan_s   s
    H_j          metric                        s of computation per s of communication
    lr           the step                      share of the normalised range
    NC, NT, C    num_channels, num_threads, chunk_bytes

`mode="printed"` runs the algorithms as printed instead (`lagom_printed.py`), which end only at their input.
`mode="paper"` is the search that the paper means, with no more departures than it takes to run: rows 1 to 11 and 13 to
16 below. X' < Y' ends a group whatever Z is, and a trial that was given up for its slowness counts as read, since the
paper gives none up. The default, `"repaired"`, also has row 12's look at Z, and skips what was given up.

Departures, by row of the spec's table of readings (the algorithms as printed do not run):
 1. step = clip(|x - x'| / x, min_step, 1), positive; the printed one is negative when communication improves and
    divides by x'. Used by `step="lr"` only.
 2. The step is applied to normalised coordinates, log2 of channels and linear chunk, rounded up to the lattice and at
    least one position in each.
 3. Default `step="ladder"`: the smallest joint step, one more value of each knob, or one of two readings of the two
    pairs that the paper reports (`ladder.py`; every reason names it). `"lr"` can jump over the balance.
 4. The number of threads stays fixed: the option `num_threads`, else the default's, else 128 (nearest allowed). The
    paper names NT among what is tuned and never says how it moves; with `climbs_threads` it takes its next value at
    each rung as the other two do, from the least on.
 5. Before its first probe x_j is infinite: the corner of minimal resources cannot "regress", and the first step is
    one rung, never a quotient.
 6. The measured and the next configuration are kept apart: propose, measure, judge.
 7. H = max(0, Y' - Y) / (x - x'), cost per gain, smallest first; without gain it is infinite. As printed, an
    improvement has negative H and argmin picks the worst trade-off.
 8. A collective that was not probed yet comes first, ties by index; the printed initial H = 0.01 is not used. The
    corner is measured once and gives every x_j.
 9. argmin over the collectives, not over M.
10. An accepted step replaces s_j, and with it all x, X, Y.
11. A step that slows the collective is undone and ends it; where X' < Y' the better by measured Z of both is kept.
12. X' < Y' ends all collectives, since X is the group's: more resources can only lengthen Y. That takes all of X to
    overlap all of Y. Where it does not (the last of several collectives, one of several alike windows, has nothing left
    to hide behind), sums say "hidden" and Z does not: unless Z is Y up to `HIDDEN` and noise, the climb goes on, and
    from there on a step that lengthens Z is undone and ends its collective.
13. All start at the minimum; the default is measured first (the "+1" in the paper's 33) but never recommended because
    of that: this search runs unguarded and can end worse than the default. `Guarded` adds that promise.
14. Slower means x' > x (1 + 2 sigma / sqrt(k)), sigma from the interquartile range of the repeats (0 for one run).
15. A climb ends at the most channels and the largest chunk of the space.
16. Subspaces (A, P, T): each is measured once at the default's channels and chunk, and the climb runs in the one with
    the smallest Z; what it finds is measured again in the second at the end. With `num_subspaces` others are climbed
    too, in that order. Where collectives differ in subspaces, one
    that lacks the tried (A, P, T) stays in its default's.
Rows 17 to 22 concern groups, keys and the cost model, not this module; row 23 (drift) is not done here.
Ours: a configuration that fails counts as a regression; if the corner fails, all collectives rise together until one
assignment runs. What was given up is never recommended, in no mode.
"""

import logging
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log2, sqrt
from typing import Final

from lagom_overlap.collective import CommConfig, Subspace
from lagom_overlap.errors import SpaceError, UnknownNameError
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search
from lagom_overlap.tuners.ladder import Ladder, ladder_named, rungs
from lagom_overlap.tuners.lagom_printed import printed
from lagom_overlap.tuners.problem import IQR_OF_SIGMA, Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.units import format_bytes

MODES: Final = ("repaired", "paper", "printed")
STEPS: Final = ("ladder", "lr")
PAPER_NUM_THREADS: Final = 128
"""The number of threads of the paper's Fig. 3."""
LEAST_STEP: Final = 1e-6
"""The smallest allowed `min_step`, far above the slack of 1e-12 in rounding up."""
HIDDEN: Final = 0.01
"""A makespan that exceeds the computation by more than this share shows exposed communication (row 12). Chosen, not
measured."""

_log: Final = logging.getLogger(__name__)

Place = tuple[int, int]
"""A position on the lattice: (channels, chunk); threads are fixed."""
Choice = tuple[Subspace, ...]
"""One subspace per collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    step: str
    ladder: Ladder
    num_threads: int | None
    climbs_threads: bool
    min_step: float
    num_subspaces: int
    is_paper: bool

    def read(self, outcome: Outcome) -> Outcome:
        """The outcome as the search counts it: in mode "paper" a trial that was given up counts as measured."""
        given_up = outcome.measured if isinstance(outcome, Failure) and self.is_paper else None
        return outcome if given_up is None else given_up

    def is_hidden(self, measured: Measurement) -> bool:
        """Whether communication is shorter than computation, and the makespan does not say otherwise (row 12)."""
        if measured.total_comm_s >= measured.comp_s:
            return False
        return self.is_paper or measured.makespan_s <= measured.comp_s * (1 + HIDDEN + _slack(measured, measured))

    def threads_place(self, subspace: Subspace, default: CommConfig) -> int:
        wanted = self.num_threads or default.num_threads or PAPER_NUM_THREADS
        return subspace.nearest(CommConfig(num_threads=wanted))[1]


def _coordinates(subspace: Subspace) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Each axis in [0, 1]: log2 of the channels, linear chunk; a single value is at the top."""
    channels = [log2(value or 1) for value in subspace.num_channels]
    chunks = [float(value or 0) for value in subspace.chunk_bytes]

    def normalised(axis: list[float]) -> tuple[float, ...]:
        span = axis[-1] - axis[0]
        return tuple((value - axis[0]) / span for value in axis) if span else (1.0,)

    return normalised(channels), normalised(chunks)


class _Climb:
    """One collective's way up: where it stands (measured), and where it would go next."""

    def __init__(self, subspace: Subspace, threads_place: int, options: _Options) -> None:
        self.subspace = subspace
        self.place: Place = (0, 0)
        self.metric: float | None = None
        self.done = False
        self._threads_place = threads_place
        self._options = options
        self._path = rungs(subspace, options.ladder)
        self._step: float | None = None

    def config(self, place: Place) -> CommConfig:
        threads = self._threads_place
        if self._options.climbs_threads:
            threads = min(self._path.index(place), len(self.subspace.num_threads) - 1)
        return self.subspace.at((place[0], threads, place[1]))

    def next_place(self) -> Place | None:
        """The place after the present one; None at the top."""
        top = (len(self.subspace.num_channels) - 1, len(self.subspace.chunk_bytes) - 1)
        if self.place == top:
            return None
        if self._options.step == "ladder" or self._step is None:
            index = self._path.index(self.place)
            return self._path[index + 1]
        return self._after_step(self._step, top)

    def accept(self, place: Place, before_s: float, after_s: float, cost_s: float) -> None:
        """Moves to a measured place: from x = `before_s` to x' = `after_s`, computation longer by `cost_s`."""
        gain_s = before_s - after_s
        self.metric = max(0.0, cost_s) / gain_s if gain_s > 0 else inf
        share = abs(gain_s) / before_s if before_s > 0 else 0.0
        self._step = min(1.0, max(self._options.min_step, share))
        self.place = place

    def _after_step(self, step: float, top: Place) -> Place:
        # The step is above the slack, so this is at least one position where there is one.
        reached = []
        for coordinates, now, last in zip(_coordinates(self.subspace), self.place, top, strict=True):
            wanted = coordinates[now] + step - 1e-12
            reached.append(next((index for index, value in enumerate(coordinates) if value >= wanted), last))
        return reached[0], reached[1]


def _slack(old: Measurement, new: Measurement) -> float:
    """2 sigma / sqrt(k) of the noisier measurement, as a share of the makespan (row 14)."""

    def relative(measured: Measurement) -> float:
        if measured.makespan_s <= 0:
            return 0.0
        return 2 * measured.makespan_iqr_s / IQR_OF_SIGMA / measured.makespan_s / sqrt(measured.num_repeats)

    return max(relative(old), relative(new))


def _words(config: CommConfig) -> str:
    chunk = "" if config.chunk_bytes is None else f", chunk {format_bytes(config.chunk_bytes)}"
    channels = "channels left alone" if config.num_channels is None else f"{config.num_channels} channels"
    return f"{channels}{chunk}"


def _assignment(climbs: Iterable[_Climb]) -> Assignment:
    return tuple(climb.config(climb.place) for climb in climbs)


class _Group:
    """Algorithm 1 over the collectives of one group, inside one choice of subspaces."""

    def __init__(self, problem: GroupProblem, choice: Choice, options: _Options) -> None:
        self._names = problem.group.comm_names
        self._climbs = [
            _Climb(subspace, options.threads_place(subspace, default), options)
            for subspace, default in zip(choice, problem.default, strict=True)
        ]
        self._options = options
        self._how = f"ladder {options.ladder.name}" if options.step == "ladder" else "step lr"

    def run(self) -> Generator[Probe, Outcome, tuple[Assignment, Measurement] | None]:
        """Climbs; returns the assignment and its measurement, None if none ran."""
        now = yield from self._start()
        if now is None:
            return None
        while not self._options.is_hidden(now):
            open_ = [j for j, climb in enumerate(self._climbs) if not climb.done]
            if not open_:
                break
            chosen = min(open_, key=lambda j: (self._priority(j), j))
            place = self._climbs[chosen].next_place()
            if place is None:
                self._climbs[chosen].done = True
                continue
            now, hidden = yield from self._step(chosen, place, now)
            if hidden:
                break
        return _assignment(self._climbs), now

    def _priority(self, index: int) -> float:
        metric = self._climbs[index].metric
        return -inf if metric is None else metric

    def _metrics(self) -> dict[str, float]:
        pairs = zip(self._names, self._climbs, strict=True)
        return {name: climb.metric for name, climb in pairs if climb.metric is not None and climb.metric < inf}

    def _start(self) -> Generator[Probe, Outcome, Measurement | None]:
        """The corner of minimal resources; where it cannot run, the next rung of all together."""
        reason = "all collectives at minimal resources"
        while True:
            outcome = self._options.read((yield Probe(assignment=_assignment(self._climbs), reason=reason)))
            if isinstance(outcome, Measurement):
                return outcome
            ways = [(climb, place) for climb in self._climbs if (place := climb.next_place()) is not None]
            if not ways:
                return None
            for climb, place in ways:
                climb.place = place
            reason = "the last step cannot run: all collectives one rung up"

    def _step(self, index: int, place: Place, now: Measurement) -> Generator[Probe, Outcome, tuple[Measurement, bool]]:
        """Algorithm 2 for one collective: the measurement that holds now, and whether communication is hidden."""
        climb = self._climbs[index]
        incumbent = _assignment(self._climbs)
        tried = (*incumbent[:index], climb.config(place), *incumbent[index + 1 :])
        why = "not probed yet" if climb.metric is None else f"smallest H = {climb.metric:.3g}"
        outcome = yield Probe(
            assignment=tried,
            reason=f"{self._names[index]}: {_words(tried[index])} ({self._how}; {why})",
            incumbent=incumbent,
            priorities=self._metrics(),
        )
        outcome = self._options.read(outcome)
        if isinstance(outcome, Failure):
            climb.done = True
            return now, False
        before_s, after_s = now.comm_s[index], outcome.comm_s[index]
        if after_s > before_s * (1 + _slack(now, outcome)):
            climb.done = True
            return now, False
        hidden = self._options.is_hidden(outcome)
        if outcome.total_comm_s < outcome.comp_s and outcome.makespan_s > now.makespan_s:
            climb.done = True
            return now, hidden
        climb.accept(place, before_s, after_s, outcome.comp_s - now.comp_s)
        return outcome, hidden


def _choices(problem: GroupProblem) -> list[Choice]:
    """One choice per (A, P, T) that any collective allows, without repeats; the default's own first."""
    own = tuple(space.subspace_of(default) for space, default in zip(problem.spaces, problem.default, strict=True))
    choices = [own]
    for wanted in (subspace for space in problem.spaces for subspace in space.subspaces):
        probe = CommConfig(algorithm=wanted.algorithm, protocol=wanted.protocol, transport=wanted.transport)
        choice = tuple(
            same if _key(same := space.subspace_of(probe)) == _key(wanted) else home
            for space, home in zip(problem.spaces, own, strict=True)
        )
        if choice not in choices:
            choices.append(choice)
    return choices


def _key(subspace: Subspace) -> tuple[object, object, object]:
    return subspace.algorithm, subspace.protocol, subspace.transport


def _near(choice: Choice, wanted: Assignment, threads: Iterable[int]) -> Assignment:
    """Each configuration moved to its nearest place in the chosen subspaces."""
    places = (subspace.nearest(config) for subspace, config in zip(choice, wanted, strict=True))
    return tuple(
        subspace.at((channel, thread, chunk))
        for subspace, (channel, _, chunk), thread in zip(choice, places, threads, strict=True)
    )


def _rank(problem: GroupProblem, options: _Options, default: Outcome) -> Generator[Probe, Outcome, list[Choice]]:
    """The choices of subspaces, best Z at the default's channels and chunk first; those that fail are left out."""
    choices = _choices(problem)
    if len(choices) == 1:
        return choices
    scored: list[tuple[float, int]] = []
    for index, choice in enumerate(choices):
        threads = _threads(choice, problem, options)
        wanted = _near(choice, problem.default, threads)
        outcome = default
        if wanted != problem.default:
            names = "/".join(str(part) for part in _key(choice[0]) if part is not None)
            outcome = yield Probe(assignment=wanted, reason=f"subspace {index} ({names}) at the default's resources")
        if isinstance(outcome, Measurement):
            scored.append((outcome.makespan_s, index))
    return [choices[index] for _, index in sorted(scored)] or choices[:1]


def _climbs(
    problem: GroupProblem, choices: list[Choice], options: _Options
) -> Generator[Probe, Outcome, tuple[Assignment, Measurement] | None]:
    """Climbs in the best subspaces, one after the other; the result with the smallest Z, None if nothing ran."""
    best: tuple[Assignment, Measurement] | None = None
    for choice in choices[: options.num_subspaces or len(choices)]:
        climb = _Group(problem, choice, options).run()
        result = yield from (climb if best is None else _standing_by(climb, best[0]))
        if result is not None and (best is None or result[1].makespan_s < best[1].makespan_s):
            best = result
    return best


def _standing_by(
    climb: Generator[Probe, Outcome, tuple[Assignment, Measurement] | None], best: Assignment
) -> Generator[Probe, Outcome, tuple[Assignment, Measurement] | None]:
    """A later climb whose incumbent is the best of the earlier ones, should the search end during it."""
    try:
        probe = next(climb)
        while True:
            probe = climb.send((yield replace(probe, incumbent=best)))
    except StopIteration as end:
        result: tuple[Assignment, Measurement] | None = end.value
        return result


def _threads(choice: Choice, problem: GroupProblem, options: _Options) -> list[int]:
    pairs = zip(choice, problem.default, strict=True)
    return [options.threads_place(subspace, default) for subspace, default in pairs]


def _search(problem: GroupProblem, options: _Options) -> Search:
    default = yield Probe(assignment=problem.default, reason="the default, as the baseline")
    choices = yield from _rank(problem, options, default)
    best = yield from _climbs(problem, choices, options)
    if best is None:
        return problem.default
    assignment, measured = best
    if options.num_subspaces == 1 and len(choices) > 1:
        threads = _threads(choices[1], problem, options)
        if options.climbs_threads:
            threads = [subspace.nearest(one)[1] for subspace, one in zip(choices[1], assignment, strict=True)]
        other = _near(choices[1], assignment, threads)
        outcome = yield Probe(assignment=other, reason="the result in the second-best subspace", incumbent=assignment)
        if isinstance(outcome, Measurement) and outcome.makespan_s < measured.makespan_s:
            return other
    return assignment


def _printed_search(problem: GroupProblem) -> Search:
    end = yield from printed(problem)
    if end.stopped is not None:
        _log.warning("lagom, mode = printed, group %r: does not run to its end: %s", problem.group.name, end.stopped)
    return end.assignment


class Lagom(GroupwiseTuner):
    """The Lagom paper's Algorithms 1 and 2 with its metric H, unguarded: may end slower than the default.

    `mode` is `"repaired"`, `"paper"` (the paper's search with no more repairs than it takes to run), or `"printed"`: as
    printed, with a warning per group on which they do not end; the other options then have no meaning.

    `step` is `"ladder"` or `"lr"`, `ladder` `"unit"`, `"thirds"` or `"proportional"`; `min_step` bounds lr from below;
    `num_threads` fixes NT, or `climbs_threads` has it climb with the other two. `num_subspaces` is how many subspaces
    are climbed, best first (0: all, as the paper's divide and conquer; a budget ends it anywhere).

    Raises:
        SpaceError: if `min_step`, `num_threads` or `num_subspaces` is out of range, or threads climb with no ladder.
        UnknownNameError: if the mode, the step or the ladder does not exist.
    """

    def __init__(
        self,
        problems: Problems,
        *,
        seed: int = 0,
        mode: str = "repaired",
        step: str = "ladder",
        ladder: str = "unit",
        num_threads: int | None = None,
        climbs_threads: bool = False,
        min_step: float = 0.05,
        num_subspaces: int = 1,
    ) -> None:
        if mode not in MODES:
            raise UnknownNameError.among("mode", mode, MODES)
        if step not in STEPS:
            raise UnknownNameError.among("step", step, STEPS)
        if not LEAST_STEP <= min_step <= 1:
            raise SpaceError(f"min_step is {min_step}, must be between {LEAST_STEP} and 1")
        if num_threads is not None and num_threads < 1:
            raise SpaceError(f"num_threads is {num_threads}, must be at least 1")
        if climbs_threads and (step != "ladder" or num_threads is not None):
            raise SpaceError(f"climbs_threads needs step = 'ladder' (it is {step!r}) and no num_threads")
        if num_subspaces < 0:
            raise SpaceError(f"num_subspaces is {num_subspaces}, must be at least 0 (all)")
        options = _Options(
            step=step,
            ladder=ladder_named(ladder),
            num_threads=num_threads,
            climbs_threads=climbs_threads,
            min_step=min_step,
            num_subspaces=num_subspaces,
            is_paper=mode == "paper",
        )
        search = _printed_search if mode == "printed" else partial(_search, options=options)
        super().__init__(problems, search)
