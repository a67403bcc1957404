"""What a group believes of its wire and its computations: priors, fits to the measurements, and how sure they are."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from lagom_overlap.tune.just_enough.fit import Fit, fit
from lagom_overlap.tune.just_enough.forecast import CURVE_SD, Forecast, Wires, body_sd, use_of
from lagom_overlap.tune.just_enough.lattice import Floats, Ints, gather
from lagom_overlap.tune.just_enough.pool import Lesson, Pool
from lagom_overlap.tune.just_enough.sight import Record, Sight
from lagom_overlap.tune.just_enough.victim import Beside, Pace, Victim, finish_times
from lagom_overlap.tune.just_enough.wire import Prior, comm_times

MAX_SM_COUNTS: Final = 4
"""SM counts that stay in question once there are a few measurements."""
FEW: Final = 3


@dataclass(slots=True, kw_only=True, eq=False)
class Belief:
    """The priors and the last fits, from which the next ones start; `sms` are the SM counts still in question."""

    sight: Sight
    victim: Victim
    wire_prior: Prior
    wire_key: Hashable
    sms: Ints
    wire: Fit | None = None
    body: Fit | None = None

    def update(self, record: Record, sigma: float, pool: Pool, name: str) -> None:
        """Fits the wire, then the computations beside it: by itself for the others, then with what they know."""
        wire = self._fit_wire(record, sigma, self.wire_prior)
        pool.learn(self.wire_key, name, Lesson.of(wire, 0, self.wire_prior))
        taught = pool.prior(self.wire_key, name, self.wire_prior)
        self.wire = wire if taught is None else self._fit_wire(record, sigma, taught)
        self._fit_body(record, sigma, self.wire.params[0], pool, name)

    def forecast(self, record: Record, sigma: float) -> Forecast:
        """The forecast of the best fits."""
        assert self.wire is not None, "no fit yet"
        assert self.body is not None, "no fit yet"
        best = int(np.argmin(self.body.cost))
        wire, body = self.wire.params[0], self.body.params[best]
        return self._forecast(record, sigma, wire, best, body)

    def drawn(self, record: Record, sigma: float, rng: np.random.Generator) -> Forecast:
        """A forecast that could as well be true: fits drawn from how sure they are."""
        assert self.wire is not None, "no fit yet"
        assert self.body is not None, "no fit yet"
        weights = np.exp(self.body.cost.min() - self.body.cost)
        index = int(rng.choice(len(weights), p=weights / weights.sum()))
        wire = rng.multivariate_normal(self.wire.params[0], self.wire.covariance[0], method="cholesky")
        body = rng.multivariate_normal(self.body.params[index], self.body.covariance[index], method="cholesky")
        return self._forecast(record, sigma, wire, index, body)

    def _forecast(self, record: Record, sigma: float, wire: Floats, index: int, body: Floats) -> Forecast:
        beside = Beside(victim=self.victim, sms=np.array(self.sms[index]), params=body)
        return Forecast(self.sight, record, sigma, wire=wire, beside=beside)

    def _fit_wire(self, record: Record, sigma: float, prior: Prior) -> Fit:
        lattices, num_comms = self.sight.lattices, len(self.sight.lattices)
        channels = gather([lattice.channels for lattice in lattices], record.places).ravel()
        chunks = gather([lattice.chunk_bytes for lattice in lattices], record.places).ravel()
        kind = gather([lattice.kind for lattice in lattices], record.places).ravel()
        wire_bytes = np.tile(self.sight.wire_bytes, len(record.num))
        sd = np.sqrt(sigma**2 / np.repeat(record.num, num_comms) + CURVE_SD**2 / 2)

        def predict(params: Floats) -> Floats:
            return np.asarray(np.log(comm_times(params, wire_bytes, channels, chunks, kind)))

        start = prior.mean[None] if self.wire is None else self.wire.params
        return fit(predict, np.log(record.comm_s.ravel()), sd=sd, prior=prior, start=start)

    def _fit_body(self, record: Record, sigma: float, wire: Floats, pool: Pool, name: str) -> None:
        victim, prior = self.victim, self.victim.prior
        key = "body", victim.knows_grid
        found = self._fitted_body(record, sigma, wire, prior)
        pool.learn(key, name, Lesson.of(found, int(np.argmin(found.cost)), prior))
        counts = [victim.sm_counts[index] for index in self.sms]
        if victim.knows_grid:
            pool.learn_sm_counts(name, dict(zip(counts, found.cost.tolist(), strict=True)))
        taught = pool.prior(key, name, prior)
        if taught is not None:
            # The scale is a group's own.
            mean, sd = np.r_[prior.mean[:1], taught.mean[1:]], np.r_[prior.sd[:1], taught.sd[1:]]
            found = self._fitted_body(record, sigma, wire, Prior(mean, sd))
        against = np.array([pool.against_sm_count(name, count) for count in counts])
        found = replace(found, cost=found.cost + against)
        if len(record.num) >= FEW:
            kept = np.argsort(found.cost, kind="stable")[:MAX_SM_COUNTS]
            self.sms = self.sms[kept]
            found = Fit(params=found.params[kept], covariance=found.covariance[kept], cost=found.cost[kept])
        self.body = found

    def _fitted_body(self, record: Record, sigma: float, wire: Floats, prior: Prior) -> Fit:
        lattices, victim = self.sight.lattices, self.victim
        channels = gather([lattice.channels for lattice in lattices], record.places)
        chunks = gather([lattice.chunk_bytes for lattice in lattices], record.places)
        use = gather(use_of(self.sight, wire), record.places)
        comm_s = gather(Wires(self.sight, record, wire, sigma).comm_s, record.places)

        def predict(params: Floats) -> Floats:
            beside = Beside(victim=victim, sms=self.sms[:, None, None], params=params[:, :, None, :])
            shape = (*params.shape[:2], len(record.num))
            under = [beside.kernel_times(channels[:, j], chunks[:, j], use[:, j]) for j in range(len(lattices))]
            times = [np.broadcast_to(column, shape) for column in comm_s.T]
            return np.asarray(np.log(finish_times(Pace.of(beside.alone_times()), under, times)))

        sd = np.sqrt(sigma**2 / record.num + body_sd(victim) ** 2)
        start = np.tile(prior.mean, (len(self.sms), 1)) if self.body is None else self.body.params
        return fit(predict, np.log(record.comp_s), sd=sd, prior=prior, start=start)
