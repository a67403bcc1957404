"""What a group believes of its wire and its computations: priors, fits to the measurements, and how sure they are."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from lagom_overlap.tune.just_enough.forecast import Forecast
from lagom_overlap.tune.just_enough.lattice import Floats, Ints
from lagom_overlap.tune.just_enough.model import Evidence, Fit, GroupModel, Wires
from lagom_overlap.tune.just_enough.pool import Lesson, Pool
from lagom_overlap.tune.just_enough.sight import Record
from lagom_overlap.tune.just_enough.victim import Victim
from lagom_overlap.tune.just_enough.wire import Prior

MAX_SM_COUNTS: Final = 4
"""SM counts that stay in question once there are a few measurements."""
FEW: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Beliefs:
    """The last fits, on what they rest, and the wires that follow from the best."""

    evidence: Evidence
    wires: Wires
    wire: Fit
    body: Fit
    roots: dict[int, Floats] = field(default_factory=dict)

    def root(self, number: int, covariance: Floats) -> Floats:
        """The Cholesky factor of a covariance, computed once: -1 is the wire's, others by SM count."""
        if number not in self.roots:
            self.roots[number] = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        return self.roots[number]


class Belief:
    """The priors and the last fits, from which the next ones start; `sms` are the SM counts still in question."""

    def __init__(self, model: GroupModel, wire_prior: Prior, wire_key: Hashable) -> None:
        self._model, self._wire_prior, self._wire_key = model, wire_prior, wire_key
        self._sms: Ints = np.arange(len(model.victim.sm_counts))
        self._last: _Beliefs | None = None

    @property
    def victim(self) -> Victim:
        """The computations."""
        return self._model.victim

    @property
    def record(self) -> Record:
        """What the last fits rest on."""
        assert self._last is not None, "no fit yet"
        return self._last.evidence.record

    @property
    def work(self) -> int:
        """Evaluations so far."""
        return self._model.work

    def update(self, record: Record, sigma: float, pool: Pool, name: str) -> None:
        """Fits the wire, then the computations beside it: by itself for the others, then with what they know."""
        evidence = Evidence(self._model, record, sigma)
        wire = evidence.fit_wire(
            self._wire_prior, self._wire_prior.mean if self._last is None else self._last.wire.params[0]
        )
        pool.learn(self._wire_key, name, Lesson.of(wire, 0, self._wire_prior))
        taught = pool.prior(self._wire_key, name, self._wire_prior)
        if taught is not None:
            wire = evidence.fit_wire(taught, wire.params[0])
        wires = Wires(evidence, wire.params[0])
        body = self._fit_body(evidence, wires, pool, name)
        self._last = _Beliefs(evidence=evidence, wires=wires, wire=wire, body=body)

    def forecast(self) -> Forecast:
        """The forecast of the best fits."""
        assert self._last is not None, "no fit yet"
        best = int(np.argmin(self._last.body.cost))
        return Forecast(self._last.evidence, self._last.wires, int(self._sms[best]), self._last.body.params[best])

    def drawn(self, rng: np.random.Generator) -> Forecast:
        """A forecast that could as well be true: fits drawn from how sure they are."""
        assert self._last is not None, "no fit yet"
        wire, body = self._last.wire, self._last.body
        weights = np.exp(body.cost.min() - body.cost)
        index = int(rng.choice(len(weights), p=weights / weights.sum()))
        roots = self._last.root(-1, wire.covariance[0]), self._last.root(index, body.covariance[index])
        wire_drawn = wire.params[0] + roots[0] @ rng.standard_normal(len(roots[0]))
        body_drawn = body.params[index] + roots[1] @ rng.standard_normal(len(roots[1]))
        wires = Wires(self._last.evidence, wire_drawn)
        return Forecast(self._last.evidence, wires, int(self._sms[index]), body_drawn)

    def _fit_body(self, evidence: Evidence, wires: Wires, pool: Pool, name: str) -> Fit:
        victim, prior = self._model.victim, self._model.victim.prior
        key = "body", victim.knows_grid
        start = np.tile(prior.mean, (len(self._sms), 1)) if self._last is None else self._last.body.params
        found = evidence.fit_body(wires, self._sms, prior, start)
        pool.learn(key, name, Lesson.of(found, int(np.argmin(found.cost)), prior))
        counts = [victim.sm_counts[index] for index in self._sms]
        if victim.knows_grid:
            pool.learn_sm_counts(name, dict(zip(counts, found.cost.tolist(), strict=True)))
        taught = pool.prior(key, name, prior)
        if taught is not None:
            # The scale is a group's own.
            taught.mean[0], taught.sd[0] = prior.mean[0], prior.sd[0]
            found = evidence.fit_body(wires, self._sms, taught, found.params)
        found = replace(found, cost=found.cost + pool.against_sm_counts(name, counts))
        if len(evidence.record.num) >= FEW and len(self._sms) > MAX_SM_COUNTS:
            kept = np.argsort(found.cost, kind="stable")[:MAX_SM_COUNTS]
            self._sms = self._sms[kept]
            found = Fit(params=found.params[kept], covariance=found.covariance[kept], cost=found.cost[kept])
        return found
