"""The model of the machine in plain numpy, for comparison with csrc/lagom_search_*.c: slow, and easy to read.

The formulas are those of `group_model.py` and `surrogate.py`; here derivatives are differences, the
progress of the computations is a sum over clipped intervals (there: events in order), and nothing is kept between
calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lagom_overlap.tuners.machine.group_model import (
    MISFITS,
    NUM_OF_KIND,
    NUM_PARAMS,
    NUM_SHARED,
    SPOT_SD,
    ComputeModel,
    Misfit,
    ModelFit,
    Prior,
)
from lagom_overlap.tuners.machine.search_space import Floats, Ints, Record, SearchSpace, distances, step_likeness

LEAST_VARIANCE = 1e-8
NEAR_FRONT = 1.004
STEP = 1e-4
Predict = Callable[[Floats], Floats]
"""From (S, Q, P) parameters to (S, Q, D) predicted logarithms."""


def gather(values: Sequence[npt.NDArray[np.generic]], places: Ints) -> npt.NDArray[Any]:
    """(D, N) of one array per collective at places (D, N)."""
    return np.stack([array[places[:, j]] for j, array in enumerate(values)], axis=1)


def rates(params: Floats, channels: Floats, chunk_bytes: Floats, kind: Ints) -> Floats:
    """R in bytes per second; `params` is (..., P), the others broadcast against its leading axes plus one."""
    link, saturate, half, sharp, power, penalty = (params[..., i, None] for i in (0, 1, 2, 4, 5, 7))
    if params.shape[-1] > NUM_SHARED:
        ratios = _ratios(params, kind)
        link, half = link + ratios[0], half + ratios[2]
        saturate = saturate + ratios[0] - ratios[1]
    per_chunk = np.exp(power) * np.log1p(np.exp(half - np.log(chunk_bytes)))
    fill = np.exp(sharp) * (np.log(channels) - saturate - per_chunk)
    exponent = link - np.logaddexp(0.0, -fill) / np.exp(sharp) - penalty * channels
    return np.asarray(np.exp(exponent))


def comm_times(params: Floats, wire_bytes: Floats, channels: Floats, chunk_bytes: Floats, kind: Ints) -> Floats:
    """The times x in seconds."""
    latency = params[..., 3, None]
    if params.shape[-1] > NUM_SHARED:
        latency = latency + _ratios(params, kind)[3]
    first = np.exp(params[..., 6, None]) * np.minimum(wire_bytes, channels * chunk_bytes)
    moved = (wire_bytes + first) / rates(params, channels, chunk_bytes, kind)
    return np.asarray(np.exp(latency) + moved)


def _ratios(params: Floats, kind: Ints) -> list[Floats]:
    """The four ratios of each place's implementation, zero for the first."""
    own = params[..., NUM_SHARED:].reshape(*params.shape[:-1], -1, NUM_OF_KIND)
    padded = np.concatenate([np.zeros((*own.shape[:-2], 1, NUM_OF_KIND)), own], axis=-2)
    return [padded[..., kind, i] for i in range(NUM_OF_KIND)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Beside:
    """The computations under constants `params` (..., P), with indices of SM counts `sms` (...)."""

    compute_model: ComputeModel
    sms: Ints
    params: Floats

    def kernel_times(self, channels: Floats, chunk_bytes: Floats, use: Floats, pace: Floats) -> Floats:
        """T during collectives that broadcast against (...); a kernel axis is added at the end."""
        scale, share, pressure, pollution, half, toll = (self.params[..., i] for i in range(NUM_PARAMS))
        index, flight = channels.astype(np.intp), channels * chunk_bytes
        polluted = np.exp(pollution) * flight / (flight + np.exp(half))
        pressed = (np.exp(pressure) * use / (2 - use))[..., None] * self.compute_model.intensity
        chunks = np.maximum(toll, 0.0) * pace
        return self._solo(scale, share, index) * (1 + pressed + (polluted + chunks)[..., None])

    def alone_times(self) -> Floats:
        """T alone, at (..., K)."""
        scale, share = self.params[..., 0], self.params[..., 1]
        return self._solo(scale, share, np.zeros(np.shape(scale), dtype=np.intp))

    def _solo(self, scale: Floats, share: Floats, channels: Ints) -> Floats:
        fluid, whole = self.compute_model.fluid[self.sms, channels], self.compute_model.whole[self.sms, channels]
        if self.compute_model.knows_grid:
            mix = np.clip(share, 0.0, 1.0)[..., None]
            waves = fluid * (1 - mix) + whole * mix
        else:
            waves = 1 + np.exp(share)[..., None] * fluid
        return np.asarray(np.exp(scale)[..., None] * waves)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pace:
    """The computations in solo time: shares of the work by kernel (K,), where each begins and ends."""

    alone: Floats
    work: Floats
    begins: Floats
    ends: Floats

    @classmethod
    def of(cls, alone: Floats) -> "Pace":
        """From solo times (..., K)."""
        work = alone / alone.sum(axis=-1, keepdims=True)
        ends = np.cumsum(work, axis=-1)
        return cls(alone=alone, work=work, begins=ends - work, ends=ends)

    def beside(self, done: Floats, under: Floats, comm_s: Floats) -> tuple[Floats, Floats]:
        """The share of the work done after a collective, and the time computed during it.

        Kernels take `under` (..., K) during the collective, which lasts `comm_s` (...), from a share `done` (...).
        """
        slope = under / self.work
        spent = (np.clip(done[..., None] - self.begins, 0.0, self.work) * slope).sum(axis=-1)
        upto = np.cumsum(under, axis=-1)
        left = np.maximum(upto[..., -1] - spent, 0.0)
        inside = comm_s < left
        took = np.where(inside, comm_s, left)
        gone = np.clip((spent + took)[..., None] - (upto - under), 0.0, under)
        return np.where(inside, (gone / slope).sum(axis=-1), 1.0), took

    def rest_s(self, done: Floats) -> Floats:
        """The time of the work that no collective overlaps."""
        left = np.clip(self.ends - np.maximum(self.begins, done[..., None]), 0.0, None)
        return np.asarray((left / self.work * self.alone).sum(axis=-1))


def finish_times(pace: Pace, under: Sequence[Floats], comm_s: Sequence[Floats]) -> Floats:
    """Y: kernels take `under[j]` (..., K) during collective j, which lasts `comm_s[j]` (...)."""
    done, finish = np.zeros(comm_s[0].shape), np.zeros(comm_s[0].shape)
    for each, times in zip(under, comm_s, strict=True):
        done, took = pace.beside(done, each, times)
        finish = finish + took
    return np.asarray(finish + pace.rest_s(done))


def fit(predict: Predict, observed: Floats, *, sd: Floats, prior: Prior, start: Floats, num_steps: int = 8) -> ModelFit:
    """The fits from starts (S, P) to D observed logarithms of standard deviations `sd`."""
    num_starts, num_params = start.shape
    params, damping = start.copy(), np.full(num_starts, 1e-3)
    shifts = np.concatenate([np.zeros((1, num_params)), STEP * np.eye(num_params)])
    values = predict(params[:, None, :] + shifts)
    cost = _cost(values[:, 0], params, observed, sd, prior)
    for _ in range(num_steps):
        jacobian = np.swapaxes((values[:, 1:] - values[:, :1]) / STEP, 1, 2) / sd[:, None]
        error = (values[:, 0] - observed) / sd
        normal = np.swapaxes(jacobian, 1, 2) @ jacobian + np.diag(prior.sd**-2)
        slope = np.einsum("sdp,sd->sp", jacobian, error) + (params - prior.mean) / prior.sd**2
        ridge = damping[:, None, None] * (np.eye(num_params) * np.einsum("spp->sp", normal)[:, None, :])
        step = np.linalg.solve(normal + ridge, -slope[..., None])[..., 0]
        tried = params + np.clip(step, -2 * prior.sd, 2 * prior.sd)
        tried_values = predict(tried[:, None, :] + shifts)
        tried_cost = _cost(tried_values[:, 0], tried, observed, sd, prior)
        better = tried_cost < cost
        gain = np.max((cost - tried_cost) / (cost + 1e-9), where=better, initial=0.0)
        params = np.where(better[:, None], tried, params)
        values = np.where(better[:, None, None], tried_values, values)
        cost = np.where(better, tried_cost, cost)
        damping = np.where(better, damping / 5, damping * 10)
        if better.all() and gain < 1e-3:
            break
    jacobian = np.swapaxes((values[:, 1:] - values[:, :1]) / STEP, 1, 2) / sd[:, None]
    normal = np.swapaxes(jacobian, 1, 2) @ jacobian + np.diag(prior.sd**-2)
    return ModelFit(params=params, covariance=np.asarray(np.linalg.inv(normal), dtype=np.float64), cost=cost)


def _cost(values: Floats, params: Floats, observed: Floats, sd: Floats, prior: Prior) -> Floats:
    error, away = (values - observed) / sd, (params - prior.mean) / prior.sd
    cost = 0.5 * (np.sum(error**2, axis=-1) + np.sum(away**2, axis=-1))
    return np.where(np.isfinite(cost), cost, 1e30)


def use_of(search_space: SearchSpace, wire: Floats) -> list[Floats]:
    """Per collective the share of the largest rate at every place."""
    return [rate / rate.max() for rate in _rates_of(search_space, wire)]


def pace_of(search_space: SearchSpace, wire: Floats) -> list[Floats]:
    """Per collective the chunks per second at every place, over the most."""
    paces = [
        rate / lattice.chunk_bytes
        for rate, lattice in zip(_rates_of(search_space, wire), search_space.lattices, strict=True)
    ]
    return [pace / pace.max() for pace in paces]


def _rates_of(search_space: SearchSpace, wire: Floats) -> list[Floats]:
    return [rates(wire, lattice.channels, lattice.chunk_bytes, lattice.kind) for lattice in search_space.lattices]


class Wires:
    """x_j at every place: the curve, the smooth rest of all, the collective's own factor, what one spot showed."""

    def __init__(self, search_space: SearchSpace, record: Record, wire: Floats, sigma: float, misfit: Misfit) -> None:
        self._search_space, self._record, self._curve_sd = search_space, record, misfit.curve_sd
        variance = sigma**2 / record.num + LEAST_VARIANCE
        curves = [
            np.log(comm_times(wire, wire_bytes, lattice.channels, lattice.chunk_bytes, lattice.kind))
            for lattice, wire_bytes in zip(search_space.lattices, search_space.wire_bytes, strict=True)
        ]
        rest = np.log(record.comm_s) - gather(curves, record.places)
        smooth = [np.zeros(len(lattice)) for lattice in search_space.lattices]
        for _ in range(2):
            left = rest - gather(smooth, record.places)
            factor = left.sum(axis=0) / (len(left) + (variance.mean() + SPOT_SD**2) / misfit.collective_sd**2)
            smooth = self._smoothed(rest - factor, variance)
        spot = self._spots(rest - factor - gather(smooth, record.places), variance)
        self.comm_s = [
            np.exp(parts) for parts in (c + s + f + o for c, s, f, o in zip(curves, smooth, factor, spot, strict=True))
        ]

    def _smoothed(self, rest: Floats, variance: Floats) -> list[Floats]:
        """The smooth rest on every lattice; collectives on one lattice share what they show."""
        result: dict[int, Floats] = {}
        for lattice, spread in zip(
            self._search_space.lattices, map(distances, self._search_space.lattices), strict=True
        ):
            if id(lattice) in result:
                continue
            mine = [j for j, other in enumerate(self._search_space.lattices) if other is lattice]
            weights = np.repeat(1 / (variance + SPOT_SD**2), len(mine))
            seen, index = np.unique(self._record.places[:, mine].ravel(), return_inverse=True)
            precision = np.bincount(index, weights)
            mean = np.bincount(index, weights * rest[:, mine].ravel()) / precision
            cover = self._curve_sd**2 * np.exp(-0.5 * spread[:, seen])
            result[id(lattice)] = cover @ np.linalg.solve(cover[seen] + np.diag(1 / precision), mean)
        return [result[id(lattice)] for lattice in self._search_space.lattices]

    def _spots(self, rest: Floats, variance: Floats) -> list[Floats]:
        spots = []
        for j, lattice in enumerate(self._search_space.lattices):
            places = self._record.places[:, j]
            precision = np.bincount(places, 1 / variance, minlength=len(lattice))
            spots.append(np.bincount(places, rest[:, j] / variance, minlength=len(lattice)) / (precision + SPOT_SD**-2))
        return spots


class Surrogate:
    """Surrogates of one group: its wire's constants (P,), its computations, and its measurements so far."""

    def __init__(
        self, search_space: SearchSpace, record: Record, sigma: float, *, wire: Floats, beside: Beside
    ) -> None:
        self._record, misfit = record, MISFITS[beside.compute_model.knowledge]
        self._lattices = search_space.lattices
        self.comm_s = Wires(search_space, record, wire, sigma, misfit).comm_s
        self._pace = Pace.of(beside.alone_times())
        self.under = [
            beside.kernel_times(lattice.channels, lattice.chunk_bytes, use, pace)
            for lattice, use, pace in zip(
                search_space.lattices, use_of(search_space, wire), pace_of(search_space, wire), strict=True
            )
        ]
        rest = np.log(record.comp_s) - np.log(self.uncorrected_s(record.places))
        self._shares = (record.comm_s / record.comm_s.sum(axis=1, keepdims=True)).mean(axis=0)
        self._common, self._own = misfit.body_sd**2, misfit.step_sd**2 / (self._shares**2).sum()
        cover = self._covariance(record.places) + np.diag(sigma**2 / record.num + LEAST_VARIANCE)
        self._weights = np.linalg.solve(cover, rest)

    def _covariance(self, places: Ints) -> Floats:
        """(A, D) between assignments and the record's."""
        cover = np.zeros((len(places), len(self._record.num)))
        for i, own in enumerate(self._lattices):
            for j, other in enumerate(self._lattices):
                at = places[:, i][:, None], self._record.places[:, j]
                if other is own:
                    alike = self._common * np.exp(-0.5 * distances(own)[at])
                    cover += self._shares[i] * self._shares[j] * alike
                if i == j:
                    cover += self._shares[i] ** 2 * self._own * step_likeness(own)[at]
        return cover

    def uncorrected_s(self, places: Ints) -> Floats:
        """Y without what the residuals say."""
        under = [table[places[:, j]] for j, table in enumerate(self.under)]
        return finish_times(self._pace, under, [table[places[:, j]] for j, table in enumerate(self.comm_s)])

    def times(self, places: Ints) -> tuple[Floats, Floats]:
        """X and Y of assignments (A, N)."""
        total = sum((table[places[:, j]] for j, table in enumerate(self.comm_s)), start=np.zeros(len(places)))
        return total, self.uncorrected_s(places) * np.exp(self._covariance(places) @ self._weights)

    def front(self, j: int) -> set[int]:
        """The places of collective j that no other beats in speed and in harmlessness, nearly."""
        harm = self.under[j].sum(axis=-1)
        order = np.lexsort((harm, self.comm_s[j]))
        before = np.concatenate([[np.inf], np.minimum.accumulate(harm[order])[:-1]])
        return set(order[harm[order] <= before * NEAR_FRONT].tolist())


def fit_wire(  # noqa: PLR0917
    search_space: SearchSpace, record: Record, sigma: float, prior: Prior, start: Floats, misfit: Misfit
) -> ModelFit:
    """The wire's constants."""
    lattices, num_comms = search_space.lattices, len(search_space.lattices)
    channels = gather([lattice.channels for lattice in lattices], record.places).ravel()
    chunks = gather([lattice.chunk_bytes for lattice in lattices], record.places).ravel()
    kind = gather([lattice.kind for lattice in lattices], record.places).ravel()
    wire_bytes = np.tile(search_space.wire_bytes, len(record.num))
    sd = np.sqrt(sigma**2 / np.repeat(record.num, num_comms) + misfit.curve_sd**2 / 2)

    def predict(params: Floats) -> Floats:
        return np.asarray(np.log(comm_times(params, wire_bytes, channels, chunks, kind)))

    return fit(predict, np.log(record.comm_s.ravel()), sd=sd, prior=prior, start=start[None], num_steps=40)


def fit_body(  # noqa: PLR0917
    search_space: SearchSpace,
    record: Record,
    sigma: float,
    compute_model: ComputeModel,
    sms: Ints,
    prior: Prior,
    start: Floats,
    wire: Floats,
) -> ModelFit:
    """The computations' constants for several SM counts, from starts (S, P)."""
    lattices = search_space.lattices
    channels = gather([lattice.channels for lattice in lattices], record.places)
    chunks = gather([lattice.chunk_bytes for lattice in lattices], record.places)
    use, pace = gather(use_of(search_space, wire), record.places), gather(pace_of(search_space, wire), record.places)
    misfit = MISFITS[compute_model.knowledge]
    comm_s = gather(Wires(search_space, record, wire, sigma, misfit).comm_s, record.places)

    def predict(params: Floats) -> Floats:
        beside = Beside(compute_model=compute_model, sms=sms[:, None, None], params=params[:, :, None, :])
        shape = (*params.shape[:2], len(record.num))
        columns = zip(channels.T, chunks.T, use.T, pace.T, strict=True)
        under = [beside.kernel_times(*column) for column in columns]
        times = [np.broadcast_to(column, shape) for column in comm_s.T]
        return np.asarray(np.log(finish_times(Pace.of(beside.alone_times()), under, times)))

    sd = np.sqrt(sigma**2 / record.num + misfit.body_sd**2)
    return fit(predict, np.log(record.comp_s), sd=sd, prior=prior, start=start, num_steps=40)
