"""One group's search: calibrate with the default, probe what the surrogate favours, race the winner.

    1. Measure the default: it is the incumbent and sets the scale of the priors. If it is not on a lattice (an engine's
       own, untouched), settings in the middle of the ranges calibrate.
    2. Probe: fit, allocate on the surrogate, measure its favourite. When it favours nothing new, do the same with
       surrogates drawn from the posterior (Thompson, 1933), to measure what may still be better.
    3. Race: the best against the default until it is clearly better, then against its closest rival until the expected
       loss is small; the arm with fewer measurements runs. The race ends when keeping the default loses little.
    4. Settle: the best if it was measured faster than the default on average and is clearly not slower, else the
       default.

If surrogates miss three times in a row, the search goes on without the model: doubling and halving from the fastest.
"""

from math import inf, log, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np

from lagom_overlap.tuners.groupwise import Probe, group_random
from lagom_overlap.tuners.model_based.effort import Drift, Effort, times_usual
from lagom_overlap.tuners.model_based.evidence import Arms
from lagom_overlap.tuners.model_based.posterior import Pool, Posterior, first_posterior
from lagom_overlap.tuners.model_based.search_space import LEAST_S, Places, Surfaces, record_of, search_space_of
from lagom_overlap.tuners.model_based.subspaces import Contender, Halving, kinds_at, name_of, outlooks, places_of_look
from lagom_overlap.tuners.model_based.surrogate import Allocation, Surrogate
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Outcome

NORMAL: Final = NormalDist()
DOUBT: Final = 0.03
"""Uncertainty of a surrogate's X or Y, as a share: an assignment that balances them is worth less than it seems."""
LEAST_GAIN: Final = 0.003
"""The gain that a probe must promise, as a share; with noise up to `MOST_GAIN`. Chosen, not measured."""
MOST_GAIN: Final = 0.01
MODEL_SD: Final = 0.015
"""The error of a surrogate at a measured assignment, as a share."""
BLIND_MODEL_SD: Final = 0.03
"""The same if the kernels' grids are unknown."""
NUM_SETTLED: Final = 2
"""Constants that all measurements together must determine before a surrogate is that good."""
NOISE_CHECK: Final = 4
"""After this many measurements the default is repeated: that shows the noise, and the race needs it."""
FIRST_TRUSTED: Final = 4
"""Measurements before which a surrogate is not trusted: it rests on priors and may be far off."""
SURPRISE: Final = 0.1
"""A makespan further than this from its surrogate, on top of the noise, counts against the model."""
MOST_SURPRISES: Final = 3
"""Surprises in a row after which the model is not used any more."""
TOLERATED: Final = 0.005
"""The share by which an adopted assignment may be slower without harm; `sequential.MIN_EFFECT` has the same value."""
LOOKED_AROUND: Final = 6
"""Assignments that must have run before a surrogate without grids may end the search; more if it missed."""
WORK_PER_COMM: Final = 3_000
"""The assumed work of the first plan, per collective."""
SHARES: Final = (0.6, 0.3, 1.0, 0.0)
"""Calibration without a default on the lattice: positions in the logarithmic ranges. Chosen, not measured."""
STEPS: Final = (
    ("half the channels", 0.5, 1.0),
    ("twice the channels", 2.0, 1.0),
    ("half the chunk", 1.0, 0.5),
    ("twice the chunk", 1.0, 2.0),
)
"""Words, factor of the channels, factor of the chunk."""


class GroupSearch:
    """The state of one group's search: measurements, the next probe (None at the end), the recommendation."""

    def __init__(
        self,
        problem: GroupProblem,
        effort: Effort,
        *,
        confidence: float,
        seed: int,
        pool: Pool,
        surfaces: Surfaces,
        first: Assignment | None = None,
    ) -> None:
        self._problem, self._effort, self._confidence = problem, effort, confidence
        self._pool, self._first = pool, first
        self._seed = group_random(seed, problem).getrandbits(32)
        self._search_space = search_space_of(problem, surfaces)
        self._drift = Drift(problem.default)
        self._excluded: list[set[int]] = [set() for _ in self._search_space.lattices]
        self._posterior: Posterior | None = None
        self._surrogate: Surrogate | None = None
        self._places: dict[Assignment, Places] = {}
        self._estimates_s: dict[Assignment, float] = {}
        self._num_told = 0
        self._num_planned = 0
        self._num_waited = 0
        self.expected_work = WORK_PER_COMM * len(problem.group.comms)
        self._halving = Halving(self._search_space)
        self._num_surprises = 0
        self._expected_s: float | None = None
        self._expected_comp_s: float | None = None
        self.incumbent = problem.default
        self.probe: Probe | None = Probe(assignment=problem.default, reason="the default")

    def tell(self, outcome: Outcome) -> None:
        """Takes the outcome of the probe just asked for."""
        assert self.probe is not None, "told a finished search"
        assignment = self.probe.assignment
        self._num_told += 1
        if self._drift.see(assignment, outcome, self._expected_comp_s):
            self._begin_anew()
        if isinstance(outcome, Failure):
            self._bar(assignment)
        elif self._expected_s is not None and self._num_told > FIRST_TRUSTED and self._is_trusted:
            off = abs(log(max(outcome.makespan_s, LEAST_S) / self._expected_s))
            self._num_surprises = self._num_surprises + 1 if off > SURPRISE + 3 * self._arms.sigma else 0
        self._expected_s = self._expected_comp_s = None

    def plan(self) -> int:
        """Finds the next probe and the recommendation after the last outcome; returns the work that took."""
        before = 0 if self._posterior is None else self._posterior.work
        self._num_planned += 1
        self._num_waited = 0
        self.probe = self._next()
        self.incumbent = self._settled()
        self.expected_work = (0 if self._posterior is None else self._posterior.work) - before
        return self.expected_work

    def wait(self) -> None:
        """Postpones the plan: the same assignment is measured once more, or the default if that cannot run."""
        assert self.probe is not None, "a finished search does not wait"
        self._num_waited += 1
        assignment = self.probe.assignment
        assignment = self._problem.default if self._arms.failed(assignment) else assignment
        self.probe = Probe(assignment=assignment, reason="repeated: the next probe is planned in a later step")

    @property
    def urgency(self) -> tuple[int, float]:
        """The priority of planning: the group that has waited longest, then the one with the longest time in a step."""
        default_s = self._arms.mean_s(self._problem.default)
        return self._num_waited, self._problem.group.count * (default_s if default_s < inf else 0.0)

    def _begin_anew(self) -> None:
        """The job has changed: conclusions from earlier times are dropped."""
        self._posterior = self._surrogate = None
        self._estimates_s = {}
        self._num_planned = self._drift.num_told - 1
        self._num_surprises = 0
        self._halving = Halving(self._search_space)

    @property
    def _arms(self) -> Arms:
        return self._drift.arms

    @property
    def _now(self) -> Effort:
        """The effort at the noise seen so far."""
        return self._effort.under(self._arms.sigma)

    @property
    def _is_trusted(self) -> bool:
        return self._num_surprises < MOST_SURPRISES

    def _next(self) -> Probe | None:
        if self._num_told >= self._now.max_measurements:
            return None
        if self._drift.is_suspicious:
            return Probe(
                assignment=self._problem.default, reason="unexpected computation time: has the default's changed?"
            )
        self._surrogate = self._look()
        if self._first is not None and not self._arms.knows(self._first):
            return Probe(assignment=self._first, reason="warm start: the result of an earlier run")
        if self._surrogate is None:
            return self._calibrate()
        return self._propose(self._surrogate) or self._look_around(self._surrogate) or self._hear() or self._race()

    def _settled(self) -> Assignment:
        best, default = self._best(), self._problem.default
        if best is None:
            return default
        if self._arms.failed(default):
            return best
        return best if self._is_better(best) else default

    # What is known

    def _look(self) -> Surrogate | None:
        """The surrogate of all outcomes so far, and its estimates; None if nothing on the lattice ran."""
        self._places = {
            arm: places for arm in self._arms.runs if (places := self._search_space.places_of(arm)) is not None
        }
        self._estimates_s = {}
        if not self._places:
            return None
        if self._posterior is None:
            first = next(iter(self._arms.runs.values()))[0]
            self._posterior = first_posterior(self._problem, self._search_space, first)
        record = record_of({places: self._arms.runs[arm] for arm, places in self._places.items()})
        self._posterior.update(record, self._arms.sigma, self._pool, self._problem.group.name)
        surrogate = self._posterior.surrogate()
        if self._is_trusted:
            makespans_s = (surrogate.makespans(record.places) + self._arms.gap_s).tolist()
            self._estimates_s = dict(zip(self._places, makespans_s, strict=True))
        return surrogate

    def _best(self) -> Assignment | None:
        """The best assignment that ran, by its estimate; may be the default."""
        return min(self._arms.runs, key=self._estimate_s, default=None)

    def _estimate_s(self, arm: Assignment) -> float:
        """An arm's makespan: the surrogate's, which includes the measurement, or the mean if it does not apply."""
        estimate_s = self._estimates_s.get(arm)
        return max(self._arms.mean_s(arm), LEAST_S) if estimate_s is None else estimate_s

    def _variance(self, arm: Assignment) -> float:
        """The variance of the logarithm of an estimate, from measurements and surrogate together."""
        precision = self._arms.num(arm) / self._arms.sigma**2
        if self._posterior is not None and arm in self._estimates_s:
            model_sd = MODEL_SD if self._posterior.compute_model.knows_grid else BLIND_MODEL_SD
            precision += 1 / (model_sd**2 + NUM_SETTLED * self._arms.sigma**2 / self._arms.num_runs)
        return 1 / precision

    def _is_better(self, arm: Assignment) -> bool:
        """Whether an arm is faster than the default on average, and clearly not slower."""
        arms, default = self._arms, self._problem.default
        mine_s, other_s = arms.mean_s(arm), arms.mean_s(default)
        if not mine_s < other_s:
            return False
        paired = arms.lead(arm, default)
        if paired is not None and paired.is_beyond(self._confidence, TOLERATED):
            return True
        noise = arms.sigma * sqrt(1 / arms.num(arm) + 1 / arms.num(default)) if other_s < inf else 0.0
        confidence = self._confidence * sqrt(times_usual(arms.sigma))  # large noise comes in runs, means know less
        if log(other_s / max(mine_s, LEAST_S)) + TOLERATED <= confidence * noise:
            return False
        lead = log(self._estimate_s(default) / self._estimate_s(arm))
        return lead + TOLERATED > confidence * sqrt(self._variance(arm) + self._variance(default))

    def _bar(self, assignment: Assignment) -> None:
        """Excludes the configurations of a failed assignment that never ran: any of them may be the cause.

        If exactly one implementation in it is new, that is the cause: it cannot run for these collectives.
        """
        for j, config in enumerate(assignment):
            place = self._search_space.lattices[j].place.get(config)
            if place is not None and not any(ran[j] == config for ran in self._arms.runs):
                self._excluded[j].add(place)
        places = self._search_space.places_of(assignment)
        new = set() if places is None else kinds_at(self._search_space, places) - self._measured_kinds()
        for j, places_of_kind in self._halving.fail(new).items():
            self._excluded[j] |= places_of_kind

    def _measured_kinds(self) -> set[Contender]:
        """The implementations of which anything ran."""
        ran = (self._search_space.places_of(arm) for arm in self._arms.runs)
        return {one for places in ran if places is not None for one in kinds_at(self._search_space, places)}

    # Calibrate

    def _calibrate(self) -> Probe | None:
        for share in SHARES:
            places = [
                lattice.between(share, excluded)
                for lattice, excluded in zip(self._search_space.lattices, self._excluded, strict=True)
            ]
            assignment = self._search_space.assignment_at(places)
            if not self._arms.knows(assignment):
                return Probe(assignment=assignment, reason="calibrate: resources between the extremes")
        return None

    # Probe

    def _propose(self, surrogate: Surrogate) -> Probe | None:
        if self._num_planned == NOISE_CHECK and 0 < self._arms.num(self._problem.default) < NOISE_CHECK:
            return Probe(assignment=self._problem.default, reason="measuring noise: repeating the default")
        if not self._is_trusted:
            return self._step()
        probe = self._favoured(surrogate, "surrogate")
        if probe is None:
            probe = self._scout(surrogate)
        assert self._posterior is not None, "a surrogate without a posterior"
        if probe is not None or self._num_planned >= self._now.max_explore or self._posterior.is_warm:
            return probe  # an earlier run that is believed has looked around already
        rng = np.random.default_rng([self._seed, self._num_planned])
        for _ in range(self._now.num_draws):
            probe = self._favoured(self._posterior.drawn(rng), "could be")
            if probe is not None:
                return probe
        return None

    def _scout(self, surrogate: Surrogate) -> Probe | None:
        """A look at implementations that may still be the best (`subspaces.py`); None once that is settled."""
        best, halving, search_space = self._best(), self._halving, self._search_space
        if best is None or not halving.num_looks:
            return None
        assert self._posterior is not None, "a surrogate without a posterior"
        base = self._places.get(best) or next(iter(self._places.values()))
        rng = np.random.default_rng([self._seed, self._num_planned, halving.num_looks])
        drawn = [self._posterior.drawn(rng) for _ in range(halving.num_draws)]
        measured_places = set(self._places.values())
        outlook_of = outlooks([surrogate, *drawn], self._excluded, base, measured_places, DOUBT)
        look = halving.next(outlook_of, self._estimate_s(best), self._measured_kinds())
        if look is None:
            return None
        assignment = search_space.assignment_at(
            places_of_look(look, outlook_of, surrogate, excluded=self._excluded, base=base, doubt=DOUBT)
        )
        if self._arms.knows(assignment):
            return None
        names = ", ".join(name_of(search_space, one) for one in look.contenders)
        return Probe(assignment=assignment, reason=f"subspaces: {names} may be the best")

    def _favoured(self, surrogate: Surrogate, why: str) -> Probe | None:
        """The assignment that a surrogate favours; None if it was tried or promises too little."""
        best = self._best()
        places = None if best is None else self._places.get(best)
        allocation = Allocation(surrogate, self._excluded, DOUBT)
        starts = list(self._places.values())[:1]
        allocated = allocation.best(starts if places is None else [places])
        if allocated is None:
            return None
        assignment = self._search_space.assignment_at(allocated.tolist())
        if self._arms.knows(assignment):
            return None
        compared = np.array([allocated] if places is None else [allocated, places])
        comm_s, comp_s = surrogate.times(compared)
        expected_s, *now = (np.maximum(comm_s, comp_s) + self._arms.gap_s).tolist()
        if best is not None:
            now_s = now[0] if now else self._estimate_s(best)
            least_gain = max(LEAST_GAIN, min(MOST_GAIN, self._arms.sigma / 3))
            if expected_s > now_s * (1 - least_gain):
                return None
        self._expected_s = max(expected_s, LEAST_S)
        if self._num_planned >= FIRST_TRUSTED and self._is_trusted and self._surrogate is not None:
            # A drawn surrogate is no expectation: the best one says how long the computations should take there.
            self._expected_comp_s = float(self._surrogate.times(compared[:1])[1][0])
        return Probe(assignment=assignment, reason=f"{why}: makespan {1e3 * expected_s:.4g} ms, the shortest")

    def _step(self) -> Probe | None:
        """A step without the model: twice or half the channels or the chunk of all, from the fastest so far."""
        places = self._places[min(self._places, key=self._arms.mean_s)]
        for words, moved in self._moves(places):
            assignment = self._search_space.assignment_at(moved)
            if not self._arms.knows(assignment):
                return Probe(assignment=assignment, reason=f"the model does not fit here: {words} of all")
        return None

    def _look_around(self, surrogate: Surrogate) -> Probe | None:
        """If the kernels' waves are unknown: the neighbours of the best, the best by the surrogate first."""
        assert self._posterior is not None, "a surrogate without a posterior"
        is_enough = len(self._arms.runs) >= LOOKED_AROUND and not self._num_surprises
        if self._posterior.compute_model.knows_grid or self._posterior.is_warm or is_enough:
            return None
        places = self._places.get(self._best() or (), next(iter(self._places.values())))
        near = dict.fromkeys(tuple(moved) for _, moved in self._moves(places))
        new = [moved for moved in near if not self._arms.knows(self._search_space.assignment_at(moved))]
        if not new:
            return None
        makespans_s = surrogate.makespans(np.array(new))
        nearest = int(np.argmin(makespans_s))
        self._expected_s = max(float(makespans_s[nearest]) + self._arms.gap_s, LEAST_S)
        return Probe(assignment=self._search_space.assignment_at(new[nearest]), reason="a neighbour of the best so far")

    def _moves(self, places: Places) -> list[tuple[str, list[int]]]:
        """All collectives moved in the same way: description and places."""
        lattices = list(zip(self._search_space.lattices, places, self._excluded, strict=True))
        return [
            (words, [lattice.moved(place, channels, chunk, excluded) for lattice, place, excluded in lattices])
            for words, channels, chunk in STEPS
        ]

    def _hear(self) -> Probe | None:
        """Repeats the default if nothing was repeated yet: a search must know the noise before it ends."""
        default = self._problem.default
        if self._arms.num(default) != 1 or any(len(done) > 1 for done in self._arms.runs.values()):
            return None
        return Probe(assignment=default, reason="measuring noise: repeating the default")

    # Race

    def _race(self) -> Probe | None:
        """Repeats of the best and what it has to beat: first the default, then its closest rival."""
        best, default = self._best(), self._problem.default
        if best is None or not self._arms.num(default):
            return None
        rival = default
        if best == default or self._is_better(best):
            losses = {arm: self._loss(best, arm) for arm in self._arms.runs if arm not in (best, default)}
            rival = max(losses, key=losses.__getitem__, default=best)
            if rival == best or losses[rival] <= self._now.tolerated_loss:
                return None
        elif self._loss(default, best) <= self._now.tolerated_loss:
            return None
        arm = best if self._arms.num(best) <= self._arms.num(rival) else rival
        if self._arms.num(arm) >= self._now.max_repeats:
            return None
        against = "the default" if rival == default else "its closest rival"
        return Probe(assignment=arm, reason=f"race: the best so far against {against}")

    def _loss(self, arm: Assignment, rival: Assignment) -> float:
        """The expected loss, as a share, of taking an arm where the rival might be faster."""
        lead = log(self._estimate_s(rival) / self._estimate_s(arm))
        doubt = sqrt(self._variance(arm) + self._variance(rival))
        return doubt * NORMAL.pdf(lead / doubt) - lead * NORMAL.cdf(-lead / doubt)
