"""AutoCCL: make every collective as fast as it gets, all of a group at once; computation is not looked at.

Xu et al., "AutoCCL: Automated Collective Communication Tuning" (NSDI'25), after its public sources (gbxu/autoccl,
commit a0bf96bf, files of `ext-tuner/example/src`). This is a description of theirs; nothing was copied.

    theirs                        here                 value, file
    Candidate                     a row of `_Lattice`  NC, NT, C, rounds, bytes of the last (cuda/collectives/*.h)
    NcclCombinedJob               `_tune_one`          one round of each subspace of A, P, T in turn
    CoDesJob                      `_Subspace`          include/jobs/coordinate_descent_job.h
    findKCandidatesWithAxis       `farthest_near`      misc/math.h
    TUNER_PRETRAIN_STEPS          num_pretrain         20 over all subspaces, at least 1 in each
    TUNER_TRAIN_STEPS             num_train            50 over all subspaces, at least 1 in each
    TUNER_RETRY                   num_retries          5
    TUNER_ACCESS_TOPK             TOP_K                3
    lr                            `_lr`                0.8 (current - new) / current after an improvement, else -1

The first round of a subspace are its samples: every stride-th candidate from a random one on, or random ones where
that misses a candidate less often. The descent begins at the best of them, over channels, threads, chunk, direction +
then -. The neighbours in a direction are all candidates not yet measured in the half-space ahead, whatever their other
knobs. They are ordered by how far ahead they are, then by the angle to the axis, in the knobs' own units. Of the
k = max(3, lr count) nearest the three farthest are measured, in one round, and the best of them is moved to. Where none
is better the direction flips, then the knob; the sixth failure in a row jumps to a random candidate. The count of
failures is not reset by a jump, so that only an improvement makes a further jump possible. The fifth retry ends the
search: the start and three jumps are followed to their ends, the fourth jump is one measurement.

A subspace is given up when its best is above 1.5 times the best of all that are finished (the engine's own setting to
begin with) once more than a tenth of its descent is done; before that, above 3 times, after five steps of the descent.
What is kept is the fastest of all that was measured, the engine's own setting included. The objective is x_j alone, so
the group can end slower than with the default; no guard is built in.

Departures: theirs drops five calls to warm up, and measures a candidate `TUNER_PROFILE_REPEAT` times; here the backend
does both, and a measurement is its median. Theirs runs the best of a finished subspace ten more times. Equal
collectives of a communicator are one task there; here each is tuned apart, since a trial sets each call of a step. A
candidate that cannot run, which theirs does not generate, counts as infinitely slow for every collective of the trial,
since nothing says whose fault it was.
"""

from collections.abc import Generator
from dataclasses import dataclass
from math import ceil, inf
from random import Random
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from lagom_overlap.collective import (
    Algorithm,
    Collective,
    CollectiveKind,
    CommConfig,
    ConfigSpace,
    Protocol,
    Subspace,
    Transport,
)
from lagom_overlap.errors import SpaceError
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search, group_random
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem

MAX_SUBSPACES: Final = 40
"""`NcclCombinedJob` lists as many."""
TOP_K: Final = 3
"""`TUNER_ACCESS_TOPK`."""
LR_FACTOR: Final = 0.8
"""Of the relative gain of a step: `lr` above."""
NO_LR: Final = -1.0
"""No step has gained yet."""
KNOBS: Final = ("channels", "threads", "chunk")
FAILURES_TO_JUMP: Final = 2 * len(KNOBS)
"""Both directions of every knob without a gain: the climb begins elsewhere."""
BEST_SHARE: Final = 0.75
"""Of the measurements of a candidate the fastest count (`meanOfTopPercent`)."""
TOO_SLOW: Final = 1.5
"""Times the best so far: where a subspace is given up (`callSubjobs`)..."""
FAR_TOO_SLOW: Final = 3.0
"""...and where before a tenth of its descent is done."""
EARLY_STEPS: Final = 5
"""Steps of a descent before the latter may end it."""

Floats = npt.NDArray[np.float64]
Wish = tuple[CommConfig, str]
"""A candidate and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    num_pretrain: int
    num_train: int
    num_retries: int


def last_round(
    collective: Collective, algorithm: Algorithm | None, channels: Floats, chunk_bytes: Floats
) -> tuple[Floats, Floats]:
    """How often a collective goes round its chunks, and what a channel moves the last time (bytes).

    A ring that reduces everywhere goes round all ranks at a time. Sizes are those of a rank.
    """
    per_rank = collective.num_bytes
    if collective.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        per_rank //= collective.num_ranks
    rings = collective.kind is CollectiveKind.ALL_REDUCE and algorithm is not Algorithm.TREE
    parts = channels * (collective.num_ranks if rings else 1)
    return np.ceil(per_rank / (parts * chunk_bytes)), per_rank % (parts * chunk_bytes) // parts


class _Lattice:
    """The candidates of a subspace in the order of theirs, each a vector in the knobs' own units."""

    def __init__(self, subspace: Subspace, collective: Collective) -> None:
        axes = [np.array([value or 0 for value in axis], float) for axis in subspace.axes]
        knobs = [values.ravel() for values in np.meshgrid(*axes, indexing="ij")]
        channels, _, chunk_bytes = knobs
        if channels.all() and chunk_bytes.all():
            knobs += last_round(collective, subspace.algorithm, channels, chunk_bytes)
        self._points = np.stack(knobs, axis=1)

    def farthest_near(self, place: int, knob: int, direction: int, rest: npt.NDArray[np.bool_], lr: float) -> list[int]:
        """The candidates to measure next: of the k nearest in a direction the three farthest, the farthest first.

        `rest` says which candidates may be measured.
        """
        away = self._points - self._points[place]
        ahead = direction * away[:, knob]
        numbers = np.flatnonzero(rest & (ahead > 0))
        k = max(TOP_K, int(lr * len(numbers)))
        lengths = ahead[numbers]
        cosines = lengths / np.sqrt((away[numbers] ** 2).sum(axis=1))
        nearest = numbers[np.lexsort((numbers, np.arccos(np.minimum(cosines, 1.0)), lengths))[:k]]
        return [int(number) for number in nearest[::-1][:TOP_K]]


class _Subspace:
    """The search of one collective in one subspace: rounds of candidates, the next when all of a round were measured.

    `why` says what a round is of. `optimum_at` is how many were measured when the optimum was last looked for.
    """

    def __init__(
        self, subspace: Subspace, collective: Collective, options: _Options, num_subspaces: int, rng: Random
    ) -> None:
        self.subspace, self._rng = subspace, rng
        self._lattice = _Lattice(subspace, collective)
        self._num = len(subspace)
        self.num_pretrain = max(options.num_pretrain // num_subspaces, 1)
        self.num_train = max(options.num_train // num_subspaces, 1)
        self._num_retries = options.num_retries
        self._rest = np.ones(self._num, bool)
        self._times: dict[int, list[float]] = {}
        # Whichever misses a candidate less often; a single sample, and more samples than candidates, are random ones.
        missed = (self._num - self.num_pretrain) / self._num if self._num > self.num_pretrain else 1.0
        self._is_random = ((self._num - 1) / self._num) ** self.num_pretrain <= missed
        self._stride = max(self._num // self.num_pretrain, 1)
        self._next_sample = rng.randrange(self._num)
        self._num_asked = 0
        self.is_done = False
        self._is_converged = False
        self.why = ""
        self.optimum_at = 0
        self._optimum = -1
        self._place, self._knob, self._direction = -1, 0, 1
        self._neighbours: list[tuple[int, int, int]] = []  # each with the knob and direction in which it was met
        self._num_failures, self._retry, self._lr = 0, 0, NO_LR

    @property
    def best_s(self) -> float:
        """The time of the fastest candidate when the optimum was last looked for."""
        return self._time_s(self._optimum)

    def next_round(self) -> list[int]:
        """The candidates to measure next; none where the search has just ended."""
        if self.is_done:
            return []
        if self._num_asked < self.num_pretrain and self._rest.any():
            return self._samples()
        self._look_for_optimum()
        if self._num_asked >= self.num_pretrain + self.num_train or not self._rest.any() or self._is_converged:
            self.is_done = True
            return []
        return self._survey_next()

    def take(self, number: int, time_s: float) -> None:
        """The time of a candidate of the round."""
        self._times.setdefault(number, []).append(time_s)

    def _samples(self) -> list[int]:
        samples, self.why = [], "sample"
        while self._num_asked < self.num_pretrain and self._rest.any():
            number = self._next_sample
            if self._is_random:
                number = self._rng.randrange(self._num)
            self._next_sample = (self._next_sample + self._stride) % self._num
            samples.append(number)
            self._count(number)
        return samples

    def _survey_next(self) -> list[int]:
        if self._retry == 0:
            self._place, self._retry = self._optimum, 1
            wanted = self._survey()
        elif self._retry >= self._num_retries:
            self._is_converged = True
            return []
        elif self._moves_on():
            wanted = self._survey()
        else:
            wanted = [self._jump()]  # the neighbours before it stay what the next look compares with
        wanted = wanted[: self.num_pretrain + self.num_train - self._num_asked]
        for number in wanted:
            self._count(number)
        return wanted

    def _survey(self) -> list[int]:
        self._neighbours = []
        while True:
            wanted = self._lattice.farthest_near(self._place, self._knob, self._direction, self._rest, self._lr)
            if not wanted and not self._moves_on():
                wanted = [self._jump()]
            elif wanted:
                self.why = f"{KNOBS[self._knob]} {'+' if self._direction > 0 else '-'}"
            if wanted:
                self._neighbours = [(number, self._knob, self._direction) for number in wanted]
                return wanted

    def _moves_on(self) -> bool:
        """Moves to the best neighbour, else turns; False where the descent has come to its end."""
        current_s = self._time_s(self._place)
        best_s, better = current_s, None
        for neighbour in self._neighbours:
            time_s = self._time_s(neighbour[0])
            if time_s < best_s:
                best_s, better = time_s, neighbour
        if better is not None:
            gain = 1.0 if current_s == inf else (current_s - best_s) / current_s
            self._lr = gain * LR_FACTOR
            # After a jump the neighbours are still those before it: a better one of them is gone back to.
            (self._place, self._knob, self._direction), self._num_failures = better, 0
        else:
            self._num_failures += 1
            self._lr = NO_LR
            if self._direction < 0:
                self._knob = (self._knob + 1) % len(KNOBS)
            self._direction = -self._direction
        return self._num_failures != FAILURES_TO_JUMP

    def _jump(self) -> int:
        rest, self.why = np.flatnonzero(self._rest), "jump"
        self._place = int(rest[self._rng.randrange(self._num) % len(rest)]) if len(rest) else self._optimum
        self._knob, self._direction = 0, 1
        self._retry += 1
        return self._place

    def _count(self, number: int) -> None:
        self._rest[number] = False
        self._num_asked += 1

    def _look_for_optimum(self) -> None:
        self._optimum = min(sorted(self._times), key=self._time_s)
        self.optimum_at = sum(map(len, self._times.values()))

    def _time_s(self, number: int) -> float:
        times = sorted(self._times[number])
        fastest = times[: ceil(BEST_SHARE * len(times))]
        return sum(fastest) / len(fastest)


def _in_their_order(space: ConfigSpace) -> list[Subspace]:
    """The subspaces by algorithm, protocol and transport as NCCL numbers them; those without a name come last."""

    def place(subspace: Subspace) -> tuple[int, ...]:
        algorithm, protocol, transport = subspace.algorithm, subspace.protocol, subspace.transport
        return (
            len(Algorithm) if algorithm is None else list(Algorithm).index(algorithm),
            len(Protocol) if protocol is None else list(Protocol).index(protocol),
            len(Transport) if transport is None else list(Transport).index(transport),
        )

    return sorted(space.subspaces, key=place)[:MAX_SUBSPACES]


def _tune_one(
    space: ConfigSpace, collective: Collective, native_s: float, rng: Random, options: _Options
) -> Generator[Wish, float, None]:
    """The search of one collective: a round of each subspace in turn until all are done."""
    named = _in_their_order(space)
    searches = [_Subspace(subspace, collective, options, len(named), rng) for subspace in named]
    finished_s = native_s
    while any(not search.is_done for search in searches):
        for search in searches:
            if search.is_done:
                continue
            wanted = search.next_round()
            if search.optimum_at:
                if search.is_done:
                    finished_s = min(finished_s, search.best_s)
                else:
                    search.is_done = _is_hopeless(search, finished_s)
            if all(search.is_done for search in searches):
                return  # a round of the last one, given up just now, is dropped
            for number in wanted:  # of any other that was given up just now, too: theirs has handed them out
                search.take(number, (yield search.subspace.at_number(number), search.why))


def _is_hopeless(search: _Subspace, finished_s: float) -> bool:
    steps = search.optimum_at - search.num_pretrain
    if steps > search.num_train / 10:
        return search.best_s > TOO_SLOW * finished_s
    return steps > EARLY_STEPS and search.best_s > FAR_TOO_SLOW * finished_s


def _search(problem: GroupProblem, rng: Random, options: _Options) -> Search:
    native = yield Probe(assignment=problem.default, reason="the engine's own setting")
    bests = [
        (config, inf if isinstance(native, Failure) else native.comm_s[j]) for j, config in enumerate(problem.default)
    ]
    searches = [
        _tune_one(space, comm.collective, native_s, Random(rng.random()), options)
        for space, comm, (_, native_s) in zip(problem.spaces, problem.group.comms, bests, strict=True)
    ]
    wishes: dict[int, Wish] = {j: next(search) for j, search in enumerate(searches)}
    while wishes:
        names = problem.group.comm_names
        outcome = yield Probe(
            assignment=tuple(wishes[j][0] if j in wishes else best for j, (best, _) in enumerate(bests)),
            reason="; ".join(f"{names[j]}: {why}" for j, (_, why) in wishes.items()),
            incumbent=_configs(bests),
        )
        following = {}
        for j, (config, _) in wishes.items():
            time_s = inf if isinstance(outcome, Failure) else outcome.comm_s[j]
            if time_s < bests[j][1]:
                bests[j] = config, time_s
            try:
                following[j] = searches[j].send(time_s)
            except StopIteration:
                continue
        wishes = following
    return _configs(bests)


def _configs(bests: list[tuple[CommConfig, float]]) -> Assignment:
    return tuple(config for config, _ in bests)


NUM_PRETRAIN: Final = 20
"""`TUNER_PRETRAIN_STEPS`: samples of all subspaces together."""
NUM_TRAIN: Final = 50
"""`TUNER_TRAIN_STEPS`: steps of all together."""
OWN_MEASUREMENTS: Final = 1 + max(
    num * (max(NUM_PRETRAIN // num, 1) + max(NUM_TRAIN // num, 1)) for num in range(1, MAX_SUBSPACES + 1)
)
"""The engine's setting, samples and steps: 71, and 81 where there are as many subspaces as there may be."""


class AutoCcl(GroupwiseTuner):
    """AutoCCL: coordinate descent on each collective's own time, unguarded: may end slower than the default.

    `num_pretrain` samples and `num_train` steps of descent per collective are shared by its subspaces. In each of them
    the start and `num_retries` - 2 jumps are followed, and one more is measured.

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
        num_pretrain: int = NUM_PRETRAIN,
        num_train: int = NUM_TRAIN,
        num_retries: int = 5,
    ) -> None:
        for name, value in (("num_pretrain", num_pretrain), ("num_train", num_train), ("num_retries", num_retries)):
            if value < 1:
                raise SpaceError(f"{name} is {value}, must be at least 1")
        options = _Options(num_pretrain=num_pretrain, num_train=num_train, num_retries=num_retries)
        super().__init__(problems, lambda problem: _search(problem, group_random(seed, problem), options))
