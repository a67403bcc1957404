"""Model-based search for the least communication resources that keep communication hidden; fitted as it goes.

Ours, not a paper's: calibrate, allocate, probe, race (spec, Lagom section 3.2). A measurement gives Y and every x_j at
once, so a joint probe of N collectives says N + 1 things about a curve with a dozen constants; after two or three of
them the best assignment is looked for on the model, where trying costs nothing. What Lagom and AutoCCL do one
collective or one knob at a time takes measurements in proportion to them; this does not.

    here                 paper                                        unit
    Measurement.comm_s   x_j                                          s
    comp_s, makespan_s   Y, Z                                         s
    `model.py`           x(NC, C, A, P)                               s
                         Eqs 4 to 6: waves, bandwidth, cache          s
    `Surrogate`          Z = max(X, Y) of any assignment              s
    `Allocation`         argmin Z over the lattice

What it reads besides the measurements: bytes of the collectives, and the kernels' grids, wave times and memory bytes
where the group has them (`Kernel`: from a profiler's trace). Without grids the loss of SMs is a smooth curve, and the
steps of whole waves are a residual of each collective by its channels.

Limits, by construction: threads stay as the default has them; a transport is a label like an algorithm (`subspaces.py`
looks at both); only pairs of the race allow for drift; dependencies between the streams enter as a constant gap between
Z and the longer stream only. What the curves cannot express at all and no probe happens upon, a cliff far from the
default, stays unseen: the default is then what it is compared with.

Warm starts: what other runs say of the wire and the computations, as priors that the group's own data may refuse.

The groups of an earlier run are fitted as if they were groups of this one; what they learn goes to a `Pool` of its
own. A group asks that pool for a prior, fits with it and without it, and keeps the one under which its own
measurements are more probable (evidence by Laplace's approximation): a wrong prior explains them worse, and is dropped
as soon as they show it. NCCL's cost table, or another one, says how implementations compare: a lesson too.

The earlier best is measured once, after the default; like everything else it is adopted only on evidence.
"""

from collections.abc import Mapping, Sequence
from math import log
from typing import ClassVar, Final

import numpy as np

from lagom_overlap.tuners.base import Problems, Trial
from lagom_overlap.tuners.groupwise import SideBySide
from lagom_overlap.tuners.model_based.effort import check_confidence, effort_named
from lagom_overlap.tuners.model_based.evidence import Arms
from lagom_overlap.tuners.model_based.model import KIND_SD, NUM_OF_KIND, NUM_SHARED
from lagom_overlap.tuners.model_based.posterior import UNCONTRADICTED, Lesson, Pool, first_posterior, wire_key
from lagom_overlap.tuners.model_based.search import GroupSearch
from lagom_overlap.tuners.model_based.search_space import Surfaces, record_of, search_space_of
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Outcome
from lagom_overlap.tuners.warm_start import Earlier, WarmStart, Ways, nearest_allowed

WAY_SD: Final = {"link": 0.1, "latency": 0.3}
"""How far a table's ratios between implementations may be off, as shares. Chosen, not measured."""
RUN_EVIDENCE: Final = 1.0
"""Log odds that a group's own measurements must give another run: it may be of another machine. A table speaks of what
was not measured yet: it holds until it is contradicted."""
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
    search_space, arms = search_space_of(earlier.problem, surfaces), Arms()
    for assignment, repeats in earlier.runs.items():
        for run in repeats:
            arms.add(assignment, run)
    runs = {
        places: repeats for arm, repeats in arms.runs.items() if (places := search_space.places_of(arm)) is not None
    }
    if runs:
        posterior = first_posterior(earlier.problem, search_space, next(iter(runs.values()))[0])
        posterior.update(record_of(runs), arms.sigma, pool, name)


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


STEP_WORK: Final = 600_000
"""Work of one decision step at most (`GroupModel.work`; measured: 30 to 50 ns a unit)."""


class ModelBased(SideBySide[GroupSearch]):
    """A model-guided tuner over all groups of an iteration, which learn from each other; guarded by construction.

    `effort` is `"quick"`, `"normal"` or `"thorough"`. What is recommended was measured to be faster than the default,
    and by at least `confidence` standard deviations not slower than 0.5 % above it; else it is the default.

    A step plans as many groups as `step_work` allows, those first that have waited longest, then the longest of the
    iteration; the others are measured once more with what they have. Work is counted, not timed: the same tells give
    the same asks on any machine. `warm` is what other runs say; the group's own measurements may refuse it.

    Raises:
        UnknownNameError: if there is no such effort.
        SpaceError: if the confidence is negative.
    """

    guards_itself: ClassVar[bool] = True

    def __init__(
        self,
        problems: Problems,
        *,
        seed: int = 0,
        effort: str = "normal",
        confidence: float = 1.8,
        step_work: int = STEP_WORK,
        warm: WarmStart | None = None,
    ) -> None:
        surfaces, chosen, beyond = Surfaces(), effort_named(effort), check_confidence(confidence)
        pool = Pool(None if warm is None else earlier_pool(warm, problems, surfaces))
        self._step_work = step_work

        def begin(problem: GroupProblem) -> GroupSearch:
            first = None if warm is None else first_probe(warm, problem)
            return GroupSearch(problem, chosen, confidence=beyond, seed=seed, pool=pool, surfaces=surfaces, first=first)

        super().__init__(problems, begin)

    def tell(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """Takes the outcomes of all groups, then plans the next probe of as many as one step allows.

        Raises:
            ValueError: if it is not the trial just asked for, or a group's outcome is missing or foreign.
        """
        super().tell(trial, outcomes)
        waiting = sorted((self._runs[name] for name in trial.assignments), key=lambda run: run.urgency, reverse=True)
        spent = 0
        for number, run in enumerate(waiting):
            if number and spent + run.expected_work > self._step_work:
                run.wait()
            else:
                spent += run.plan()
