"""The model of the machine fitted to one group: priors for wire and computations, fits, and their uncertainty.

Groups learn from each other, because they share links and GPUs: one group's constants become another's prior. Each
group is first fitted alone. What its measurements say about a constant beyond its prior (precision and mean) is offered
to the others, widened by how far groups may differ. Only groups with the same communicators and implementations share;
SM counts are shared by all groups whose grids are known. Lessons are kept as sums, so a group's prior costs the same
among two groups as among a hundred.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.machine.group_model import (
    ComputeModel,
    Evidence,
    GroupModel,
    ModelFit,
    Prior,
    Wires,
    compute_model_of,
    wire_prior,
)
from lagom_overlap.tuners.machine.search_space import (
    LEAST_S,
    Floats,
    Ints,
    Record,
    SearchSpace,
    Surfaces,
    is_made_by_host,
    record_of,
    search_space_of,
)
from lagom_overlap.tuners.machine.surrogate import Allocation, Surrogate
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.tuners.waiting import SM_COUNTS
from lagom_overlap.tuners.warm_start import WarmStart

BETWEEN_GROUPS: Final = 0.25
"""Spread of a constant between groups, over its prior's standard deviation. Chosen, not fitted."""
MOST_EVIDENCE: Final = 8.0
"""The most log odds against an SM count from other groups, so that a group's own measurements can overrule them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """What one group's own measurements say: precision beyond its prior, and the mean, per constant."""

    precision: Floats
    mean: Floats
    prior_sd: Floats

    @classmethod
    def of(cls, fit: ModelFit, best: int, prior: Prior) -> "Lesson":
        """From a group's own fit under its own prior."""
        before = prior.sd**-2
        after = 1 / np.diagonal(fit.covariance[best])
        precision = np.maximum(after - before, 1e-9)
        mean = (after * fit.params[best] - before * prior.mean) / precision
        return cls(precision=precision, mean=mean, prior_sd=prior.sd)

    def weighed(self) -> Floats:
        """(2, P): the weight of each constant for another group, and weight times mean."""
        weighed = np.empty((2, len(self.mean)))
        weighed[0] = 1 / (1 / self.precision + (BETWEEN_GROUPS * self.prior_sd) ** 2)
        weighed[1] = weighed[0] * self.mean
        return weighed


@dataclass(slots=True)
class _Class:
    """The lessons of those who share, as weights, and their sum."""

    lessons: dict[str, Floats] = field(default_factory=dict)
    total: Floats = field(default_factory=lambda: np.zeros(1))


class Pool:
    """The latest lessons of every group, by the kind of constants and what must be equal to share them.

    `earlier` holds those of a warm start. A group takes them if its own measurements give them log odds of at least
    `RUN_EVIDENCE` over what it believes without them.
    """

    def __init__(self, earlier: "Pool | None" = None) -> None:
        self.earlier = earlier
        self._classes: dict[Hashable, _Class] = {}
        self._odds: Floats = np.zeros(len(SM_COUNTS))
        self._own_odds: dict[str, Floats] = {}

    def learn(self, key: Hashable, name: str, lesson: Lesson) -> None:
        """Keeps a group's lesson in place of its last one."""
        shared = self._classes.setdefault(key, _Class())
        weighed = lesson.weighed()
        shared.total = shared.total + weighed - shared.lessons.get(name, 0.0)
        shared.lessons[name] = weighed

    def learn_sm_counts(self, name: str, costs: Mapping[int, float]) -> None:
        """Keeps a group's costs (minus log likelihoods) by SM count, over its least; the worst where it has none."""
        least, worst = min(costs.values()), max(costs.values())
        self._odds = self._odds - self._own_odds.get(name, 0.0)
        self._own_odds[name] = np.array([costs.get(count, worst) - least for count in SM_COUNTS])
        self._odds = self._odds + self._own_odds[name]

    def prior(self, key: Hashable, name: str, own: Prior) -> Prior | None:
        """A group's prior with what the others know; None where nobody else shares."""
        shared = self._classes.get(key)
        if shared is None or len(shared.lessons) == (name in shared.lessons):
            return None
        weight, weighted = shared.total - shared.lessons.get(name, 0.0)
        precision = own.sd**-2 + np.maximum(weight, 0.0)
        mean = (own.mean * own.sd**-2 + weighted) / precision
        between = (BETWEEN_GROUPS * own.sd) ** 2
        return Prior(mean, np.minimum(np.sqrt(1 / precision + between), own.sd))

    def against_sm_counts(self, name: str, counts: Sequence[int]) -> Floats:
        """What the other groups hold against each SM count, as costs."""
        others = dict(zip(SM_COUNTS, (self._odds - self._own_odds.get(name, 0.0)).tolist(), strict=True))
        return np.array([min(max(others.get(count, 0.0), 0.0), MOST_EVIDENCE) for count in counts])


MAX_SM_COUNTS: Final = 4
"""SM counts that are kept after `FEW` measurements. Bounds the computation."""
FEW: Final = 3
"""Measurements after which the least likely SM counts are dropped."""
UNCONTRADICTED: Final = -0.5
"""Log odds down to which a group's own measurements do not contradict a prior. Chosen, not measured."""
RUN_EVIDENCE: Final = 1.0
"""Log odds that a group's own measurements must give another run: it may be of another machine."""
EARLIER_SIGMA: Final = 0.02
"""Noise of one measurement of another run, as a share. Chosen, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Posteriors:
    """The last fits, on what they rest, and the wires that follow from the best."""

    evidence: Evidence
    wires: Wires
    wire: ModelFit
    body: ModelFit
    roots: dict[int, Floats] = field(default_factory=dict)

    def root(self, number: int, covariance: Floats) -> Floats:
        """The Cholesky factor of a covariance, computed once: -1 is the wire's, others by SM count."""
        if number not in self.roots:
            self.roots[number] = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        return self.roots[number]


class Posterior:
    """The priors and the last fits, from which the next ones start; `sms` are the SM counts still in question."""

    def __init__(self, model: GroupModel, wire_prior: Prior, wire_key: Hashable) -> None:
        self._model, self._wire_prior, self._wire_key = model, wire_prior, wire_key
        self._sms: Ints = np.arange(len(model.compute_model.sm_counts))
        self._last: _Posteriors | None = None

    @property
    def compute_model(self) -> ComputeModel:
        """The computations."""
        return self._model.compute_model

    @property
    def record(self) -> Record:
        """What the last fits rest on."""
        assert self._last is not None, "no fit yet"
        return self._last.evidence.record

    def update(self, record: Record, sigma: float, pool: Pool, name: str) -> None:
        """Fits the wire, then the concurrent computations: by itself for the others, then with what they know."""
        evidence = Evidence(self._model, record, sigma)
        prior = self._wire_prior
        wire = evidence.fit_wire(prior, prior.mean if self._last is None else self._last.wire.params[0])
        pool.learn(self._wire_key, name, Lesson.of(wire, 0, prior))
        is_warm, warm = False, None if pool.earlier is None else pool.earlier.prior(self._wire_key, name, prior)
        if pool.earlier is not None and warm is not None:
            warmed = evidence.fit_wire(warm, wire.params[0])
            is_warm = warmed.log_evidence(warm) > wire.log_evidence(prior) + RUN_EVIDENCE
            if is_warm:
                prior, wire = warm, warmed
        taught = pool.prior(self._wire_key, name, prior)
        if taught is not None:
            wire = evidence.fit_wire(taught, wire.params[0])
        wires = Wires(evidence, wire.params[0])
        body = self._fit_body(evidence, wires, pool, name, same_wire=is_warm)
        self._last = _Posteriors(evidence=evidence, wires=wires, wire=wire, body=body)

    def surrogate(self) -> Surrogate:
        """The surrogate of the best fits."""
        assert self._last is not None, "no fit yet"
        best = int(np.argmin(self._last.body.cost))
        return Surrogate(self._last.evidence, self._last.wires, int(self._sms[best]), self._last.body.params[best])

    def drawn(self, rng: np.random.Generator) -> Surrogate:
        """A surrogate drawn from the posterior."""
        assert self._last is not None, "no fit yet"
        wire, body = self._last.wire, self._last.body
        weights = np.exp(body.cost.min() - body.cost)
        index = int(rng.choice(len(weights), p=weights / weights.sum()))
        roots = self._last.root(-1, wire.covariance[0]), self._last.root(index, body.covariance[index])
        wire_drawn = wire.params[0] + roots[0] @ rng.standard_normal(len(roots[0]))
        body_drawn = body.params[index] + roots[1] @ rng.standard_normal(len(roots[1]))
        wires = Wires(self._last.evidence, wire_drawn)
        return Surrogate(self._last.evidence, wires, int(self._sms[index]), body_drawn)

    def _fit_body(self, evidence: Evidence, wires: Wires, pool: Pool, name: str, *, same_wire: bool) -> ModelFit:
        """The fit of the computations."""
        compute_model, prior = self._model.compute_model, self._model.compute_model.prior
        key = "body", compute_model.knowledge
        start = np.tile(prior.mean, (len(self._sms), 1)) if self._last is None else self._last.body.params
        fit = evidence.fit_body(wires, self._sms, prior, start)
        pool.learn(key, name, Lesson.of(fit, int(np.argmin(fit.cost)), prior))
        counts = [compute_model.sm_counts[index] for index in self._sms]
        if compute_model.knows_grid:
            pool.learn_sm_counts(name, dict(zip(counts, fit.cost.tolist(), strict=True)))
        against = pool.against_sm_counts(name, counts)
        warm = None if pool.earlier is None else _own_scale(pool.earlier.prior(key, name, prior), prior)
        if pool.earlier is not None and warm is not None:
            warmed = evidence.fit_body(wires, self._sms, warm, fit.params)
            # Where the wire is that of the other run, so is the machine: enough if nothing speaks against it.
            least = UNCONTRADICTED if same_wire else RUN_EVIDENCE
            if warmed.log_evidence(warm) > fit.log_evidence(prior) + least:
                prior, fit = warm, warmed
                against = against + pool.earlier.against_sm_counts(name, counts)
        taught = _own_scale(pool.prior(key, name, prior), prior)
        if taught is not None:
            fit = evidence.fit_body(wires, self._sms, taught, fit.params)
        fit = replace(fit, cost=fit.cost + against)
        if len(evidence.record.num) >= FEW and len(self._sms) > MAX_SM_COUNTS:
            kept = np.argsort(fit.cost, kind="stable")[:MAX_SM_COUNTS]
            self._sms = self._sms[kept]
            fit = ModelFit(params=fit.params[kept], covariance=fit.covariance[kept], cost=fit.cost[kept])
        return fit


def _own_scale(taught: Prior | None, own: Prior) -> Prior | None:
    """A prior of the computations that others taught: the scale stays a group's own."""
    if taught is not None:
        taught.mean[0], taught.sd[0] = own.mean[0], own.sd[0]
    return taught


def first_posterior(problem: GroupProblem, search_space: SearchSpace, first: Measurement) -> Posterior:
    """What is believed of a group before any fit, from its first measurement."""
    group, lattices = problem.group, search_space.lattices
    most_channels = max(int(lattice.channels.max()) for lattice in lattices)
    compute_model = compute_model_of(
        group, most_channels, max(first.comp_s, LEAST_S), by_host=is_made_by_host(lattices[0])
    )
    comm_s = np.maximum(np.array(first.comm_s), LEAST_S)
    return Posterior(
        GroupModel(search_space, compute_model),
        wire_prior=wire_prior(lattices[0], search_space.wire_bytes, comm_s),
        wire_key=wire_key(problem, search_space),
    )


def wire_key(problem: GroupProblem, search_space: SearchSpace) -> Hashable:
    """What groups must have in common to share the constants of a wire."""
    return "wire", search_space.lattices[0].kinds, frozenset(comm.communicator for comm in problem.group.comms)


NUM_DRAWN: Final = 11
"""Surrogates drawn from the posterior. Bounds the computation; chosen, not measured."""
NUM_ALLOCATED: Final = 4
"""Surrogates, the expected one and draws, on which the best assignment is looked for. Bounds the computation."""
DOUBT: Final = 0.03
"""Uncertainty of a surrogate's X or Y, as a share: an assignment that balances them is worth less than it seems."""


class Machine:
    """The model of the machine for one group; groups that share a `pool` learn from each other."""

    def __init__(self, problem: GroupProblem, *, seed: int, pool: Pool, surfaces: Surfaces) -> None:
        self._problem, self._seed, self._pool = problem, seed, pool
        self._search_space = search_space_of(problem, surfaces)
        self._posterior: Posterior | None = None
        self._surrogates: list[Surrogate] = []
        self._gap_s = 0.0

    @property
    def is_fitted(self) -> bool:
        """Whether anything that the model has a place for was measured."""
        return bool(self._surrogates)

    def fit(self, runs: Mapping[Assignment, Sequence[Measurement]], sigma: float) -> None:
        """Fits the model to all measurements so far; `sigma` is the noise of one, as a share."""
        placed = {places: list(done) for arm, done in runs.items() if (places := self._search_space.places_of(arm))}
        if not placed:
            return
        every = [run for done in placed.values() for run in done]
        if self._posterior is None:
            self._posterior = first_posterior(self._problem, self._search_space, every[0])
        self._posterior.update(record_of(placed), sigma, self._pool, self._problem.group.name)
        self._gap_s = max(0.0, float(np.mean([run.makespan_s - max(run.total_comm_s, run.comp_s) for run in every])))
        rng = np.random.default_rng([self._seed, len(every)])
        self._surrogates = [self._posterior.surrogate(), *(self._posterior.drawn(rng) for _ in range(NUM_DRAWN))]

    def draws(self, configs: Sequence[CommConfig], assignments: Ints) -> Floats:
        """Makespans in seconds (assignments, draws), the expected one first; NaN where the model has no place.

        `assignments` are (assignments, collectives) into `configs`.
        """
        result = np.full((len(assignments), 1 + NUM_DRAWN), np.nan)
        lattices = self._search_space.lattices
        tables = {  # mostly one, which all collectives share
            number: np.array([lattice.place.get(config, -1) for config in configs], dtype=np.intp)
            for number, lattice in {id(lattice): lattice for lattice in lattices}.items()
        }
        placed = np.stack([tables[id(each)][assignments[:, j]] for j, each in enumerate(lattices)], axis=1)
        is_placed = (placed >= 0).all(axis=1)
        if is_placed.any():
            at = np.ascontiguousarray(placed[is_placed])
            result[is_placed] = np.stack([each.makespans(at) + self._gap_s for each in self._surrogates], axis=1)
        return result

    def favourites(
        self, start: Assignment, excluded: Sequence[set[CommConfig]], most_channels: Sequence[float]
    ) -> list[Assignment]:
        """The best assignments on the expected surrogate and on some draws, searched from `start`.

        A collective has none of the configurations in its set of `excluded`, and no more than its `most_channels`.
        """
        at, space = self._search_space.places_of(start), self._search_space
        closed = [
            {lattice.place[config] for config in bar if config in lattice.place}
            | set(np.flatnonzero(lattice.channels > most).tolist())
            for lattice, bar, most in zip(space.lattices, excluded, most_channels, strict=True)
        ]
        allocated = (
            Allocation(each, closed, DOUBT).best([] if at is None else [at])
            for each in self._surrogates[:NUM_ALLOCATED]
        )
        return list(dict.fromkeys(space.assignment_at(each.tolist()) for each in allocated if each is not None))


def earlier_pool(warm: WarmStart, surfaces: Surfaces) -> Pool:
    """The lessons of a warm start: its groups are fitted as if they were groups of this run.

    A group asks that pool for a prior, fits with it and without it, and keeps the one under which its own measurements
    are more probable (evidence by Laplace's approximation): a wrong prior explains them worse, and is dropped as soon
    as they show it.
    """
    pool = Pool()
    for number, earlier in enumerate(warm.earlier):
        space = search_space_of(earlier.problem, surfaces)
        runs = {places: done for arm, done in earlier.runs.items() if (places := space.places_of(arm)) is not None}
        if runs:
            posterior = first_posterior(earlier.problem, space, next(iter(runs.values()))[0])
            posterior.update(record_of(runs), EARLIER_SIGMA, pool, f"earlier {number}")
    return pool
