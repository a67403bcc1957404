"""Predicts unmeasured settings from the measured ones: two smooth curves and their error, each a Gaussian process.

Ours, not a paper's. A measurement of an assignment c_1 ... c_N gives N + 2 times, all of which are used:

    x_j(c) = exp(l_j + f(c))                         communication: one f for all collectives of a group, a level each
    Y      = Y_0 + sum_j o_j rho(c_j)                what runs next to a collective for o_j seconds loses rho of them
    Z      = max(Y, sum_j x_j + g) exp(d)            g: where exposed, what the sum lacks; d: what both curves miss
                                                     (at once; if some wait for producers s_k Y + x_k + ... + x_N)

f and rho are functions of the kind (algorithm, protocol, transport), log2 channels and log2 chunk: trends plus a smooth
remainder, no formula of a link or a GPU. d is a process over assignments, with a part for each assignment alone. A knob
that is left to the engine counts as the value that the engine is known to take, else as the largest, with a kind of its
own.

A measurement may be slow as a whole (a late rank), or the first ones together (a clock ramp): then all its times are
longer by one factor of at least `LEAST_SLOW`. The likelihood with and without the factor decides, one candidate after
the other; the factor must also show in the computation's times alone. The times of such a measurement still count
relative to each other, and its makespan without the factor.

Where the group's kernels are known (a trace, a job of kernels), collectives may also wait for kernels to end
(`waiting.py`); the likelier way to start counts. Then f is learned from the times without their waits, and Z is
simulated kernel by kernel. Else collectives may wait for their producers, until a share s_j of the computation is done:
told by the group, or drawn and weighed by the measured makespans; Z is the end of both streams, played through.

A makespan is read twice where the other times agree with it: where communication ends last, their sum is less noisy
than Z.

The widths of the priors are round numbers for any GPU and network: twice the channels take 0.73 of the time, give or
take a factor of 1.3; a computation loses up to a third to the most channels (0.25, give or take 0.2; 20 products on an
MI300X lose 0.07 on average to 32 of its CUs, with a deviation of 0.11 between them). They were chosen, not fitted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from types import EllipsisType
from typing import Final

import numpy as np
import numpy.typing as npt

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.gaussian_process import JITTER, NUM_DRAWS, Data, Root, Slow
from lagom_overlap.tuners.problem import Assignment, Measurement
from lagom_overlap.tuners.waiting import Replayed, Stream, drawn_starts, makespans, replay

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
"""(assignments, collectives) into the settings."""

SIGMAS: Final = (0.005, 0.02)
"""Candidates for the noise of one measurement's times, as a share, where there are no repeats. Chosen, not measured."""
MISSED: Final = (0.01, 0.03, 0.08)
"""Candidates for the standard deviation of d; the likeliest is taken. Chosen, not measured."""
OWN_MISSED: Final = 0.01
"""The part of d's standard deviation that belongs to each assignment alone."""
MOST_AT_ONCE: Final = 1 << 20
"""Numbers in one batch of predictions; bounds memory."""
MISFITS: Final = (0.003, 0.03, 0.1)
"""Candidates for how far a collective's time is off its curve because of the other settings; the likeliest is taken."""
LEVEL_SIGMA: Final = 1.0
"""Prior standard deviation of the logarithm of a collective's level: wide enough to leave it to the measurements."""
OWN_LEVEL: Final = 0.1
"""How far a collective's level may be off its share of the bytes on the wire. Chosen, not measured."""
NEARBY: Final = (0.12, 0.1)
"""Prior mean and deviation of the logarithm by which a collective is slower next to a kernel than alone."""
WAITING_COST: Final = 3.0
"""How much more likely (in log) waiting must make the data before it is assumed."""
MOST_LOST: Final = 0.8
"""The largest share of its speed that a kernel may lose next to a collective; keeps predictions finite."""
LATE: Final = 0.02
"""The share of the computation from which a collective counts as waiting for its producer. Chosen."""
AGREEING: Final = 6.0
"""Standard errors within which two readings of a makespan count as readings of the same time."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration and the channels and chunk it counts as; `is_known`: no knob is left to an unknown default."""

    config: CommConfig
    num_channels: int
    chunk_bytes: int
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class _Fit:
    """Both curves' observations, how likely they are, and with what noise."""

    likely: float
    sigma: float
    misfit: float
    slow: Slow
    comm: Data
    comp: Data


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One measurement in units of the shortest makespan."""

    places: tuple[int, ...]
    makespan: float
    comp: float
    comm: Floats


class Curves:
    """The fit to a group's measurements, the first of which is the default's."""

    def __init__(
        self,
        settings: Sequence[Setting],
        measured: Sequence[tuple[Assignment, Measurement]],
        sigma: float | None,
        *,
        stream: Stream | None = None,
        slowed: Sequence[float] = (),
        like: "Curves | None" = None,
    ) -> None:
        """`slowed` is what an earlier fit said of the first measurements; `like` chose the widths of these ones."""
        self.settings = {setting.config: setting for setting in settings}
        self._index = {config: place for place, config in enumerate(self.settings)}
        self._size = len(settings)
        self._unit_s = unit_s = min(each.makespan_s for _, each in measured) or 1.0
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
        self._begun = np.array([*slowed, *[1.0] * (len(measured) - len(slowed))])
        self._stream = stream
        self._kernels: Floats | None = None
        self._priors(settings)
        if like is not None:
            self._kernels = like._kernels
            self._fit((like.sigma,), (like._misfit,))
        else:
            self._fit(SIGMAS if sigma is None else (sigma,), None)

    @property
    def sigma(self) -> float:
        """The noise of one measurement's times, as a share of them."""
        return self._sigma

    @property
    def unit_s(self) -> float:
        """The shortest measured makespan in seconds, the unit of all draws."""
        return self._unit_s

    def slowed(self, number: int) -> float:
        """The factor by which a measurement was slow as a whole; 1 if it was not."""
        return float(np.exp(self._slowed[number]))

    def places(self, assignments: Sequence[Assignment]) -> Places:
        """The assignments by their settings' places."""
        return np.array([[self._index[config] for config in each] for each in assignments], dtype=np.intp)

    def indices(self, configs: Iterable[CommConfig]) -> list[int]:
        """The places of configurations."""
        return [self._index[config] for config in configs]

    def assignment(self, places: Places) -> Assignment:
        """The configurations at one place per collective."""
        configs = list(self.settings)
        return tuple(configs[place] for place in places)

    def begins_late(self, j: int) -> bool:
        """Whether a collective seems to wait for its producer."""
        return bool(self._starts.shares[j, 0] > LATE)

    def draws(self, places: Places) -> Floats:
        """Makespans over the shortest measured one (assignments, draws): the expected one first, then draws."""
        step = max(1, MOST_AT_ONCE // (places.shape[1] * NUM_DRAWS))
        parts = [self._by_curves(places[at : at + step], ...) for at in range(0, len(places), step)]
        makespans = np.concatenate(parts)
        covariance = self._missed_of(self._told, places, self._missed)
        solved = np.linalg.solve(self._missed_root, covariance)
        variance = np.maximum(self._missed**2 + OWN_MISSED**2 - (solved**2).sum(axis=0), 0.0)
        mean = solved.T @ self._missed_values
        result: Floats = makespans * np.exp(mean[:, None] + np.sqrt(variance)[:, None] * self._offsets[None])
        return result

    def expected(self, places: Places, draws: Places) -> Floats:
        """Makespans over the shortest measured one, each row by the curves of its own draw; draw 0 is their mean.

        What both curves miss is left out.
        """
        if self._kernels is not None:
            result = np.empty(len(places))
            for draw in np.unique(draws).tolist():
                result[draws == draw] = self._by_curves(places[draws == draw], slice(draw, draw + 1))[:, 0]
            return result
        row = np.arange(places.shape[1])
        logs = self._f[places, draws[:, None]] + self._levels[self._class_of[row][None], draws[:, None]]
        comm = np.exp(np.clip(logs + self._log_share[None], -20.0, 8.0))
        alone, starts = np.maximum(self._rho[-1, draws], 1e-9), self._starts.shares[:, draws]
        return _walked(comm.T, self._rho[places, draws[:, None]].T, alone, starts, self._starts.gaps[draws])

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
        self._rho_kernel = trend(share, 0.2) + trend(np.sqrt(share), 0.1) + 0.06**2 * smooth(1.0, 3.0)
        self._rho_kernel += 0.03**2 * smooth(0.5, 5.0) + 0.02**2 * same
        self._missed_kernel = smooth(1.5, 3.0) * (0.5 + 0.5 * same)

    def _comm_data(self, played: Replayed, kernels: Floats | None) -> tuple[Data, Floats]:
        """Logarithms of the times without waits, and their variances per unit of noise variance.

        Where the stream is not known, collectives that had the same settings in all measurements count as one.
        """
        moved, log_shares = played.moved, None if self._stream is None else np.log(self._stream.shares)
        members: dict[tuple[int, ...], list[int]] = {}
        for j, column in enumerate(self._told.T):
            members.setdefault((*column.tolist(), -1 if log_shares is None else j), []).append(j)
        classes = list(members.values())
        num, firsts = len(classes), [each[0] for each in classes]
        sums = np.stack([moved[:, each].sum(axis=1) for each in classes], axis=1)
        noise = np.stack([(played.took[:, each] ** 2).sum(axis=1) for each in classes], axis=1) / sums**2
        self._class_of = np.empty(self._told.shape[1], dtype=np.intp)
        for number, each in enumerate(classes):
            self._class_of[each] = number
        self._log_share = np.log(moved / sums[:, self._class_of]).mean(axis=0)
        rows, of = (np.repeat(np.arange(len(moved)), num), np.tile(np.arange(num), len(moved)))
        size, at = self._size + num + 1, np.arange(len(rows))
        weights, kernel = np.zeros((len(rows), size)), np.zeros((size, size))
        weights[at, self._told[rows, np.array(firsts)[of]]] = 1.0
        weights[at, self._size + of] = 1.0
        kernel[: self._size, : self._size] = self._f_kernel
        values = np.log(sums)
        levels = values - self._f_mean[self._told[:, firsts]]
        nearby = 0.0
        if log_shares is None:
            kernel[self._size : -1, self._size : -1] = LEVEL_SIGMA**2 * np.eye(num)
            means = levels.mean(axis=0)
        else:
            kernel[self._size : -1, self._size : -1] = LEVEL_SIGMA**2 + OWN_LEVEL**2 * np.eye(num)
            sure = 1 / (noise + (played.error / moved) ** 2 + OWN_LEVEL**2)
            means = log_shares + float(((levels - log_shares) * sure).sum() / sure.sum())
        if kernels is not None:
            weights[:, -1], kernel[-1, -1], nearby = (played.beside / moved).ravel(), NEARBY[1] ** 2, NEARBY[0]
        mean = np.concatenate([self._f_mean, means, [nearby]])
        return Data(weights, values.ravel() - weights @ mean, mean, kernel, rows), noise.ravel()

    def _comp_data(self, rate: Floats, beside: Floats) -> Data:
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
            np.add.at(weights[number], list(row.places), beside[number])
        values = np.array([row.comp for row in self._rows]) - weights @ mean
        return Data(weights, values, mean, kernel, np.arange(len(self._rows)))

    def _at_once(self) -> Replayed:
        """All of a collective's time is its own; the last ones are what is exposed."""
        took = np.array([row.comm for row in self._rows])
        beside = np.zeros_like(took)
        for number, row in enumerate(self._rows):
            exposed = max(0.0, row.makespan - row.comp)
            for j in reversed(range(len(row.places))):
                beside[number, j] = max(0.0, row.comm[j] - exposed)
                exposed = max(0.0, exposed - row.comm[j])
        return Replayed(took, took, beside, np.zeros_like(took))

    def _fit(self, sigmas: Sequence[float], chosen: Sequence[float] | None) -> None:
        misfits: Sequence[float] = MISFITS if self._told.shape[1] > 1 else MISFITS[:1]
        if chosen is not None:
            misfits = chosen
        elif self._stream is not None:
            launches, middle = self._stream.launches, misfits[len(misfits) // 2]
            likely = [self._fit_launch(launch, sigmas[-1:], (middle,)).likely for launch in launches]
            likely = [each - (0.0 if one is None else WAITING_COST) for each, one in zip(likely, launches, strict=True)]
            self._kernels = launches[int(np.argmax(likely))]
            self._stream = self._stream.narrowed(likely)
        fit = self._fit_launch(self._kernels, sigmas, misfits)
        self._sigma, self._misfit = fit.sigma, fit.misfit
        self._slowed, self._slowed_variance = fit.slow.factors()
        random = np.random.default_rng(len(self._rows))
        first = len(fit.comm.values)
        drawn = fit.slow.draws(fit.comm, slice(0, first), random)
        self._f, self._levels, self._nearby = drawn[: self._size], drawn[self._size : -1], np.exp(drawn[-1])
        self._rho = fit.slow.draws(fit.comp, slice(first, first + len(self._rows)), random)
        self._offsets = np.append(0.0, random.standard_normal(NUM_DRAWS - 1))
        self._fit_missed()

    def _fit_launch(self, launch: Floats | None, sigmas: Sequence[float], misfits: Sequence[float]) -> "_Fit":
        """The fit for one way to start; done twice if collectives wait, because waits depend on what kernels lose."""
        fit = None
        for _ in range(1 if launch is None else 2):
            fit = self._fit_played(
                self._at_once() if launch is None else self._waiting(launch, fit), launch, sigmas, misfits
            )
        assert fit is not None, "at least one fit"
        return fit

    def _waiting(self, launch: Floats, fit: "_Fit | None") -> Replayed:
        """The measured collectives replayed between the kernels, whose times and losses are from the earlier fit."""
        comp = np.array([row.comp for row in self._rows])
        slowed, lost, alone = self._begun, 0.25 * self._share, 0.87 * (comp / self._begun).min()
        if fit is not None:
            mean = fit.slow.mean(fit.comp, slice(len(fit.comm.values), None))
            slowed, lost, alone = np.exp(fit.slow.factors()[0]), np.clip(mean[:-1], 0.0, MOST_LOST), mean[-1]
        took = np.array([row.comm for row in self._rows]) / slowed[:, None]
        return replay(launch * max(alone, 1e-9) / launch.sum(), lost[self._told], took).times(slowed)

    def _fit_played(
        self, played: Replayed, kernels: Floats | None, sigmas: Sequence[float], misfits: Sequence[float]
    ) -> "_Fit":
        comm, errors = self._comm_data(played, kernels)
        waited = (played.error / played.moved).ravel() ** 2 if kernels is not None else 0.0
        rough = comm.fitted(np.diag(errors * 0.02**2 + waited + MISFITS[0] ** 2))[: self._size]
        comp = self._comp_data(np.exp(rough.min() - rough), played.beside)
        observed_comp = np.array([row.comp for row in self._rows])
        first = len(comm.values)
        size = first + len(observed_comp)
        covariance = np.zeros((size, size))
        covariance[:first, :first], covariance[first:, first:] = comm.covariance, comp.covariance
        values = np.concatenate([comm.values, comp.values])
        # The effect of a factor on the whole measurement on each of its times.
        wholes = np.zeros((len(observed_comp), size))
        wholes[comm.rows, np.arange(first)] = 1.0
        wholes[np.arange(len(observed_comp)), first + np.arange(len(observed_comp))] = observed_comp
        # The data are logarithms of times without waits; this Jacobian makes it the likelihood of the times with them.
        wait = float(np.log(played.took / played.moved).sum()) if kernels is not None else 0.0
        fits = []
        for sigma, misfit in product(sigmas, misfits):
            noise = np.concatenate([errors * sigma**2 + waited + misfit**2, (sigma * observed_comp) ** 2 + 0.005**2])
            slow = Slow(covariance + np.diag(noise), values, wholes)
            fits.append(
                _Fit(slow.log_likelihood - 0.3 * abs(log(sigma / 0.02)) + wait, sigma, misfit, slow, comm, comp)
            )
        return max(fits, key=lambda each: each.likely)

    def _fit_missed(self) -> None:
        kept = [row for number, row in enumerate(self._rows) if not self._slowed[number]]
        least = 1 + max(0.02, 3 * self._sigma)
        exposed = [row.makespan - float(row.comm.sum()) for row in kept if row.makespan > least * row.comp]
        self._gap = max(0.0, float(np.median(exposed))) if exposed else 0.0
        known = None if self._stream is None or not self._stream.told else np.array(self._stream.told)
        kept = kept or self._rows
        self._starts = drawn_starts(
            np.array([row.comm for row in kept]),
            np.array([row.comp for row in kept]),
            np.array([row.makespan for row in kept]),
            sigma=self._sigma,
            gap=self._gap,
            told=known,
            num=NUM_DRAWS,
        )
        readings = [self._reading(row) for row in self._rows]
        self._readings = np.array([value for value, _ in readings]) - self._slowed
        variances = np.array([variance for _, variance in readings])
        expected = self._by_curves(self._told, slice(0, 1))[:, 0]
        values = self._readings - np.log(expected)
        noise = np.diag(variances + 1e-5 + self._slowed_variance)
        kernels = [self._missed_of(self._told, self._told, missed) for missed in (MISSED[:2] if self.waits else MISSED)]
        fits = [Root(kernel + noise, values) for kernel in kernels]
        likeliest = max(range(len(fits)), key=lambda number: fits[number].log_likelihood)
        self._missed = MISSED[likeliest]
        self._missed_root, self._missed_values = fits[likeliest].root, fits[likeliest].whitened

    def _reading(self, row: _Row) -> tuple[float, float]:
        """The logarithm of a makespan from all times of the measurement, and its variance.

        Where communication ends last, its times add up to the makespan; otherwise the computation's time is the
        makespan. A second reading that disagrees beyond the noise (collectives that were issued later) is left out.
        """
        observed, end = log(row.makespan), self._starts.end(row.comm, row.comp)
        other, variance = log(max(row.comp, end, 1e-9)), self._sigma**2
        if end > row.comp:
            variance *= float((row.comm**2).sum()) / end**2
        if abs(observed - other) > AGREEING * self._sigma:
            return observed, self._sigma**2
        weight = self._sigma**2 / (self._sigma**2 + variance)
        return observed + weight * (other - observed), self._sigma**2 * (1 - weight)

    def makespan(self, number: int) -> float:
        """A measurement's makespan in seconds by all its times, without the factor by which it was slow as a whole."""
        return float(np.exp(self._readings[number]) * self._unit_s)

    @property
    def may_wait(self) -> bool:
        """Whether collectives seem to wait for kernels or for their producers."""
        return self.waits or bool((self._starts.shares[:, 0] > 0).any())

    @property
    def waits(self) -> bool:
        """Whether collectives seem to wait for kernels to end."""
        return self._kernels is not None

    @property
    def stream(self) -> Stream | None:
        """The stream, without the ways to start that have become unlikely."""
        return self._stream

    def _kernel_of(self, one: Places, other: Places) -> Floats:
        """The mean over the collectives."""
        return np.asarray(self._missed_kernel[one[:, None, :], other[None, :, :]].mean(axis=2))

    def _missed_of(self, one: Places, other: Places, missed: float) -> Floats:
        alike = (one[:, None, :] == other[None, :, :]).all(axis=2)
        return np.asarray(missed**2 * self._kernel_of(one, other) + OWN_MISSED**2 * alike)

    def _by_curves(self, places: Places, which: "slice | EllipsisType") -> Floats:
        """Z of both curves; where exposed, the computation has a collective next to it all the time but the gap."""
        f, rho, levels = self._f[:, which], self._rho[:, which], self._levels[:, which]
        logs = f[places] + (levels[self._class_of] + self._log_share[:, None])[None]
        comm = np.exp(np.clip(logs, -20.0, 8.0))
        if self._kernels is not None:
            alone = self._kernels[:, None] * np.maximum(rho[-1], 1e-9) / self._kernels.sum()
            return makespans(alone, np.clip(rho[places], 0.0, MOST_LOST), comm, self._nearby[which])
        alone, starts = np.maximum(rho[-1][None], 1e-9), self._starts.shares[:, which]
        return _walked(
            np.moveaxis(comm, 1, 0), np.moveaxis(rho[places], 1, 0), alone, starts[:, None], self._starts.gaps[which]
        )


def _walked(comm: Floats, lost: Floats, alone: Floats, starts: Floats, gap: Floats) -> Floats:
    """When both streams have ended: an in-order stream of collectives, the first axis, next to a computation.

    Collective j begins when the one before has ended and the share `starts[j]` of the computation, which takes `alone`,
    is done. While it runs, for `comm[j]`, the computation loses the share `lost[j]` of its speed.
    """
    now = done = np.zeros(comm.shape[1:])
    rates = 1.0 - np.clip(lost, 0.0, MOST_LOST)
    comp = np.zeros(now.shape)
    for took, rate, start in zip(comm, rates, starts, strict=True):
        wait = np.maximum(0.0, start * alone - done)
        now, done = now + wait, done + wait
        comp = np.where(done < alone, now + np.minimum(took, (alone - done) / rate), comp)
        now, done = now + took, np.minimum(alone, done + took * rate)
    return np.asarray(np.maximum(comp + (alone - done), now + gap))


def expected_gain(candidates: Floats, incumbent: Floats) -> Floats:
    """The expected improvement of each candidate over the incumbent: the mean of max(0, gain) over the draws."""
    return np.asarray(np.maximum(0.0, incumbent[None] - candidates).mean(axis=1))


def thinned(axis: Sequence[int | None], ratio: float) -> list[int]:
    """Values from the largest down that are at least about a factor `ratio` apart; the engine's own (None) is left out.

    0.97 tolerates the rounding of lattice values.
    """
    kept: list[int] = []
    for value in reversed([value for value in axis if value is not None]):
        if not kept or kept[-1] / value >= 0.97 * ratio:
            kept.append(value)
    return kept
