"""What the settings measured so far say of the others: two smooth curves and what they miss, each a Gaussian process.

Ours, not a paper's. A measurement of an assignment c_1 ... c_N tells N + 2 times, all of them used:

    x_j(c) = x_j(default) exp(f(c) - f(default))     communication: one f for all collectives of a group
    Y      = Y_0 + sum_j o_j rho(c_j)                what runs next to a collective for o_j seconds loses rho of them
    Z      = max(Y, sum_j x_j + g) exp(d)            g: where exposed, what the sum lacks; d: what both curves miss

f and rho are functions of the kind (algorithm, protocol, transport), log2 channels and log2 chunk: trends plus a smooth
remainder, no formula of a link or a GPU. d is a process over assignments, with a part of each one's own. A knob that is
left to the engine counts as what the engine is known to take, else as the most, of a kind of its own. A measurement
that is slow as a whole (a clock ramp, a late rank) lengthens computation and communication alike by `LEAST_SLOW` and
more; it is found by the likelihood with and without it, and then tells nothing of the makespan.

The widths of the priors are round numbers for any GPU and network: twice the channels take 0.73 of the time, give or
take a factor of 1.3; a computation loses up to a third to the most channels. They are no fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Final

import numpy as np
import numpy.typing as npt

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.problem import Assignment, Measurement

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
"""(assignments, collectives) into the settings."""

NUM_DRAWS: Final = 32
LEAST_SLOW: Final = 0.1
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
MISFIT: Final = 0.003
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
    """Linear observations of a process: values less the prior's mean, and their covariance without noise."""

    weights: Floats
    values: Floats
    covariance: Floats
    rows: npt.NDArray[np.intp]


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
        self._default = np.array(self._rows[0].places)
        self._priors(settings)
        self._fit(SIGMAS if sigma is None else (sigma,))

    @property
    def sigma(self) -> float:
        """The noise of one measurement's times, as a share of them."""
        return self._sigma

    @property
    def slow(self) -> frozenset[int]:
        """The measurements that were slow as a whole."""
        return self._slow

    def places(self, assignments: Sequence[Assignment]) -> Places:
        """The assignments by their settings' places."""
        return np.array([[self._index[config] for config in each] for each in assignments], dtype=np.intp)

    def draws(self, places: Places) -> Floats:
        """(assignments, draws): makespans over the shortest told: the expected one, then draws."""
        step = max(1, MOST_AT_ONCE // (places.shape[1] * NUM_DRAWS))
        parts = [self._by_curves(places[at : at + step], self._f, self._rho) for at in range(0, len(places), step)]
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
        origin = self._default[0]
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
        """Logarithms of times over the default's, the collectives of a setting together; their variances in sigma^2."""
        first = self._rows[0].comm
        weights, values, variances, rows = [], [], [], []
        for number, row in enumerate(self._rows[1:], 1):
            for place in dict.fromkeys(row.places):
                members = [j for j, each in enumerate(row.places) if each == place]
                told, begun = row.comm[members], first[members]
                one = np.zeros(self._size)
                one[place] += 1.0
                np.subtract.at(one, self._default[members], begun / begun.sum())
                weights.append(one)
                values.append(log(told.sum() / begun.sum()) - one @ self._f_mean)
                variances.append((told**2).sum() / told.sum() ** 2 + (begun**2).sum() / begun.sum() ** 2)
                rows.append(number)
        matrix = np.array(weights).reshape(-1, self._size)
        covariance = matrix @ self._f_kernel @ matrix.T
        return _Data(matrix, np.array(values), covariance, np.array(rows, dtype=np.intp)), np.array(variances)

    def _comp_data(self, rate: Floats) -> tuple[_Data, Floats, Floats]:
        """Computations over what ran next to them; with the prior of rho and Y_0, mean and covariance."""
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
        data = _Data(weights, values, weights @ kernel @ weights.T, np.arange(len(self._rows)))
        return data, mean, kernel

    def _fit(self, sigmas: Sequence[float]) -> None:
        comm, variances = self._comm_data()
        f_mean = self._f_mean
        if len(comm.values):
            rough = comm.covariance + np.diag(variances * 0.02**2 + MISFIT**2)
            f_mean = f_mean + self._f_kernel @ comm.weights.T @ np.linalg.solve(rough, comm.values)
        comp, rho_mean, rho_kernel = self._comp_data(np.exp(f_mean.min() - f_mean))

        def roots(sigma: float, slow: frozenset[int]) -> tuple["_Root", "_Root"]:
            slows = np.array([number in slow for number in range(len(self._rows))], dtype=float)
            together = np.full_like(comm.covariance, 0 in slow)
            for number in slow:
                of_row = (comm.rows == number).astype(float)
                together += np.outer(of_row, of_row)
            noise = np.diag(variances * sigma**2 + MISFIT**2) + SLOW_SIGMA**2 * together
            told = np.array([row.comp for row in self._rows])
            comp_noise = np.diag((sigma * told) ** 2 + 0.005**2 + (SLOW_SIGMA * told) ** 2 * slows)
            return _Root(comm, noise), _Root(comp, comp_noise)

        def judged(sigma: float, slow: frozenset[int]) -> float:
            likelihoods = sum(root.log_likelihood for root in roots(sigma, slow))
            return likelihoods - SLOW_COST * len(slow) - 0.3 * abs(log(sigma / 0.02))

        best: tuple[float, float, frozenset[int]] | None = None
        for sigma in sigmas:
            slow: frozenset[int] = frozenset()
            likely = judged(sigma, slow)
            while len(self._rows) >= 3 and len(slow) <= len(self._rows) // 3:
                others = [number for number in range(len(self._rows)) if number not in slow]
                more = [slow | {number} for number in others if self._is_slow(number, *roots(sigma, slow | {number}))]
                found = max(((judged(sigma, each), sorted(each)) for each in more), default=(likely, []))
                if found[0] <= likely:
                    break
                likely, slow = found[0], frozenset(found[1])
            if best is None or likely > best[0]:
                best = likely, sigma, slow
        assert best is not None, "at least one sigma"
        _, self._sigma, self._slow = best
        f_root, rho_root = roots(self._sigma, self._slow)
        random = np.random.default_rng(len(self._rows))
        self._f = f_root.draws(self._f_mean, self._f_kernel, random)
        self._rho = rho_root.draws(rho_mean, rho_kernel, random)
        self._offsets = np.append(0.0, random.standard_normal(NUM_DRAWS - 1))
        expected = float(comp.weights[0] @ self._rho[:, 0])
        is_first_slow = 0 in self._slow and expected > 0
        self._first = self._rows[0].comm / (max(1.0, self._rows[0].comp / expected) if is_first_slow else 1.0)
        self._fit_missed()

    def _is_slow(self, number: int, comm: "_Root", comp: "_Root") -> bool:
        """Whether both sides lasted longer than the others' measurements say."""
        told = self._rows[number].comp
        if comp.left[number] < LEAST_SLOW * told:
            return False
        if number == 0:
            return -(SLOW_SIGMA**2) * float(comm.solved.sum()) > LEAST_SLOW
        return float(np.mean(comm.left[comm.data.rows == number])) > LEAST_SLOW

    def _fit_missed(self) -> None:
        self._told = np.array([row.places for row in self._rows], dtype=np.intp)
        kept = [row for number, row in enumerate(self._rows) if number not in self._slow]
        exposed = [max(0.0, row.makespan - float(row.comm.sum())) for row in kept if row.makespan > 1.02 * row.comp]
        self._gap = float(np.median(exposed)) if exposed else 0.0
        expected = self._by_curves(self._told, self._f[:, :1], self._rho[:, :1])[:, 0]
        values = np.log([row.makespan for row in self._rows]) - np.log(expected)
        slows = np.array([number in self._slow for number in range(len(self._rows))], dtype=float)
        noise = np.diag(self._sigma**2 + 1e-5 + SLOW_SIGMA**2 * slows)
        kernels = [self._missed_of(self._told, self._told, missed) for missed in MISSED]
        data = [_Data(kernel, values, kernel, np.arange(len(values))) for kernel in kernels]
        fits = [_Root(each, noise) for each in data]
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

    def _by_curves(self, places: Places, f: Floats, rho: Floats) -> Floats:
        """Z of both curves; where exposed, the computation has a collective next to it all the time but the gap."""
        comm = self._first[None, :, None] * np.exp(np.clip(f[places] - f[self._default][None], -4.0, 6.0))
        total = comm.sum(axis=1)
        lost = (comm * np.clip(rho[places], 0.0, 3.0)).sum(axis=1)
        alone = np.maximum(rho[-1][None], 0.0)
        end, share = total + self._gap, lost / total
        hidden = alone + lost
        covered = np.maximum((alone - self._gap * share) / np.maximum(1.0 - share, 0.2), alone)
        comp = np.where(end <= hidden, hidden, np.minimum(hidden, covered))
        return np.asarray(np.maximum(comp, end))


class _Root:
    """Observations with noise: what their Cholesky root tells."""

    def __init__(self, data: _Data, noise: Floats) -> None:
        self.data, self._noise = data, noise
        self.root = np.linalg.cholesky(data.covariance + noise) if len(data.values) else np.zeros((0, 0))
        self.whitened = np.linalg.solve(self.root, data.values) if len(data.values) else data.values
        self.log_likelihood = float(-(self.whitened @ self.whitened) / 2 - np.log(np.diag(self.root)).sum())

    @property
    def solved(self) -> Floats:
        """The inverse covariance times the values."""
        return np.asarray(np.linalg.solve(self.root.T, self.whitened))

    @property
    def left(self) -> Floats:
        """Of the values, what the process does not say."""
        return np.asarray(self.data.values - self.data.covariance @ self.solved)

    def draws(self, mean: Floats, kernel: Floats, random: np.random.Generator) -> Floats:
        """(settings, draws) of the process given the observations, its mean first."""
        if len(self.data.values):
            solved = np.linalg.solve(self.root, self.data.weights @ kernel)
            mean, kernel = mean + solved.T @ self.whitened, kernel - solved.T @ solved
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
