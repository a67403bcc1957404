"""What a group believes of its wire and its computations: priors, fits to the measurements, and how sure they are."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from lagom_overlap.backends.base import GroupProblem, Measurement
from lagom_overlap.tune.just_enough.forecast import Forecast
from lagom_overlap.tune.just_enough.lattice import Floats, Ints, is_made_by_host
from lagom_overlap.tune.just_enough.model import Evidence, Fit, GroupModel, Wires
from lagom_overlap.tune.just_enough.pool import Lesson, Pool
from lagom_overlap.tune.just_enough.sight import LEAST_S, Record, Sight
from lagom_overlap.tune.just_enough.victim import Victim, victim_of
from lagom_overlap.tune.just_enough.wire import Prior, wire_prior

MAX_SM_COUNTS: Final = 4
"""SM counts that stay in question once there are a few measurements."""
FEW: Final = 3
UNCONTRADICTED: Final = -0.5
"""Log odds of what a group's own measurements have nothing to say against."""


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
        self.is_warm = False
        """The last fits believe what other runs say of wire and computations."""

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
        prior = self._wire_prior
        wire = evidence.fit_wire(prior, prior.mean if self._last is None else self._last.wire.params[0])
        pool.learn(self._wire_key, name, Lesson.of(wire, 0, prior))
        is_warm, warm = False, None if pool.earlier is None else pool.earlier.prior(self._wire_key, name, prior)
        if pool.earlier is not None and warm is not None:
            warmed = evidence.fit_wire(warm, wire.params[0])
            is_warm = warmed.log_evidence(warm) > wire.log_evidence(prior) + pool.earlier.least_evidence
            if is_warm:
                prior, wire = warm, warmed
        taught = pool.prior(self._wire_key, name, prior)
        if taught is not None:
            wire = evidence.fit_wire(taught, wire.params[0])
        wires = Wires(evidence, wire.params[0])
        body, is_warm_too = self._fit_body(evidence, wires, pool, name, same_wire=is_warm)
        self.is_warm = is_warm and is_warm_too
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

    def _fit_body(
        self, evidence: Evidence, wires: Wires, pool: Pool, name: str, *, same_wire: bool
    ) -> tuple[Fit, bool]:
        """The fit, and whether it believes other runs."""
        victim, prior = self._model.victim, self._model.victim.prior
        key = "body", victim.knowledge
        start = np.tile(prior.mean, (len(self._sms), 1)) if self._last is None else self._last.body.params
        found = evidence.fit_body(wires, self._sms, prior, start)
        pool.learn(key, name, Lesson.of(found, int(np.argmin(found.cost)), prior))
        counts = [victim.sm_counts[index] for index in self._sms]
        if victim.knows_grid:
            pool.learn_sm_counts(name, dict(zip(counts, found.cost.tolist(), strict=True)))
        against = pool.against_sm_counts(name, counts)
        is_warm, warm = False, None if pool.earlier is None else _own_scale(pool.earlier.prior(key, name, prior), prior)
        if pool.earlier is not None and warm is not None:
            warmed = evidence.fit_body(wires, self._sms, warm, found.params)
            # Where the wire is that of the other run, so is the machine: enough if nothing speaks against it.
            least = UNCONTRADICTED if same_wire else pool.earlier.least_evidence
            is_warm = warmed.log_evidence(warm) > found.log_evidence(prior) + least
            if is_warm:
                prior, found = warm, warmed
                against = against + pool.earlier.against_sm_counts(name, counts)
        taught = _own_scale(pool.prior(key, name, prior), prior)
        if taught is not None:
            found = evidence.fit_body(wires, self._sms, taught, found.params)
        found = replace(found, cost=found.cost + against)
        if len(evidence.record.num) >= FEW and len(self._sms) > MAX_SM_COUNTS:
            kept = np.argsort(found.cost, kind="stable")[:MAX_SM_COUNTS]
            self._sms = self._sms[kept]
            found = Fit(params=found.params[kept], covariance=found.covariance[kept], cost=found.cost[kept])
        return found, is_warm


def _own_scale(taught: Prior | None, own: Prior) -> Prior | None:
    """A prior of the computations that others taught: the scale stays a group's own."""
    if taught is not None:
        taught.mean[0], taught.sd[0] = own.mean[0], own.sd[0]
    return taught


def first_belief(problem: GroupProblem, sight: Sight, first: Measurement) -> Belief:
    """What is believed of a group before any fit, from its first measurement."""
    group, lattices = problem.group, sight.lattices
    most_channels = max(int(lattice.channels.max()) for lattice in lattices)
    victim = victim_of(group, most_channels, max(first.comp_s, LEAST_S), by_host=is_made_by_host(lattices[0]))
    comm_s = np.maximum(np.array(first.comm_s), LEAST_S)
    return Belief(
        GroupModel(sight, victim),
        wire_prior=wire_prior(lattices[0], sight.wire_bytes, comm_s),
        wire_key=wire_key(problem, sight),
    )


def wire_key(problem: GroupProblem, sight: Sight) -> Hashable:
    """What groups must have in common to share the constants of a wire."""
    return "wire", sight.lattices[0].kinds, frozenset(comm.communicator for comm in problem.group.comms)
