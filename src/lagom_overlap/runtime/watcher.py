"""Whether a settled job's steps have become longer for good: a clipped cumulative sum over the times of all steps.

Page's test (Biometrika 41, 1954) on logarithms x of step times. The first steps give the level m and spread s, from
values clipped `CLIP` robust deviations (at least the ratio) around their median, so that a straggler counts as a late
step, not as a new time. From then on

    z = (clip(x) - m) / s,   C <- max(0, C + z - k),   k = max(1/2, ln(ratio) / 2 s)

and C above h says that the times have changed: h is set so that white noise gets there once in `QUIET_STEPS` steps. It
is an alarm if besides `LEAST_RUN` steps since C was last 0 are up by most of the ratio, so is their median, and so is
that of the last few: a burst raises C, but does not last. Steps in which C is 0 go on refining m and s, so the level
follows what creeps; a creep by the whole ratio is an alarm, too. A level that falls is followed in silence: nothing is
lost.
"""

from collections import deque
from collections.abc import Iterable
from math import exp, log
from statistics import fmean, median, pstdev
from typing import Final

from lagom_overlap.units import format_seconds

SETTLE: Final = 5
"""Steps left out at the beginning: a new setting's first ones are not like the others."""
FIRST: Final = 60
"""Steps that give the first level."""
KEPT: Final = 400
"""Steps that a level rests on at most, the latest."""
REFRESHED: Final = 25
"""The level is computed anew after so many steps."""
CLIP: Final = 4.0
LEAST_SPREAD: Final = 0.004
"""Times that do not scatter at all are still not equal to a part in 250."""
QUIET_STEPS: Final = 2e6
"""White noise alone crosses the threshold once in so many steps."""
SAFETY: Final = 2.0
"""The threshold over that: noise is not white."""
LEAST_RUN: Final = 20
"""Steps that must have been longer."""
LATEST: Final = 8
"""The last so many must be up as well: it is not over yet."""
LEAST_SHARE: Final = 0.7
"""Share of the ratio by which a step or a median is up: a little less than all, because of noise."""


class Watcher:
    """Alarms when steps take `ratio` times as long as at first, or longer.

    Raises:
        ValueError: if the ratio is not above 1.
    """

    def __init__(self, ratio: float) -> None:
        if not ratio > 1:
            raise ValueError(f"ratio is {ratio}, must be above 1")
        self._rise = log(ratio)
        self._num_left_out = 0
        self._quiet: deque[float] = deque(maxlen=KEPT)
        self._since: list[float] = []
        self._num_new = 0
        self._sum = 0.0
        self._level = self._spread = self._low = self._high = 0.0
        self._settled: float | None = None

    def see(self, steps_s: Iterable[float]) -> str:
        """Takes the times of further steps, in order; what has changed, in words, or nothing."""
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
                return f"steps take {after}, they took {before} when settled"
        return ""

    def _changed(self, x: float) -> float | None:
        """The new level's logarithm if there is one."""
        assert self._settled is not None, "watched before there was a level"
        allowance = max(0.5, 0.5 * self._rise / self._spread)
        threshold = SAFETY * log(1 + 2 * allowance**2 * QUIET_STEPS) / (2 * allowance)
        self._since.append(x)
        z = (min(max(x, self._low), self._high) - self._level) / self._spread
        self._sum = min(max(0.0, self._sum + z - allowance), 2 * threshold)
        if self._sum == 0:
            self._quiet.extend(self._since)
            self._num_new += len(self._since)
            self._since = []
            if self._num_new >= REFRESHED:
                self._learn()
                return self._level if self._level - self._settled > self._rise else None
        elif self._sum > threshold:
            least = self._level + LEAST_SHARE * self._rise
            now = min(median(self._since), median(self._since[-LATEST:]))
            if now > least and sum(x > least for x in self._since) >= LEAST_RUN:
                return now
        return None

    def _learn(self) -> None:
        """Level, spread and clips of the quiet steps; the settled level falls with the level, and never rises."""
        middle = median(self._quiet)
        deviation = max(1.4826 * median(abs(x - middle) for x in self._quiet), LEAST_SPREAD)
        reach = max(CLIP * deviation, self._rise)
        self._low, self._high = middle - reach, middle + reach
        clipped = [min(max(x, self._low), self._high) for x in self._quiet]
        self._level, self._spread = fmean(clipped), max(pstdev(clipped), LEAST_SPREAD)
        self._settled = self._level if self._settled is None else min(self._settled, self._level)
        self._num_new = 0
