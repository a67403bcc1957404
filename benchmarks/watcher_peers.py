"""Textbook detectors of a change, to compare with the online tuner's watcher, on the same step times.

All take logarithms of step times, learn mean and standard deviation from the first `FIRST` steps as the watcher does,
are designed for a rise by the watcher's ratio, and have one threshold. Only rises are alarms, since the watcher follows
a fall in silence.

    cusum           Page, Biometrika 41 (1954), two sums up and down of standardised steps, allowance of half the rise
    page_hinkley    Page and Hinkley (Hinkley, Biometrika 57, 1970) as streaming libraries have it: the sum of steps
                    above the running mean, less half the rise, over its minimum so far
    bocpd           Adams and MacKay, arXiv:0710.3742 (2007): the distribution of the current run's length under normal
                    steps of unknown mean and variance; an alarm when the most probable run's mean is up by most of
                    the rise and it has lasted as many steps as the threshold says
"""

from collections.abc import Callable, Iterable
from math import log
from statistics import fmean, pstdev
from typing import Final, Protocol

import numpy as np
from scipy.special import gammaln

from lagom_overlap.online.watcher import FIRST, LEAST_SHARE, LEAST_SPREAD, SETTLE


class Detector(Protocol):
    """What finds a change."""

    def see(self, steps_s: Iterable[float]) -> object:
        """Takes further step times; something true if they have risen."""


class Learning:
    """The first steps: some left out, then those that give mean and deviation of the logarithms."""

    def __init__(self) -> None:
        self._num_left_out = 0
        self._first: list[float] = []
        self.mean = self.deviation = 0.0

    def takes(self, x: float) -> bool:
        """Whether the step was one of the first."""
        if self._num_left_out < SETTLE:
            self._num_left_out += 1
            return True
        if len(self._first) == FIRST:
            return False
        self._first.append(x)
        if len(self._first) == FIRST:
            self.mean, self.deviation = fmean(self._first), max(pstdev(self._first), LEAST_SPREAD)
        return True


class Cusum:
    """Two-sided cumulative sums; the threshold counts standard deviations."""

    def __init__(self, ratio: float, threshold: float) -> None:
        self._rise, self._threshold = log(ratio), threshold
        self._restart()

    def _restart(self) -> None:
        self._learning, self._up, self._down = Learning(), 0.0, 0.0

    def see(self, steps_s: Iterable[float]) -> bool:
        """See `Detector`."""
        for x in map(log, steps_s):
            if self._learning.takes(x):
                continue
            z = (x - self._learning.mean) / self._learning.deviation
            allowance = self._rise / 2 / self._learning.deviation
            self._up = max(0.0, self._up + z - allowance)
            self._down = max(0.0, self._down - z - allowance)
            if self._up > self._threshold:
                return True
            if self._down > self._threshold:
                self._restart()
        return False


class PageHinkley:
    """The cumulative sum over its minimum; the threshold counts rises by the ratio."""

    def __init__(self, ratio: float, threshold: float) -> None:
        self._rise, self._threshold = log(ratio), threshold * log(ratio)
        self._learning, self._num, self._sum = Learning(), 0, 0.0
        self._mean = self._above = self._least = 0.0

    def see(self, steps_s: Iterable[float]) -> bool:
        """See `Detector`."""
        for x in map(log, steps_s):
            if self._learning.takes(x):
                continue
            if not self._num:
                self._num, self._mean = FIRST, self._learning.mean
            self._num += 1
            self._mean += (x - self._mean) / self._num
            self._above += x - self._mean - self._rise / 2
            self._least = min(self._least, self._above)
            if self._above - self._least > self._threshold:
                return True
        return False


class Bocpd:
    """Bayesian online change points; the threshold counts steps of the most probable run."""

    HAZARD: Final = 1 / 1000
    LONGEST: Final = 300
    """Longer runs are taken together."""

    def __init__(self, ratio: float, threshold: float) -> None:
        self._rise, self._threshold = log(ratio), threshold
        self._learning = Learning()
        self._prior = np.empty(0)
        self._chance = np.ones(1)
        self._settled: float | None = None
        self._mu = self._kappa = self._alpha = self._beta = np.empty(0)

    def see(self, steps_s: Iterable[float]) -> bool:
        """See `Detector`."""
        for x in map(log, steps_s):
            if self._learning.takes(x):
                continue
            if self._settled is None:
                self._settled = self._learning.mean
                # A new run: a mean within the ratio or so, the deviation known as from four steps.
                self._prior = np.array([self._settled, 0.04, 2.0, 2.0 * self._learning.deviation**2])
                known = [self._settled, FIRST, FIRST / 2, FIRST / 2 * self._learning.deviation**2]
                self._mu, self._kappa, self._alpha, self._beta = (np.array([value]) for value in known)
            self._take(x)
            probable = int(np.argmax(self._chance))
            num_steps, level = 2 * (self._alpha[probable] - self._prior[2]), float(self._mu[probable])
            if num_steps >= self._threshold and level - self._settled > LEAST_SHARE * self._rise:
                return True
            if num_steps >= FIRST:
                self._settled = min(self._settled, level)
        return False

    def _take(self, x: float) -> None:
        mu, kappa, alpha, beta = self._mu, self._kappa, self._alpha, self._beta
        scale = beta * (kappa + 1) / (alpha * kappa)
        seen = np.exp(
            gammaln(alpha + 0.5)
            - gammaln(alpha)
            - 0.5 * np.log(2 * np.pi * alpha * scale)
            - (alpha + 0.5) * np.log1p((x - mu) ** 2 / (2 * alpha * scale))
        )
        grown = self._chance * seen * (1 - self.HAZARD)
        born = float((self._chance * seen).sum()) * self.HAZARD
        chance = np.concatenate(([born], grown))
        grow = np.concatenate
        self._mu, self._kappa, self._alpha, self._beta = (
            grow((self._prior[:1], (kappa * mu + x) / (kappa + 1))),
            grow((self._prior[1:2], kappa + 1)),
            grow((self._prior[2:3], alpha + 0.5)),
            grow((self._prior[3:4], beta + kappa * (x - mu) ** 2 / (2 * (kappa + 1)))),
        )
        if len(chance) > self.LONGEST:
            likelier = len(chance) - 2 + int(chance[-1] > chance[-2])  # its figures stand for both
            chance = np.append(chance[:-2], chance[-2] + chance[-1])
            for name in ("_mu", "_kappa", "_alpha", "_beta"):
                held = getattr(self, name)
                setattr(self, name, np.append(held[:-2], held[likelier]))
        self._chance = chance / chance.sum()


PEERS: Final[dict[str, Callable[[float, float], Detector]]] = {
    "cusum": Cusum,
    "page_hinkley": PageHinkley,
    "bocpd": Bocpd,
}
