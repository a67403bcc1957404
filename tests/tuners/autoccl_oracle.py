"""What AutoCCL's public sources measure for one collective: an oracle for the tests of our own implementation.

Written from the facts in the repository gbxu/autoccl, commit a0bf96bf646c23287da66104260dc4c2c5cdfc85, folder
ext-tuner/example/src: include/jobs/job.h, include/jobs/coordinate_descent_job.h, cuda/nccl_combined_job.h, misc/math.h,
include/datatype.h and the candidates of cuda/collectives/{all_gather,all_reduce,reduce_scatter}.h. It shares no code
with the implementation and never should.

One measurement a candidate, no warm-up calls, no runs of a finished subspace's best, one subspace at a time; every
round is measured before the next is asked for (the sources let them overlap). Durations are Python floats, where the
sources have them in single precision. The candidates of a subspace are distinct.
"""

import math
from collections.abc import Callable

Candidate = tuple[int, int, int, int, int]  # channels, threads, chunk bytes, iterations, bytes of the last iteration

KNOBS = 3  # only the first three fields of a candidate are walked along; all five count in an angle
SURVEYED = 3
LEARNING = 0.8


class _Descent:
    """The search of one subspace; candidates are known by their numbers."""

    def __init__(
        self, candidates: list[Candidate], draw: Callable[[int], int], *, pretrain: int, train: int, retries: int
    ) -> None:
        self.candidates = candidates
        self.draw = draw
        self.pretrain = pretrain
        self.budget = pretrain + train
        self.retries = retries

        self.times: dict[int, float] = {}
        self.left = list(range(len(candidates)))  # not yet measured, in generation order
        self.spent = 0
        self.optimum = -1
        self.optimum_after = 0  # how many measurements there were when the optimum was last looked for
        self.converged = False
        self.done = False

        self.starts = 0  # the first start and every jump
        self.here = -1
        self.knob = 0
        self.up = True
        self.ahead: list[tuple[int, int, bool]] = []  # candidates under comparison, each with its knob and direction
        self.failures = 0  # directions in a row without a better point; a jump does not set it back
        self.rate = -1.0

        size = len(candidates)
        missed_at_random = ((size - 1) / size) ** pretrain
        missed_in_strides = (size - pretrain) / size if size > pretrain else 1.0
        self.strided = missed_at_random > missed_in_strides
        self.stride = max(size // pretrain, 1)
        self.cursor = draw(size)  # drawn even when the sampling is random and never looks at it

    def next_round(self) -> list[int]:
        """The candidates to measure now; none if this subspace is done, or has just found that it is."""
        if self.done:
            return []
        if self.spent < self.pretrain and self.left:
            return self._sample()
        self._look_for_optimum()
        if self.spent < self.budget and self.left and not self.converged:
            wanted = self._descend()[: self.budget - self.spent]
            for number in wanted:
                self._spend(number)
            return wanted
        self.done = True
        return []

    def best_time(self) -> float:
        return self.times[self.optimum]

    def _spend(self, number: int) -> None:
        self.spent += 1
        if number in self.left:
            self.left.remove(number)

    def _look_for_optimum(self) -> None:
        """The fastest, of equals the lowest tuple. (Where nothing can run, the sources have no optimum and crash.)"""
        self.optimum = min(self.times, key=lambda number: (self.times[number], self.candidates[number]))
        self.optimum_after = self.spent

    def _sample(self) -> list[int]:
        """The whole sample in one round; a random one may hold a candidate twice, and pays twice."""
        sample = []
        while self.spent < self.pretrain and self.left:
            if self.strided:
                number = self.cursor
                self.cursor = (self.cursor + self.stride) % len(self.candidates)
            else:
                number = self.draw(len(self.candidates))
            sample.append(number)
            self._spend(number)
        return sample

    def _descend(self) -> list[int]:
        if self.starts == 0:
            self._start_from(self.optimum)
            return self._survey()
        if self.starts >= self.retries:
            self.converged = True
            return []
        if self._compare():
            return self._survey()
        # The points ahead stay as they are: the next comparison sets them against the place jumped to.
        return [self._jump()]

    def _start_from(self, number: int) -> None:
        self.here, self.knob, self.up = number, 0, True
        self.starts += 1

    def _jump(self) -> int:
        self._start_from(self.left[self.draw(len(self.candidates)) % len(self.left)])
        return self.here

    def _compare(self) -> bool:
        """Move to the fastest of the points ahead, or turn; False when it is time to jump."""
        time_here = self.times[self.here]
        best: tuple[int, int, bool] | None = None
        best_time = time_here
        for point in self.ahead:
            if self.times[point[0]] < best_time:
                best, best_time = point, self.times[point[0]]
        if best is not None:
            gain = 1.0 if math.isinf(time_here) else (time_here - best_time) / time_here
            self.rate = gain * LEARNING
            self.here, self.knob, self.up = best
            self.failures = 0
            return True
        self.rate = -1.0
        self.failures += 1
        if not self.up:
            self.knob = (self.knob + 1) % KNOBS
        self.up = not self.up
        return self.failures != 2 * KNOBS  # beyond that number nothing jumps before a better point is found

    def _survey(self) -> list[int]:
        """Look along the direction, turning while there is nothing; a jump ends the turning."""
        self.ahead = []
        found = self._farthest_of_nearest()
        turns = 0
        while not found:
            turns += 1
            if turns > 2 * KNOBS:
                raise RuntimeError("nothing left in any direction: the sources would turn for ever")
            found = self._farthest_of_nearest() if self._compare() else [self._jump()]
        self.ahead = [(number, self.knob, self.up) for number in found]
        return found

    def _farthest_of_nearest(self) -> list[int]:
        """Up to three unmeasured candidates of the half-space ahead, the farthest first."""
        origin = self.candidates[self.here]
        inside = []
        for number in self.left:
            steps = [float(there - here) for there, here in zip(self.candidates[number], origin, strict=True)]
            along = steps[self.knob] if self.up else -steps[self.knob]
            angle = math.acos(along / math.sqrt(sum(step * step for step in steps)))
            if angle < math.pi / 2:
                inside.append((along, angle, number))
        inside.sort()
        near = inside[: max(SURVEYED, int(self.rate * len(inside)))]
        return [number for _, _, number in reversed(near[-SURVEYED:])]


def oracle(
    subspaces: list[list[Candidate]],
    native_s: float,
    time_of: Callable[[int, int], float],
    draw: Callable[[int], int],
    *,
    num_pretrain: int,
    num_train: int,
    num_retries: int,
) -> list[tuple[int, int]]:
    """What is measured, in order: (number of the subspace, number of the candidate in it), of one collective's task."""
    pretrain = max(num_pretrain // len(subspaces), 1)
    train = max(num_train // len(subspaces), 1)
    searches = [
        _Descent(candidates, draw, pretrain=pretrain, train=train, retries=num_retries) for candidates in subspaces
    ]
    measured: list[tuple[int, int]] = []
    bar = native_s  # the native candidate's time, or a faster one of a subspace that is done: never of one under way
    subspace = 0
    while True:
        search = searches[subspace]
        numbers = search.next_round()
        if search.done:
            bar = min(bar, search.best_time())
        elif search.optimum_after > pretrain + train * 0.1:
            search.done = search.best_time() > bar * 1.5
        elif search.optimum_after > pretrain + 5.0:
            search.done = search.best_time() > bar * 3
        if all(each.done for each in searches):
            return measured  # the round of the last subspace, if it was given up with one at hand, is dropped
        for number in numbers:
            search.times[number] = time_of(subspace, number)
            measured.append((subspace, number))
        subspace = (subspace + 1) % len(searches)
