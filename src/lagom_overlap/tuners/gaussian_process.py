"""Gaussian processes given linear observations, some of which belong to measurements that were slow as a whole."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_DRAWS: Final = 32
"""Draws from a posterior, the mean included. Bounds the computation; chosen, not measured."""
LEAST_SLOW: Final = 0.15
"""The smallest logarithm of a factor that makes a measurement "slow as a whole"; smaller ones are left to the noise."""
SLOW_SIGMA: Final = 0.3
"""Prior standard deviation of that logarithm."""
SLOW_COST: Final = 2.3
"""Prior log odds against a slow measurement: ln 10, so one in ten is slow."""
FEWEST_SLOW: Final = 3
"""Measurements below which none is called slow: two alone do not say which one is off."""
MOST_RAMP: Final = 6
"""Measurements of a clock ramp at most: raw lists show 9 to 25 iterations, and a measurement takes three to ten."""
JITTER: Final = 1e-7
"""Added to diagonals so that Cholesky factorisation succeeds in floating point."""


@dataclass(frozen=True, slots=True)
class Data:
    """Linear observations of a process: values less the prior's mean, and the prior."""

    weights: Floats
    values: Floats
    mean: Floats
    kernel: Floats
    rows: npt.NDArray[np.intp]

    @property
    def with_all(self) -> Floats:
        """The covariance of the values with all points of the process.

        An observation is of a few points, so the others are left out of the sum: there are hundreds.
        """
        seen = np.flatnonzero(self.weights.any(axis=0))
        return np.asarray(self.weights[:, seen] @ self.kernel[seen])

    @property
    def covariance(self) -> Floats:
        """Of the values, without noise."""
        seen = np.flatnonzero(self.weights.any(axis=0))
        weights = self.weights[:, seen]
        return np.asarray(weights @ self.kernel[np.ix_(seen, seen)] @ weights.T)

    def fitted(self, noise: Floats) -> Floats:
        """The process's mean, given the values."""
        solved = np.linalg.solve(self.covariance + noise, self.values)
        return np.asarray(self.mean + self.with_all.T @ solved)


class Root:
    """Values with a covariance: its Cholesky root, the whitened values and their log likelihood."""

    def __init__(self, covariance: Floats, values: Floats) -> None:
        self.root = np.linalg.cholesky(covariance)
        self.whitened = np.linalg.solve(self.root, values)
        self.log_likelihood = float(-(self.whitened @ self.whitened) / 2 - np.log(np.diag(self.root)).sum())


class Slow:
    """All observations, and the measurements that were slow as a whole.

    Greedy: a measurement alone (a late rank) or the first ones by one factor (a clock ramp) is called slow as long as
    that raises the log likelihood by more than `SLOW_COST`; at most a third of the measurements.
    """

    def __init__(self, covariance: Floats, values: Floats, wholes: Floats) -> None:
        num = len(wholes)
        self._values, self._wholes = values, wholes
        self._factors: list[tuple[int, ...]] = []
        candidates: list[tuple[int, ...]] = [(number,) for number in range(num)]
        candidates += [tuple(range(most + 1)) for most in range(1, min(MOST_RAMP, num - 1))]
        shapes = np.array([wholes[list(each)].sum(axis=0) for each in candidates])
        root = Root(covariance, values)
        cost = 0.0
        while num >= FEWEST_SLOW and len(self._factors) <= num // 3:
            bent = np.linalg.solve(root.root, shapes.T)
            size = (bent**2).sum(axis=0)
            along = bent.T @ root.whitened
            gain = SLOW_SIGMA**2 * along**2 / (1 + SLOW_SIGMA**2 * size) / 2 - np.log1p(SLOW_SIGMA**2 * size) / 2
            factor = SLOW_SIGMA**2 * along / (1 + SLOW_SIGMA**2 * size)
            chosen = np.array([each in self._factors for each in candidates])
            comp = covariance[-num:, -num:]
            bent = np.linalg.solve(comp, shapes[:, -num:].T)
            alone = (
                SLOW_SIGMA**2 * (values[-num:] @ bent) / (1 + SLOW_SIGMA**2 * (shapes[:, -num:].T * bent).sum(axis=0))
            )
            gain[(factor < LEAST_SLOW) | (alone < LEAST_SLOW) | chosen] = -np.inf
            best = int(np.argmax(gain))
            if gain[best] <= SLOW_COST:
                break
            self._factors.append(candidates[best])
            covariance = covariance + SLOW_SIGMA**2 * np.outer(shapes[best], shapes[best])
            root, cost = Root(covariance, values), cost + SLOW_COST
        self._root, self.log_likelihood = root, root.log_likelihood - cost

    def factors(self) -> tuple[Floats, Floats]:
        """The logarithms of the measurements' factors, 0 for those that were not slow, and their variances."""
        mean, variance = np.zeros(len(self._wholes)), np.zeros(len(self._wholes))
        for members in self._factors:
            bent = np.linalg.solve(self._root.root, self._wholes[list(members)].sum(axis=0))
            mean[list(members)] += SLOW_SIGMA**2 * float(bent @ self._root.whitened)
            variance[list(members)] += SLOW_SIGMA**2 * (1 - SLOW_SIGMA**2 * float(bent @ bent))
        return mean, np.maximum(variance, 0.0)

    def mean(self, data: Data, part: slice) -> Floats:
        """The posterior mean of a process given all values."""
        towards = np.zeros((len(self._values), len(data.mean)))
        towards[part] = data.with_all
        return np.asarray(data.mean + np.linalg.solve(self._root.root, towards).T @ self._root.whitened)

    def draws(self, data: Data, part: slice, random: np.random.Generator) -> Floats:
        """Draws (size, draws) of a process given all values, the mean first; `part` are its observations."""
        towards = np.zeros((len(self._values), len(data.mean)))
        towards[part] = data.with_all
        solved = np.linalg.solve(self._root.root, towards)
        mean, kernel = data.mean + solved.T @ self._root.whitened, data.kernel - solved.T @ solved
        root = np.linalg.cholesky(kernel + 10 * JITTER * np.eye(len(mean)))
        drawn = np.column_stack([np.zeros(len(mean)), random.standard_normal((len(mean), NUM_DRAWS - 1))])
        return np.asarray(mean[:, None] + root @ drawn)
