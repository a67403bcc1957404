"""AutoCCL: makes every collective as fast as possible, all of a group at once, and ignores the computation.

Xu et al., "AutoCCL: Automated Collective Communication Tuning" (NSDI'25). This follows the implemented search
(gbxu/autoccl, commit a0bf96bf) as the spec describes it, Lagom section 1.5; nothing was copied.

    theirs                        here                       value
    A, P, T subspaces             ConfigSpace.subspaces      at most 40
    TUNER_PRETRAIN_STEPS          num_pretrain               20 over all subspaces
    TUNER_TRAIN_STEPS             num_train                  50 over all subspaces
    TUNER_RETRY                   num_restarts               5
    lr                            0.8 (cur - new) / cur after an improvement, else -1
    k                             max(3, lr * count) nearest neighbours, the farthest of them is tried

Per collective, one subspace after the other: random samples without replacement, then descent from the best of them
over channels, threads, chunk, direction + then -. The search moves to a better neighbour; a failure flips the
direction, then selects the next knob; six failures in a row are convergence and lead to a random restart. A subspace is
abandoned when its best is above 1.5 times the collective's best after a tenth of its descent, or above 3 times after 5
probes. In the end the best of all, the engine's own setting included, is kept. The objective is x_j alone, so the group
can end slower than with the default; no guard is built in.

Departures: one measurement per candidate is the backend's median over its repeats, not the mean of the fastest three
quarters. The engine's own setting is measured once, not once per subspace. Samples are random, theirs are strided or
random. "count" is the number of neighbours in that direction not yet visited. A candidate assignment that cannot run
counts as infinitely slow for every collective that took part, since nothing shows which of them caused it.
"""

from collections.abc import Generator
from dataclasses import dataclass
from math import ceil, inf
from random import Random
from typing import ClassVar, Final

from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.errors import SpaceError
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search, group_random
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Outcome

# AutoCCL's own constants; see the table above.
MAX_SUBSPACES: Final = 40
MIN_NEIGHBOURS: Final = 3
LR_FACTOR: Final = 0.8
NO_LR: Final = -1.0
KNOBS: Final = ("channels", "threads", "chunk")
NUM_KNOBS: Final = len(KNOBS)
FAILURES_TO_CONVERGE: Final = 2 * NUM_KNOBS
"""One failure in either direction of every knob."""

Place = tuple[int, ...]
"""A position on a subspace's lattice."""
Wish = tuple[CommConfig, str]
"""A candidate and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    num_pretrain: int
    num_train: int
    num_restarts: int


@dataclass(slots=True)
class _Best:
    """The fastest configuration of one collective so far."""

    config: CommConfig
    time_s: float


def next_neighbour(
    place: Place, knob: int, direction: int, *, length: int, visited: set[Place], lr: float
) -> Place | None:
    """The neighbour to try along one knob: the farthest of the max(3, lr x count) nearest unvisited; None without any.

    `length` is the number of the knob's values.
    """
    end = length if direction > 0 else -1
    ahead = [(*place[:knob], index, *place[knob + 1 :]) for index in range(place[knob] + direction, end, direction)]
    unvisited = [neighbour for neighbour in ahead if neighbour not in visited]
    if not unvisited:
        return None
    reach = max(MIN_NEIGHBOURS, ceil(lr * len(unvisited)))
    return unvisited[min(reach, len(unvisited)) - 1]


def learning_rate(before_s: float, after_s: float) -> float:
    """0.8 times the relative improvement, 0.8 from a setting that could not run, -1 without improvement."""
    if after_s >= before_s:
        return NO_LR
    return LR_FACTOR if before_s == inf else LR_FACTOR * (before_s - after_s) / before_s


class _Descent:
    """The search of one collective in one subspace."""

    def __init__(self, subspace: Subspace, best: _Best, num_train: int) -> None:
        self._subspace = subspace
        self._overall = best
        self._num_train = num_train
        self._best_s = inf
        self._num_probes = 0
        self._num_trained = 0
        self._visited: set[Place] = set()

    def run(self, start: Place, rng: Random, num_pretrain: int, num_restarts: int) -> Generator[Wish, float, None]:
        """Samples, descends, restarts, until the budget is spent, the space exhausted or the subspace given up."""
        place, time_s = start, inf
        for sample in self._samples(rng, num_pretrain):
            if self._is_hopeless():
                return
            sample_s = yield from self._try(sample, "sample")
            if sample_s < time_s or place not in self._visited:
                place, time_s = sample, sample_s
        if place not in self._visited:
            time_s = yield from self._train(place, "start")
        yield from self._descend(place, time_s)
        for _ in range(num_restarts):
            unvisited = self._samples(rng, 1)
            if self._is_over() or not unvisited:
                return
            time_s = yield from self._train(unvisited[0], "restart")
            yield from self._descend(unvisited[0], time_s)

    def _descend(self, place: Place, time_s: float) -> Generator[Wish, float, None]:
        knob, direction, num_failures, lr = 0, 1, 0, NO_LR
        while num_failures < FAILURES_TO_CONVERGE and not self._is_over():
            length = len(self._subspace.axes[knob])
            neighbour = next_neighbour(place, knob, direction, length=length, visited=self._visited, lr=lr)
            if neighbour is not None:
                neighbour_s = yield from self._train(neighbour, f"{KNOBS[knob]} {'+' if direction > 0 else '-'}")
                lr = learning_rate(time_s, neighbour_s)
                if lr >= 0:
                    place, time_s, num_failures = neighbour, neighbour_s, 0
                    continue
            num_failures += 1
            lr = NO_LR
            if direction < 0:
                knob = (knob + 1) % NUM_KNOBS
            direction = -direction

    def _train(self, place: Place, why: str) -> Generator[Wish, float, float]:
        self._num_trained += 1
        return (yield from self._try(place, why))

    def _try(self, place: Place, why: str) -> Generator[Wish, float, float]:
        config = self._subspace.at(place)
        self._visited.add(place)
        self._num_probes += 1
        time_s = yield config, why
        self._best_s = min(self._best_s, time_s)
        if time_s < self._overall.time_s:
            self._overall.config, self._overall.time_s = config, time_s
        return time_s

    def _is_over(self) -> bool:
        return self._num_trained >= self._num_train or self._is_hopeless()

    def _is_hopeless(self) -> bool:
        late = self._num_trained > 0 and self._num_trained >= self._num_train / 10
        return (late and self._best_s > 1.5 * self._overall.time_s) or (
            self._num_probes >= 5 and self._best_s > 3 * self._overall.time_s
        )

    def _samples(self, rng: Random, number: int) -> list[Place]:
        """Unvisited places, at random."""
        size = len(self._subspace)
        # Enough to find `number` unvisited ones among those drawn.
        drawn = rng.sample(range(size), min(size, number + len(self._visited))) if number else []
        _, threads, chunks = (len(axis) for axis in self._subspace.axes)
        places: list[Place] = [(flat // (threads * chunks), flat // chunks % threads, flat % chunks) for flat in drawn]
        return [place for place in places if place not in self._visited][:number]


def _tune_one(
    space: ConfigSpace, default: CommConfig, best: _Best, rng: Random, options: _Options
) -> Generator[Wish, float, None]:
    """The search of one collective over its subspaces, its own first; keeps `best` up to date."""
    own = space.subspace_of(default)
    subspaces = [own, *(subspace for subspace in space.subspaces if subspace != own)][:MAX_SUBSPACES]
    num_pretrain = ceil(options.num_pretrain / len(subspaces))
    num_train = max(1, options.num_train // len(subspaces))
    for subspace in subspaces:
        descent = _Descent(subspace, best, num_train)
        yield from descent.run(subspace.nearest(default), rng, num_pretrain, options.num_restarts)


def _search(problem: GroupProblem, rng: Random, options: _Options) -> Search:
    native = yield Probe(assignment=problem.default, reason="the engine's own setting")
    bests = [
        _Best(config, inf if isinstance(native, Failure) else native.comm_s[j])
        for j, config in enumerate(problem.default)
    ]
    searches = [
        _tune_one(space, default, best, Random(rng.random()), options)
        for space, default, best in zip(problem.spaces, problem.default, bests, strict=True)
    ]
    wishes: dict[int, Wish] = {j: next(search) for j, search in enumerate(searches)}
    while wishes:
        names = problem.group.comm_names
        outcome = yield Probe(
            assignment=_with_wishes(bests, wishes),
            reason="; ".join(f"{names[j]}: {why}" for j, (_, why) in wishes.items()),
            incumbent=tuple(best.config for best in bests),
        )
        wishes = _advance(searches, wishes, outcome)
    return tuple(best.config for best in bests)


def _with_wishes(bests: list[_Best], wishes: dict[int, Wish]) -> Assignment:
    return tuple(wishes[j][0] if j in wishes else best.config for j, best in enumerate(bests))


def _advance(
    searches: list[Generator[Wish, float, None]], wishes: dict[int, Wish], outcome: Outcome
) -> dict[int, Wish]:
    """Tells each collective its own time; returns the next wishes of those that are not finished."""
    following = {}
    for j in wishes:
        try:
            following[j] = searches[j].send(inf if isinstance(outcome, Failure) else outcome.comm_s[j])
        except StopIteration:
            continue
    return following


OWN_MEASUREMENTS: Final = 1 + 20 + MAX_SUBSPACES + 50
"""The engine's setting, samples (one more per subspace at most, where they do not divide evenly), steps of descent."""


class AutoCcl(GroupwiseTuner):
    """Subspaces and coordinate descent on each collective's own time, unguarded.

    `num_pretrain` random samples and `num_train` steps of descent per collective, shared by its subspaces;
    `num_restarts` per subspace.

    Raises:
        SpaceError: if a number is out of range.
    """

    own_measurements: ClassVar[int] = OWN_MEASUREMENTS
    """What a search takes at most, whatever the number of collectives."""

    def __init__(
        self,
        problems: Problems,
        *,
        seed: int = 0,
        num_pretrain: int = 20,
        num_train: int = 50,
        num_restarts: int = 5,
    ) -> None:
        for name, value, least in (
            ("num_pretrain", num_pretrain, 0),
            ("num_train", num_train, 1),
            ("num_restarts", num_restarts, 0),
        ):
            if value < least:
                raise SpaceError(f"{name} is {value}, must be at least {least}")
        options = _Options(num_pretrain=num_pretrain, num_train=num_train, num_restarts=num_restarts)
        super().__init__(problems, lambda problem: _search(problem, group_random(seed, problem), options))
