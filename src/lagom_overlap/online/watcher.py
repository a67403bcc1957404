"""Detects when a settled job's steps have become slower for good: a suspicion, then patience.

**Suspicion.** Page's test (Biometrika 41, 1954) on logarithms x of step times. The first steps give the level m and
spread s, from values clipped `CLIP` robust deviations (at least the ratio) around their median, so that a straggler
counts as a late step, not as a new time. From then on

    z = (clip(x) - m) / s,   C <- max(0, C + z - k),   k = max(1/2, ln(ratio) / 2 s)

and C above h says that the times have changed: h is set so that white noise gets there once in `QUIET_STEPS` steps. If
the median of the last few is also up by most of the ratio, steps are suspected to be longer since C was last 0.

**Patience.** A neighbour may slow steps for a while; a search because of it costs more than it could gain. So a
suspicion becomes an alarm only after `patience` steps, or `GROWTH` times the longest known slow phase, up to
`MOST_PATIENCE`. Before that it ends as a `SlowPhase` when the likelihood ratio of "back again" over "still longer" is
large enough and the last few steps agree:

    D <- max(0, D + (m + g/2 - x) g / s^2) > ln `SURELY_BACK`,   g: how much longer the phase's steps are

An alarm is remembered as a phase of its length, so that each alarm has to last longer than the one before. Patience
costs little: 60 steps that are 10 % longer are 6 steps' time, and a search takes hundreds of steps.

Steps with C = 0 keep refining m and s, so the level follows slow changes; a slow rise by the whole ratio is an alarm,
too. A lasting rise by less than most of the ratio is followed without an alarm, and so is a fall.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Final

from lagom_overlap.units import format_seconds

REMEMBERED: Final = 20
"""How many of the latest phases decide how long to wait. Chosen: an old disturbance should not delay alarms for
ever."""
REPORTED: Final = 200
"""How many of the latest phases the reported medians cover. Bounds memory."""


@dataclass(frozen=True, slots=True)
class SlowPhase:
    """Consecutive steps with a median of `ratio` times the steps around them; over, or counted as a lasting change."""

    num_steps: int
    ratio: float
    is_over: bool = True


class SlowPhases:
    """The slow phases of a job, also across several searches."""

    def __init__(self) -> None:
        self._latest: deque[SlowPhase] = deque(maxlen=REPORTED)
        self._num_over = 0

    @property
    def num_over(self) -> int:
        """Phases that ended by themselves."""
        return self._num_over

    @property
    def longest_steps(self) -> int:
        """Steps of the longest remembered phase; a lasting change counts as far as it was observed."""
        return max((phase.num_steps for phase in [*self._latest][-REMEMBERED:]), default=0)

    def add(self, phase: SlowPhase) -> None:
        """Adds a phase."""
        self._latest.append(phase)
        self._num_over += phase.is_over

    def words(self) -> str:
        """Number, length and slow-down of the phases that ended by themselves; "" if there were none."""
        over = [phase for phase in self._latest if phase.is_over]
        if not over:
            return ""
        lengths = [phase.num_steps for phase in over]
        phases = "1 slow phase" if self._num_over == 1 else f"{self._num_over} slow phases"
        return (
            f"{phases} ended by themselves (median {median(lengths):.0f} steps, longest {max(lengths)}; steps took "
            f"{median(phase.ratio for phase in over):.2f} times as long)"
        )


SETTLE: Final = 5
"""Steps left out at the beginning: the first steps under a new setting are not typical."""
FIRST: Final = 60
"""Steps that give the first level. Chosen: enough for a median and a spread."""
KEPT: Final = 400
"""The level is computed from at most this many of the latest steps. Bounds memory and how slowly it follows."""
REFRESHED: Final = 25
"""The level is recomputed after this many steps. Bounds the cost per step."""
CLIP: Final = 4.0
"""Robust standard deviations at which a step time is clipped, so that one straggler is no new level."""
LEAST_SPREAD: Final = 0.004
"""Lower bound on the spread: a series that does not scatter at all would raise alarms for changes of under 1/250."""
QUIET_STEPS: Final = 2e6
"""White noise alone crosses the threshold once in this many steps."""
SAFETY: Final = 2.0
"""Factor on that threshold, because real noise is not white."""
LATEST: Final = 8
"""How many of the latest steps must agree that steps are longer, or back again."""
LEAST_SHARE: Final = 0.7
"""A median counts as up from this share of the ratio on: below 1 because of noise. Chosen, not measured."""
SURELY_BACK: Final = 1e4
"""The likelihood ratio at which a slow phase is over."""
GROWTH: Final = 1.5
"""How much longer than the longest known slow phase a suspicion must last. Chosen, not measured."""
MOST_PATIENCE: Final = 600
"""Upper bound on the patience in steps, so that a real drift is always noticed: a search takes hundreds of steps."""


class Watcher:
    """Raises an alarm when steps take at least `ratio` times as long as at first for at least `patience` steps.

    `phases` are the known slow phases; new ones are added to it.

    Raises:
        ValueError: if the ratio is not above 1, or the patience not positive.
    """

    def __init__(self, ratio: float, patience: int, phases: SlowPhases | None = None) -> None:
        if not ratio > 1:
            raise ValueError(f"ratio is {ratio}, must be above 1")
        if patience < 1:
            raise ValueError(f"patience is {patience}, must be at least 1")
        self._rise = log(ratio)
        self._least_patience = patience
        self._phases = SlowPhases() if phases is None else phases
        self._num_left_out = 0
        self._quiet: deque[float] = deque(maxlen=KEPT)
        self._num_new = 0
        self._middle = self._level = self._spread = self._low = self._high = 0.0
        self._settled: float | None = None
        self._since: list[float] = []
        """Steps since C was last 0."""
        self._sum = 0.0
        self._num_slow = 0
        """How many of them belong to the slow phase, up to where D was last 0; 0 without a suspicion."""
        self._back = 0.0

    @property
    def patience(self) -> int:
        """How many steps a suspicion must last at present."""
        return max(self._least_patience, min(MOST_PATIENCE, round(GROWTH * self._phases.longest_steps)))

    def see(self, steps_s: Iterable[float]) -> str:
        """Takes the times of further steps, in order; returns what has changed for good in words, else ""."""
        for step_s in steps_s:
            if not step_s > 0:
                continue
            if self._num_left_out < SETTLE:
                self._num_left_out += 1
            elif self._settled is None:
                self._quiet.append(log(step_s))
                if len(self._quiet) == FIRST:
                    self._learn()
            elif now := self._changed(log(step_s)):
                before, after = format_seconds(exp(self._settled)), format_seconds(exp(now))
                return f"steps became slower: they took {before} and now take {after}"
        return ""

    def _changed(self, x: float) -> float | None:
        """The logarithm of the new level if it has changed for good, else None."""
        self._since.append(x)
        return self._judged(x) if self._num_slow else self._suspected(x)

    def _suspected(self, x: float) -> float | None:
        allowance = max(0.5, 0.5 * self._rise / self._spread)
        threshold = SAFETY * log(1 + 2 * allowance**2 * QUIET_STEPS) / (2 * allowance)
        z = (min(max(x, self._low), self._high) - self._level) / self._spread
        self._sum = min(max(0.0, self._sum + z - allowance), 2 * threshold)
        if self._sum == 0 or len(self._since) > MOST_PATIENCE:
            return self._follow()
        if self._sum > threshold and median(self._since[-LATEST:]) - self._middle > LEAST_SHARE * self._rise:
            self._num_slow, self._back = len(self._since), 0.0
        return None

    def _judged(self, x: float) -> float | None:
        """Decides whether the suspected phase is over (None), for good (its level), or still open (None)."""
        least = LEAST_SHARE * self._rise
        slow, latest = median(self._since[: self._num_slow]), median(self._since[-LATEST:])
        gap = max(slow - self._middle, least)
        between = self._middle + gap / 2
        self._back = max(0.0, self._back + (between - max(x, self._middle)) * gap / self._spread**2)
        if self._back == 0:
            self._num_slow = len(self._since)
        if self._back > log(SURELY_BACK) and latest < between:
            self._phases.add(SlowPhase(self._num_slow, exp(slow - self._middle)))
            self._since = self._since[self._num_slow :]
            return self._follow()
        if len(self._since) < self.patience:
            return None
        if min(slow, latest) - self._middle > least:
            self._phases.add(SlowPhase(len(self._since), exp(slow - self._middle), is_over=False))
            return slow
        return self._follow() if self._back == 0 else None

    def _follow(self) -> float | None:
        """Counts the steps since C was last 0 as quiet; returns the level if it has crept up by the whole ratio."""
        self._quiet.extend(self._since)
        self._num_new += len(self._since)
        self._since, self._sum, self._num_slow = [], 0.0, 0
        if self._num_new < REFRESHED:
            return None
        settled = self._learn()
        return self._level if self._level - settled > self._rise else None

    def _learn(self) -> float:
        """Recomputes level, spread and clips from the quiet steps; the settled level follows falls but never rises."""
        self._middle = median(self._quiet)
        deviation = max(1.4826 * median(abs(x - self._middle) for x in self._quiet), LEAST_SPREAD)
        reach = max(CLIP * deviation, self._rise)
        self._low, self._high = self._middle - reach, self._middle + reach
        clipped = [min(max(x, self._low), self._high) for x in self._quiet]
        self._level = level = fmean(clipped)
        # `statistics.pstdev` sums exact fractions, which takes four times as long.
        self._spread = max(sqrt(fmean((x - level) ** 2 for x in clipped)), LEAST_SPREAD)
        self._settled = self._level if self._settled is None else min(self._settled, self._level)
        self._num_new = 0
        return self._settled
