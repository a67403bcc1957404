"""From the default down: every collective gives back what it does not need, as long as the makespan falls.

Ours, not a paper's. Lagom climbs from minimal resources and stops where the sum of communication is shorter than the
computation. A running job starts well above that, and where one of several collectives has nothing left to hide behind
(the last bucket of a backward pass, the first layer's gather), sums say "hidden" while the makespan says otherwise. So
here the default is the start, the makespan Z is the judge, and all collectives move at once:

    1. fewer channels, by halves, then smaller chunks, by quarters, for all collectives that have any to give;
    2. where Z does not fall because what is exposed, E = Z - Y, rises by more than the computation Y gains, the last
       collectives stay behind, as many as took that much longer: an in-order stream ends with what is exposed;
    3. where communication is exposed: other algorithms and protocols, each once, the fastest of them for every
       collective by its own time x_j; after the steps down, more channels and larger chunks;
    4. channels between the halves, around what was found.

A knob that has not moved stays the engine's own. Where that is not known (`ConfigSpace.default`), steps down count from
the most that may be asked for, which is then a setting of its own.

A step counts as progress from `LEAST_GAIN` on, or `LEAST_ERRORS` of the difference. Measurements grow with the
logarithm of the number of collectives at most: after `BLAMING_RETREATS` those that move are halved. A group in which
each of many needs something else is left where uniform steps end. Unguarded: the default comes first, and `Guarded`
compares with it.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt
from typing import Final

from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.collective.space import RESOURCE_KNOBS
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search
from lagom_overlap.tuners.problem import IQR_OF_SIGMA, Assignment, GroupProblem, Measurement, Outcome

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

Axis = tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a collective stands: a subspace, and a position on each of its knobs; None: not moved from the default.

    `default` is what a knob that is not moved is asked for as, `own` what that runs with, None where that is not known.
    Threads stay.
    """

    subspace: Subspace
    default: CommConfig
    own: CommConfig
    channel: int | None
    chunk: int | None
    thread: int | None

    @property
    def config(self) -> CommConfig:
        way, default = self.subspace, self.default
        return CommConfig(
            algorithm=way.algorithm,
            protocol=way.protocol,
            transport=way.transport,
            num_channels=default.num_channels if self.channel is None else way.num_channels[self.channel],
            num_threads=default.num_threads if self.thread is None else way.num_threads[self.thread],
            chunk_bytes=default.chunk_bytes if self.chunk is None else way.chunk_bytes[self.chunk],
        )

    @property
    def _is_in_one_piece(self) -> bool:
        """The default is known to send the message in a piece that no slice is as large as: it takes one channel."""
        return self.chunk is None and self.default.chunk_bytes is None and self.own.chunk_bytes is not None

    def channels_times(self, factor: float) -> "_Place":
        if self._is_in_one_piece:
            return self
        moved = _moved(self.subspace.num_channels, self.channel, self.own.num_channels, factor)
        return replace(self, channel=moved)

    def chunk_times(self, factor: float) -> "_Place":
        return replace(self, chunk=_moved(self.subspace.chunk_bytes, self.chunk, self.own.chunk_bytes, factor))

    def most_channels(self) -> "_Place":
        """Where the default's are not known to be the most."""
        return replace(self, channel=_top(self.subspace.num_channels, self.channel, self.own.num_channels))

    def largest_chunk(self) -> "_Place":
        """Where the default's is not known to be the largest."""
        return replace(self, chunk=_top(self.subspace.chunk_bytes, self.chunk, self.own.chunk_bytes))

    def sliced(self) -> "_Place":
        """A message that goes in one piece, cut, and on twice the channels."""
        return self.chunk_times(1 / 4).channels_times(2) if self._is_in_one_piece else self

    def is_counted_from_the_most(self, moved: "_Place") -> bool:
        """Whether the way to another place began at a default that is not known."""
        ends = (
            (self.channel, self.own.num_channels, moved.channel, self.subspace.num_channels),
            (self.chunk, self.own.chunk_bytes, moved.chunk, self.subspace.chunk_bytes),
        )
        return any(at is None and own is None and to not in {None, len(axis) - 1} for at, own, to, axis in ends)


def _moved(axis: Axis, at: int | None, own: int | None, factor: float) -> int | None:
    """The position of the value nearest to a multiple, one further at least; where it is where there is none.

    What is not known counts as the most.
    """
    now = own if at is None else axis[at]
    if now is None:
        now = axis[-1]
    if now is None:
        return at
    beyond = [index for index, value in enumerate(axis) if value and (value < now if factor < 1 else value > now)]
    return min(beyond, key=lambda index: abs((axis[index] or 1) / (now * factor) - 1), default=at)


def _top(axis: Axis, at: int | None, own: int | None) -> int | None:
    return len(axis) - 1 if at is None and own is None and axis[-1] is not None else at


def _start(space: ConfigSpace, default: CommConfig) -> _Place:
    """Where the default is."""
    subspace = space.subspace_of(default)
    # What is known of an untouched call is of that call alone.
    known = space.default if default.is_untouched else default
    at = [_position(axis, getattr(known, knob)) for knob, axis in zip(RESOURCE_KNOBS, subspace.axes, strict=True)]
    if not subspace.has_way_of(default):  # its knobs are those of another algorithm
        at = _nearest(subspace, default)
    return _Place(subspace=subspace, default=default, own=known, channel=at[0], thread=at[1], chunk=at[2])


def _position(axis: Axis, value: int | None) -> int | None:
    return axis.index(value) if value is not None and value in axis else None


def _nearest(subspace: Subspace, config: CommConfig) -> list[int | None]:
    """The positions nearest to a configuration; None for a knob that it leaves to the engine."""
    found = zip(RESOURCE_KNOBS, subspace.nearest(config), strict=True)
    return [None if getattr(config, knob) is None else index for knob, index in found]


Move = Callable[[_Place], _Place]
STEPS: Final[tuple[tuple[str, Move], ...]] = (
    ("half the channels", lambda place: place.channels_times(1 / 2)),
    ("a quarter of the chunk", lambda place: place.chunk_times(1 / 4)),
)
FASTER: Final[tuple[tuple[str, Move], ...]] = (
    ("slices of a quarter, twice the channels", _Place.sliced),
    ("the most channels", _Place.most_channels),
    ("the largest chunk", _Place.largest_chunk),
    ("twice the channels", lambda place: place.channels_times(2)),
    ("four times the chunk", lambda place: place.chunk_times(4)),
)
BETWEEN: Final[tuple[tuple[str, Move], ...]] = (
    ("channels between, more", lambda place: place.channels_times(sqrt(2))),
    ("channels between, fewer", lambda place: place.channels_times(sqrt(1 / 2))),
)


class _Descent:
    """One group: where every collective stands, what that took."""

    def __init__(self, problem: GroupProblem, measured: Measurement) -> None:
        self._problem = problem
        self._starts = [_start(space, own) for space, own in zip(problem.spaces, problem.default, strict=True)]
        self._known: dict[Assignment, Outcome] = {problem.default: measured}
        self.places = list(self._starts)
        self.now = measured

    @property
    def assignment(self) -> Assignment:
        return self._assignment(self.places)

    def run(self) -> Generator[Probe, Outcome, None]:
        if self._exposed_share > EXPOSED:
            yield from self._other_ways()
        for words, move in (*STEPS, *(FASTER if self._exposed_share > EXPOSED else ()), *BETWEEN):
            yield from self._go(words, move)

    @property
    def _exposed_share(self) -> float:
        return _exposed_s(self.now) / self.now.makespan_s if self.now.makespan_s > 0 else 0.0

    def _assignment(self, places: Sequence[_Place]) -> Assignment:
        held = zip(places, self._starts, self._problem.default, strict=True)
        return tuple(default if place == start else place.config for place, start, default in held)

    def _go(self, words: str, move: Move) -> Generator[Probe, Outcome, None]:
        """The move again and again while it gains, with fewer collectives where the last ones become exposed."""
        chosen: Sequence[int] = range(len(self.places))
        num_retreats = 0
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
            if _gains(self.now, outcome):
                self.places, self.now, chosen = tried, outcome, moved
            else:
                chosen = _without_exposed(self.now, outcome, moved)
                if num_retreats >= BLAMING_RETREATS:
                    chosen = chosen[: len(moved) // 2]
                num_retreats += 1

    def _other_ways(self) -> Generator[Probe, Outcome, None]:
        """Every algorithm and protocol once; then what was fastest for each collective, if that is a mixture."""
        base, fastest = list(self.places), list(zip(self.places, self.now.comm_s, strict=True))
        for index in range(max(len(space.subspaces) for space in self._problem.spaces)):
            tried = [_in_way(space, index, place) for space, place in zip(self._problem.spaces, base, strict=True)]
            if tried == base:
                continue
            outcome = yield from self._measure(tried, f"other algorithms and protocols, number {index}")
            if not isinstance(outcome, Measurement):
                continue
            fastest = [
                min(best, (place, comm_s), key=lambda pair: pair[1])
                for best, place, comm_s in zip(fastest, tried, outcome.comm_s, strict=True)
            ]
            if _gains(self.now, outcome):
                self.places, self.now = tried, outcome
        tried = [place for place, _ in fastest]
        if self._assignment(tried) not in self._known:
            outcome = yield from self._measure(tried, "for every collective what was fastest")
            if isinstance(outcome, Measurement) and _gains(self.now, outcome):
                self.places, self.now = tried, outcome

    def _measure(self, places: Sequence[_Place], reason: str) -> Generator[Probe, Outcome, Outcome]:
        assignment = self._assignment(places)
        if assignment not in self._known:
            self._known[assignment] = yield Probe(assignment=assignment, reason=reason, incumbent=self.assignment)
        return self._known[assignment]


def _of(moved: Sequence[int], num: int) -> str:
    return "all" if len(moved) == num else f"number {', '.join(str(j) for j in moved)}"


def _in_way(space: ConfigSpace, index: int, place: _Place) -> _Place:
    """A place of a subspace with about the same resources; where the collective has fewer subspaces, as it is."""
    if index >= len(space.subspaces) or space.subspaces[index] == place.subspace:
        return place
    subspace = space.subspaces[index]
    channel, thread, chunk = _nearest(subspace, place.config)
    return replace(place, subspace=subspace, channel=channel, thread=thread, chunk=chunk)


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
