"""What the settings measured so far say of the others: two smooth curves and what they miss, each a Gaussian process.

Ours, not a paper's. A measurement of an assignment c_1 ... c_N tells N + 2 times, all of them used:

    x_j(c) = exp(l_j + f(c))                         communication: one f for all collectives of a group, a level each
    Y      = Y_0 + sum_j o_j rho(c_j)                what runs next to a collective for o_j seconds loses rho of them
    Z      = max(Y, sum_j x_j + g) exp(d)            g: where exposed, what the sum lacks; d: what both curves miss

f and rho are functions of the kind (algorithm, protocol, transport), log2 channels and log2 chunk: trends plus a smooth
remainder, no formula of a link or a GPU. d is a process over assignments, with a part of each one's own. A knob that is
left to the engine counts as what the engine is known to take, else as the most, of a kind of its own.

A measurement that is slow as a whole (a late rank), or the first ones together (a clock ramp), lengthens all its times
by one factor of `LEAST_SLOW` and more. Which were is found by the likelihood with and without the factor, one after the
other; it must be seen in the computation's times by themselves. Its other times still tell how they compare with each
other, and the makespan counts without the factor.

The widths of the priors are round numbers for any GPU and network: twice the channels take 0.73 of the time, give or
take a factor of 1.3; a computation loses up to a third to the most channels. They are no fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from types import EllipsisType
from typing import Final

import numpy as np
import numpy.typing as npt

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.problem import Assignment, Measurement

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
"""(assignments, collectives) into the settings."""

NUM_DRAWS: Final = 32
LEAST_SLOW: Final = 0.15
SLOW_SIGMA: Final = 0.3
SLOW_COST: Final = 2.3
"""Of the log likelihood: one measurement in ten is slow."""
SIGMAS: Final = (0.005, 0.02)
"""Of one measurement's times, where no repeats tell."""
MISSED: Final = (0.01, 0.03, 0.08)
"""Standard deviations of d, of which the likeliest is taken."""
OWN_MISSED: Final = 0.01
"""Of d, what is each assignment's alone."""
MOST_AT_ONCE: Final = 1 << 20
"""Numbers held at once, by memory."""
MISFITS: Final = (0.003, 0.03, 0.1)
"""By how much a collective's time is off its curve for what the others are set to; the likeliest is taken."""
LEVEL_SIGMA: Final = 1.0
FEWEST_SLOW: Final = 3
MOST_RAMP: Final = 6
"""Measurements of a ramp. Raw lists: 9 to 25 iterations, of which a measurement takes three to ten."""
JITTER: Final = 1e-7


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration and what it counts as; `is_known`: the engine leaves nothing open that was not seen."""

    config: CommConfig
    num_channels: int
    chunk_bytes: int
    is_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One measurement in units of the shortest makespan."""

    places: tuple[int, ...]
    makespan: float
    comp: float
    comm: Floats


@dataclass(frozen=True, slots=True)
class _Data:
    """Linear observations of a process: values less the prior's mean, and the prior."""

    weights: Floats
    values: Floats
    mean: Floats
    kernel: Floats
    rows: npt.NDArray[np.intp]

    @property
    def covariance(self) -> Floats:
        """Of the values, without noise."""
        return np.asarray(self.weights @ self.kernel @ self.weights.T)

    def fitted(self, noise: Floats) -> Floats:
        """The process's mean, given the values."""
        solved = np.linalg.solve(self.covariance + noise, self.values)
        return np.asarray(self.mean + self.kernel @ (self.weights.T @ solved))


class Curves:
    """The fit to a group's measurements, the first of which is the default's."""

    def __init__(
        self, settings: Sequence[Setting], measured: Sequence[tuple[Assignment, Measurement]], sigma: float | None
    ) -> None:
        self.settings = {setting.config: setting for setting in settings}
        self._index = {config: place for place, config in enumerate(self.settings)}
        self._size = len(settings)
        unit_s = min(each.makespan_s for _, each in measured) or 1.0
        self._rows = [
            _Row(
                places=tuple(self._index[config] for config in assignment),
                makespan=max(each.makespan_s / unit_s, 1e-9),
                comp=each.comp_s / unit_s,
                comm=np.maximum(np.array(each.comm_s) / unit_s, 1e-9),
            )
            for assignment, each in measured
        ]
        self._told = np.array([row.places for row in self._rows], dtype=np.intp)
        self._priors(settings)
        self._fit(SIGMAS if sigma is None else (sigma,))

    @property
    def sigma(self) -> float:
        """The noise of one measurement's times, as a share of them."""
        return self._sigma

    def slowed(self, number: int) -> float:
        """By what factor a measurement was slow as a whole; 1 for the others."""
        return float(np.exp(self._slowed[number]))

    def places(self, assignments: Sequence[Assignment]) -> Places:
        """The assignments by their settings' places."""
        return np.array([[self._index[config] for config in each] for each in assignments], dtype=np.intp)

    def draws(self, places: Places) -> Floats:
        """(assignments, draws): makespans over the shortest told: the expected one, then draws."""
        step = max(1, MOST_AT_ONCE // (places.shape[1] * NUM_DRAWS))
        parts = [self._by_curves(places[at : at + step], ...) for at in range(0, len(places), step)]
        makespans = np.concatenate(parts)
        covariance = self._missed_of(self._told, places, self._missed)
        solved = np.linalg.solve(self._missed_root, covariance)
        variance = np.maximum(self._missed**2 + OWN_MISSED**2 - (solved**2).sum(axis=0), 0.0)
        mean = solved.T @ self._missed_values
        result: Floats = makespans * np.exp(mean[:, None] + np.sqrt(variance)[:, None] * self._offsets[None])
        return result

    def _priors(self, settings: Sequence[Setting]) -> None:
        channels = np.log2([setting.num_channels for setting in settings])
        chunks = np.log2([setting.chunk_bytes for setting in settings])
        names = [
            (setting.config.algorithm, setting.config.protocol, setting.config.transport, setting.is_known)
            for setting in settings
        ]
        kinds = np.array([names.index(name) for name in names])
        same = (kinds[:, None] == kinds[None, :]).astype(float)
        origin = self._told[0, 0]
        more, larger = channels - channels[origin], chunks - chunks[origin]

        def trend(values: Floats, sigma: float) -> Floats:
            return np.asarray(sigma**2 * np.outer(values, values))

        def smooth(octaves: float, octaves_of_chunk: float) -> Floats:
            away = (channels[:, None] - channels) ** 2 / octaves**2
            away += (chunks[:, None] - chunks) ** 2 / octaves_of_chunk**2
            return np.asarray(np.exp(-away / 2))

        self._f_mean = -0.45 * log(2) * more
        self._f_kernel = trend(more, 0.25) + trend(more**2 / 4, 0.15) + trend(larger, 0.12) + trend(larger**2 / 4, 0.12)
        self._f_kernel += trend(more * larger / 4, 0.05) + 0.08**2 * smooth(1.5, 1.5)
        of_kind = 0.2**2 + trend(more, 0.05) + trend(larger, 0.12) + trend(larger**2 / 4, 0.08)
        self._f_kernel += same * of_kind + JITTER * np.eye(self._size)
        share = 2.0**channels / max(2.0**channels)
        self._share = share
        self._rho_kernel = trend(share, 0.3) + trend(np.sqrt(share), 0.1) + 0.06**2 * smooth(1.0, 3.0)
        self._rho_kernel += 0.03**2 * smooth(0.5, 5.0) + 0.02**2 * same
        self._missed_kernel = smooth(1.5, 3.0) * (0.5 + 0.5 * same)

    def _comm_data(self) -> tuple[_Data, Floats]:
        """Logarithms of times; the collectives that had the same settings in all measurements count as one."""
        told = np.array([row.comm for row in self._rows])
        members: dict[tuple[int, ...], list[int]] = {}
        for j, column in enumerate(self._told.T):
            members.setdefault(tuple(column.tolist()), []).append(j)
        classes = list(members.values())
        sums = np.stack([told[:, each].sum(axis=1) for each in classes], axis=1)
        errors = np.stack([(told[:, each] ** 2).sum(axis=1) for each in classes], axis=1) / sums**2
        self._class_of = np.empty(self._told.shape[1], dtype=np.intp)
        for number, each in enumerate(classes):
            self._class_of[each] = number
        self._log_share = np.log(told / sums[:, self._class_of]).mean(axis=0)
        rows, of = (np.repeat(np.arange(len(told)), len(classes)), np.tile(np.arange(len(classes)), len(told)))
        weights = np.zeros((len(rows), self._size + len(classes)))
        at = np.arange(len(rows))
        weights[at, [self._told[row, classes[number][0]] for row, number in zip(rows, of, strict=True)]] = 1.0
        weights[at, self._size + of] = 1.0
        size = self._size + len(classes)
        kernel = np.zeros((size, size))
        kernel[: self._size, : self._size] = self._f_kernel
        kernel[self._size :, self._size :] = LEVEL_SIGMA**2 * np.eye(len(classes))
        values = np.log(sums)
        levels = (values - self._f_mean[self._told[:, [each[0] for each in classes]]]).mean(axis=0)
        mean = np.append(self._f_mean, levels)
        return _Data(weights, values.ravel() - weights @ mean, mean, kernel, rows), errors.ravel()

    def _comp_data(self, rate: Floats) -> _Data:
        """Computations over what ran next to them, with rho and Y_0."""
        least = min(row.comp for row in self._rows)
        size = self._size + 1
        kernel = np.zeros((size, size))
        kernel[:-1, :-1] = self._rho_kernel + 0.2**2 * np.outer(rate, rate)
        kernel[-1, -1] = (0.15 * least) ** 2 + JITTER
        mean = np.append(0.25 * self._share + 0.1 * rate, 0.85 * least)
        weights = np.zeros((len(self._rows), size))
        weights[:, -1] = 1.0
        for number, row in enumerate(self._rows):
            exposed = max(0.0, row.makespan - row.comp)
            for j in reversed(range(len(row.places))):
                weights[number, row.places[j]] += max(0.0, row.comm[j] - exposed)
                exposed = max(0.0, exposed - row.comm[j])
        values = np.array([row.comp for row in self._rows]) - weights @ mean
        return _Data(weights, values, mean, kernel, np.arange(len(self._rows)))

    def _fit(self, sigmas: Sequence[float]) -> None:
        comm, errors = self._comm_data()
        rough = comm.fitted(np.diag(errors * 0.02**2 + MISFITS[0] ** 2))[: self._size]
        comp = self._comp_data(np.exp(rough.min() - rough))
        told = np.array([row.comp for row in self._rows])
        first = len(comm.values)
        size = first + len(told)
        covariance = np.zeros((size, size))
        covariance[:first, :first], covariance[first:, first:] = comm.covariance, comp.covariance
        values = np.concatenate([comm.values, comp.values])
        # What a factor on a measurement as a whole does to all that it tells.
        wholes = np.zeros((len(told), size))
        wholes[comm.rows, np.arange(first)] = 1.0
        wholes[np.arange(len(told)), first + np.arange(len(told))] = told
        best: tuple[float, float, _Slow] | None = None
        for sigma in sigmas:
            for misfit in MISFITS if self._told.shape[1] > 1 else MISFITS[:1]:
                noise = np.concatenate([errors * sigma**2 + misfit**2, (sigma * told) ** 2 + 0.005**2])
                slow = _Slow(covariance + np.diag(noise), values, wholes)
                likely = slow.log_likelihood - 0.3 * abs(log(sigma / 0.02))
                if best is None or likely > best[0]:
                    best = likely, sigma, slow
        assert best is not None, "at least one sigma"
        _, self._sigma, slow = best
        self._slowed, self._slowed_variance = slow.factors()
        random = np.random.default_rng(len(self._rows))
        drawn = slow.draws(comm, slice(0, first), random)
        self._f, self._levels = drawn[: self._size], drawn[self._size :]
        self._rho = slow.draws(comp, slice(first, size), random)
        self._offsets = np.append(0.0, random.standard_normal(NUM_DRAWS - 1))
        self._fit_missed()

    def _fit_missed(self) -> None:
        kept = [row for number, row in enumerate(self._rows) if not self._slowed[number]]
        exposed = [max(0.0, row.makespan - float(row.comm.sum())) for row in kept if row.makespan > 1.02 * row.comp]
        self._gap = float(np.median(exposed)) if exposed else 0.0
        expected = self._by_curves(self._told, slice(0, 1))[:, 0]
        values = np.log([row.makespan for row in self._rows]) - np.log(expected) - self._slowed
        noise = np.diag(self._sigma**2 + 1e-5 + self._slowed_variance)
        kernels = [self._missed_of(self._told, self._told, missed) for missed in MISSED]
        fits = [_Root(kernel + noise, values) for kernel in kernels]
        likeliest = max(range(len(MISSED)), key=lambda number: fits[number].log_likelihood)
        self._missed = MISSED[likeliest]
        self._missed_root, self._missed_values = fits[likeliest].root, fits[likeliest].whitened

    def _kernel_of(self, one: Places, other: Places) -> Floats:
        """The mean over the collectives."""
        result = np.zeros((len(one), len(other)))
        for j in range(one.shape[1]):
            result += self._missed_kernel[np.ix_(one[:, j], other[:, j])]
        return np.asarray(result / one.shape[1])

    def _missed_of(self, one: Places, other: Places, missed: float) -> Floats:
        alike = (one[:, None, :] == other[None, :, :]).all(axis=2)
        return np.asarray(missed**2 * self._kernel_of(one, other) + OWN_MISSED**2 * alike)

    def _by_curves(self, places: Places, which: "slice | EllipsisType") -> Floats:
        """Z of both curves; where exposed, the computation has a collective next to it all the time but the gap."""
        f, rho, levels = self._f[:, which], self._rho[:, which], self._levels[:, which]
        logs = f[places] + (levels[self._class_of] + self._log_share[:, None])[None]
        comm = np.exp(np.clip(logs, -20.0, 8.0))
        total = comm.sum(axis=1)
        lost = (comm * np.clip(rho[places], 0.0, 3.0)).sum(axis=1)
        alone = np.maximum(rho[-1][None], 0.0)
        end, share = total + self._gap, lost / total
        hidden = alone + lost
        covered = np.maximum((alone - self._gap * share) / np.maximum(1.0 - share, 0.2), alone)
        comp = np.where(end <= hidden, hidden, np.minimum(hidden, covered))
        return np.asarray(np.maximum(comp, end))


class _Root:
    """Values with a covariance: what its Cholesky root tells."""

    def __init__(self, covariance: Floats, values: Floats) -> None:
        self.root = np.linalg.cholesky(covariance)
        self.whitened = np.linalg.solve(self.root, values)
        self.log_likelihood = float(-(self.whitened @ self.whitened) / 2 - np.log(np.diag(self.root)).sum())


class _Slow:
    """All that was told, with the measurements that were slow as a whole: those without which it would be unlikely.

    A measurement by itself (a late rank), or the first ones by one factor (a clock ramp), one after the other as long
    as the likelihood rises by more than that costs.
    """

    def __init__(self, covariance: Floats, values: Floats, wholes: Floats) -> None:
        num = len(wholes)
        self._values, self._wholes = values, wholes
        self._factors: list[tuple[int, ...]] = []
        candidates: list[tuple[int, ...]] = [(number,) for number in range(num)]
        candidates += [tuple(range(most + 1)) for most in range(1, min(MOST_RAMP, num - 1))]
        shapes = np.array([wholes[list(each)].sum(axis=0) for each in candidates])
        root = _Root(covariance, values)
        cost = 0.0
        while num >= FEWEST_SLOW and len(self._factors) <= num // 3:
            bent = np.linalg.solve(root.root, shapes.T)
            size = (bent**2).sum(axis=0)
            along = bent.T @ root.whitened
            gain = SLOW_SIGMA**2 * along**2 / (1 + SLOW_SIGMA**2 * size) / 2 - np.log1p(SLOW_SIGMA**2 * size) / 2
            factor = SLOW_SIGMA**2 * along / (1 + SLOW_SIGMA**2 * size)
            taken = np.array([each in self._factors for each in candidates])
            comp = covariance[-num:, -num:]
            bent = np.linalg.solve(comp, shapes[:, -num:].T)
            alone = (
                SLOW_SIGMA**2 * (values[-num:] @ bent) / (1 + SLOW_SIGMA**2 * (shapes[:, -num:].T * bent).sum(axis=0))
            )
            gain[(factor < LEAST_SLOW) | (alone < LEAST_SLOW) | taken] = -np.inf
            found = int(np.argmax(gain))
            if gain[found] <= SLOW_COST:
                break
            self._factors.append(candidates[found])
            covariance = covariance + SLOW_SIGMA**2 * np.outer(shapes[found], shapes[found])
            root, cost = _Root(covariance, values), cost + SLOW_COST
        self._root, self.log_likelihood = root, root.log_likelihood - cost

    def factors(self) -> tuple[Floats, Floats]:
        """The logarithms of the measurements' factors, 0 for those that were not slow, and their variances."""
        mean, variance = np.zeros(len(self._wholes)), np.zeros(len(self._wholes))
        for members in self._factors:
            bent = np.linalg.solve(self._root.root, self._wholes[list(members)].sum(axis=0))
            mean[list(members)] += SLOW_SIGMA**2 * float(bent @ self._root.whitened)
            variance[list(members)] += SLOW_SIGMA**2 * (1 - SLOW_SIGMA**2 * float(bent @ bent))
        return mean, np.maximum(variance, 0.0)

    def draws(self, data: _Data, part: slice, random: np.random.Generator) -> Floats:
        """(size, draws) of a process given all values, of which `part` are its observations; its mean first."""
        towards = np.zeros((len(self._values), len(data.mean)))
        towards[part] = data.weights @ data.kernel
        solved = np.linalg.solve(self._root.root, towards)
        mean, kernel = data.mean + solved.T @ self._root.whitened, data.kernel - solved.T @ solved
        root = np.linalg.cholesky(kernel + 10 * JITTER * np.eye(len(mean)))
        drawn = np.column_stack([np.zeros(len(mean)), random.standard_normal((len(mean), NUM_DRAWS - 1))])
        return np.asarray(mean[:, None] + root @ drawn)


def expected_gain(candidates: Floats, incumbent: Floats) -> Floats:
    """Of each candidate, by how much it is expected to be faster than the incumbent where it is at all."""
    return np.asarray(np.maximum(0.0, incumbent[None] - candidates).mean(axis=1))


def thinned(axis: Sequence[int | None], ratio: float) -> list[int]:
    """From the most down, values that lie apart by a factor of about `ratio` at least; none for an engine's own."""
    kept: list[int] = []
    for value in reversed([value for value in axis if value is not None]):
        if not kept or kept[-1] / value >= 0.97 * ratio:
            kept.append(value)
    return kept
