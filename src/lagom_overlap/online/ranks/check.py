"""Checks saved or old settings against the job's own default.

Both arms run in alternating windows, in an order drawn anew for every round, and whole steps are judged by the
sequential test of every verdict (`tuners.sequential`). It may end after any round; at most one check in a hundred calls
settings faster that are not. It also ends as soon as no further round could decide anything.

At the start nothing in this job supports the saved settings: they must prove to be faster. A short first window drops
them at once if they are slower than `max_slowdown` times the default. A proof (`lagom run --prove`) then measures the
default against itself, as every verdict does; what it says of settings is told on, so it takes two such windows running
for them, of which one may be a burst of noise. Later, a check begins with a single round. If the
settings win it, they stay and the check is over; if they lose it, the full rounds follow, and the settings are dropped
if the default is faster there. The two windows of a round follow each other, but any time may pass before the next
round, because pairs are compared within a round. Pure: no clock, and the same times give the same windows.
"""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from lagom_overlap.tuners.sequential import Decision, Judgement, judged_pairs, more_pairs, proven_pairs


class Arm(StrEnum):
    """What a window of a check runs under."""

    DEFAULT = "default"
    TUNED = "tuned"


@dataclass(slots=True)
class CheckBudget:
    """The budget of checks: `share` of the steps that ran under settled settings."""

    share: float
    num_settled: int = 0
    num_checked: int = 0

    def can_pay(self, num_steps: int) -> bool:
        """Whether `num_steps` more steps of checks are within the share."""
        return self.num_checked + num_steps <= self.share * self.num_settled


class Check:
    """One check; `next_arm` says what runs, `report` takes its step time, `is_over` and `is_kept` say how it ended."""

    def __init__(
        self,
        *,
        num_pairs: int,
        seed: str,
        max_slowdown: float,
        default_s: float,
        is_start: bool,
        num_same: int = 0,
    ) -> None:
        """At most `num_pairs` rounds; of a proof after `num_same` pairs of the default against itself.

        `default_s` is what a step of the default took last, 0 where nobody knows.
        """
        self._num_pairs = num_pairs
        self._num_same = num_same
        self._same_s: list[float] = []
        self._random = Random(f"{seed}/check")
        self._max_slowdown = max_slowdown
        self._default_s = default_s
        self.is_start = is_start
        self.is_screening = not is_start
        """Whether this is the single round in front of the others."""
        self.is_probation = is_start
        """Whether the settings run for the first time in this job."""
        self._times: dict[Arm, list[float]] = {arm: [] for arm in Arm}
        self._queue = [Arm.TUNED] if is_start else self._round()
        self._slow_s = 0.0
        self._was_slow = False
        self.is_over = False
        self.is_kept = False

    @property
    def next_arm(self) -> Arm:
        """What the next window runs under."""
        return self._queue[0]

    @property
    def is_between_rounds(self) -> bool:
        """Whether the next window begins a round."""
        return len(self._queue) == len(Arm)

    @property
    def is_too_slow(self) -> bool:
        """Whether it ended at once because steps took more than `max_slowdown` times the default's."""
        return self._slow_s > 0

    @property
    def num_windows_left(self) -> int:
        """The most windows that it still takes."""
        ran = len(self._same_s) + sum(map(len, self._times.values()))
        return 0 if self.is_over else 2 * self._num_same + len(Arm) * self._num_pairs + self.is_probation - ran

    @property
    def times_s(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean step times of the rounds' windows so far: the default's, the settings'."""
        return tuple(self._times[Arm.DEFAULT]), tuple(self._times[Arm.TUNED])

    @property
    def judgement(self) -> Judgement | None:
        """How the test stands after the complete rounds; None before two of them."""
        num_rounds = min(map(len, self._times.values()))
        return None if num_rounds < 2 else self._judgement(num_rounds)

    @property
    def num_needed(self) -> int | None:
        """About how many pairs like those of the complete rounds decide (`sequential.more_pairs`)."""
        num = min(map(len, self._times.values()))
        default_s, tuned_s = (self._times[arm][:num] for arm in (Arm.DEFAULT, Arm.TUNED))
        return more_pairs(default_s, tuned_s, same_s=self._same_pairs) if num else None

    @property
    def _same_pairs(self) -> tuple[tuple[float, float], ...]:
        return tuple(zip(self._same_s[::2], self._same_s[1::2], strict=False))

    @property
    def words(self) -> str:
        """The outcome for people, or how far it is."""
        if self._slow_s:
            running = ", in two windows running" if self._num_same else ""
            return f"steps take {self._slow_s / self._default_s:.2f} times as long{running}"
        if self._is_noise_due and not self.is_probation:
            return "measuring noise"
        judgement = self.judgement
        if judgement is None:
            return f"round {min(map(len, self._times.values())) + 1}"
        return f"{'they are' if self.is_start else 'the default is'} {judgement.sentence()}"

    def report(self, step_s: float) -> None:
        """The mean step time of the window just run."""
        arm = self._queue.pop(0)
        if arm is Arm.DEFAULT:
            self._default_s = step_s
        else:
            is_slow = 0 < self._max_slowdown * self._default_s < step_s
            if is_slow and (self._was_slow or not self._num_same):
                self._slow_s = step_s
                self._end(is_kept=False)
                return
            self._was_slow = is_slow
        if self.is_probation:
            self.is_probation = False
        elif self._is_noise_due:
            self._same_s.append(step_s)
        else:
            self._times[arm].append(step_s)
        if self._is_noise_due:
            self._queue = [Arm.DEFAULT]
        elif not self._queue:
            self._judge()

    @property
    def _is_noise_due(self) -> bool:
        return len(self._same_s) < 2 * self._num_same

    def _round(self) -> list[Arm]:
        arms = [*Arm]
        self._random.shuffle(arms)
        return arms

    def _judge(self) -> None:
        """After a round: over, or another one."""
        default_s, tuned_s = self._times[Arm.DEFAULT], self._times[Arm.TUNED]
        if self.is_screening:
            if tuned_s[0] <= default_s[0]:
                self._end(is_kept=True)
                return
            # The screening round was selected for being slow, so it must not count as evidence.
            self.is_screening, self._times = False, {arm: [] for arm in Arm}
        elif default_s:  # none after the first window of all
            judgement = self._judgement(len(default_s))
            if judgement.decision is not Decision.OPEN:
                self._end(is_kept=judgement.is_faster if self.is_start else not judgement.is_faster)
                return
        self._queue = self._round()

    def _judgement(self, num_rounds: int) -> Judgement:
        """The test's judgement; the burden of proof is on the saved settings at the start, on the default later."""
        incumbent, challenger = (Arm.DEFAULT, Arm.TUNED) if self.is_start else (Arm.TUNED, Arm.DEFAULT)
        times = self._times[incumbent][:num_rounds], self._times[challenger][:num_rounds]
        if not self._num_same:
            return judged_pairs(*times, most_pairs=self._num_pairs)
        return proven_pairs(*times, self._num_pairs, same_s=self._same_pairs)

    def _end(self, *, is_kept: bool) -> None:
        self.is_over, self.is_kept, self._queue = True, is_kept, []
