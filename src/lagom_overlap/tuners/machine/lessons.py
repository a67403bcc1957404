"""Warm starts: what other runs say of the wire and the computations, as priors that the group's own data may refuse.

The groups of an earlier run are fitted as if they were groups of this one; what they learn goes to a `Pool` of its
own. A group asks that pool for a prior, fits with it and without it, and keeps the one under which its own
measurements are more probable (evidence by Laplace's approximation): a wrong prior explains them worse, and is dropped
as soon as they show it. NCCL's cost table, or another one, says how implementations compare: a lesson too.

The earlier best is measured once, after the default; like everything else it is adopted only on evidence.
"""

from collections.abc import Sequence
from math import log
from typing import Final

import numpy as np

from lagom_overlap.tuners.machine.model import KIND_SD, NUM_OF_KIND, NUM_SHARED
from lagom_overlap.tuners.machine.posterior import UNCONTRADICTED, Lesson, Pool, first_posterior, wire_key
from lagom_overlap.tuners.machine.search_space import Surfaces, record_of, search_space_of
from lagom_overlap.tuners.problem import Assignment, GroupProblem
from lagom_overlap.tuners.warm_start import Earlier, WarmStart, Ways, nearest_allowed

WAY_SD: Final = {"link": 0.1, "latency": 0.3}
"""How far a table's ratios between implementations may be off, as shares. Chosen, not measured."""
RUN_EVIDENCE: Final = 1.0
"""Log odds that a group's own measurements must give another run: it may be of another machine. A table speaks of what
was not measured yet: it holds until it is contradicted."""
EARLIER_SIGMA: Final = 0.02
"""Noise of one measurement of another run, as a share. Chosen, not measured."""
NOTHING: Final = 1e-9
"""The precision of a constant about which a lesson says nothing."""


def earlier_pool(warm: WarmStart, problems: Sequence[GroupProblem], surfaces: Surfaces) -> Pool:
    """The lessons of a warm start."""
    pool = Pool(least_evidence=RUN_EVIDENCE if warm.earlier else UNCONTRADICTED)
    for number, earlier in enumerate(warm.earlier):
        _teach_group(pool, f"earlier {number}", earlier, surfaces)
    for problem in problems:
        ways = warm.ways.get(problem.group.name)
        if ways is not None:
            _teach_ways(pool, problem, ways, surfaces)
    return pool


def first_probe(warm: WarmStart, problem: GroupProblem) -> Assignment | None:
    """What an earlier run ended with, as far as it is allowed here; None if that is the default or not known."""
    earlier_best = warm.first(problem)
    allowed = None if earlier_best is None else nearest_allowed(problem, earlier_best)
    return None if allowed == problem.default else allowed


def _teach_group(pool: Pool, name: str, earlier: Earlier, surfaces: Surfaces) -> None:
    search_space = search_space_of(earlier.problem, surfaces)
    runs = {
        places: repeats for arm, repeats in earlier.runs.items() if (places := search_space.places_of(arm)) is not None
    }
    if runs:
        posterior = first_posterior(earlier.problem, search_space, next(iter(runs.values()))[0])
        posterior.update(record_of(runs), EARLIER_SIGMA, pool, name)


def _teach_ways(pool: Pool, problem: GroupProblem, ways: Ways, surfaces: Surfaces) -> None:
    search_space = search_space_of(problem, surfaces)
    kinds = search_space.lattices[0].kinds
    first = ways.get(kinds[0][:2])
    if first is None:
        return
    size = NUM_SHARED + NUM_OF_KIND * (len(kinds) - 1)
    precision, mean, sd = np.full(size, NOTHING), np.zeros(size), np.ones(size)
    for number, kind in enumerate(kinds[1:]):
        at, expected = NUM_SHARED + NUM_OF_KIND * number, ways.get(kind[:2])
        sd[at : at + NUM_OF_KIND] = KIND_SD
        if expected is not None:
            link, latency = log(expected.bytes_per_s / first.bytes_per_s), log(expected.latency_s / first.latency_s)
            mean[[at, at + 3]] = link, latency
            precision[[at, at + 3]] = WAY_SD["link"] ** -2, WAY_SD["latency"] ** -2
    lesson = Lesson(precision=precision, mean=mean, prior_sd=sd)
    pool.learn(wire_key(problem, search_space), f"ways of {problem.group.name}", lesson)
