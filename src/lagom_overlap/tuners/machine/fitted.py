"""The model of the machine fitted to one group: what it expects of whole assignments, and which it favours."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from lagom_overlap.collective import CommConfig
from lagom_overlap.tuners.machine.posterior import Pool, Posterior, first_posterior
from lagom_overlap.tuners.machine.search_space import Floats, Ints, Surfaces, record_of, search_space_of
from lagom_overlap.tuners.machine.surrogate import Allocation, Surrogate
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement

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
