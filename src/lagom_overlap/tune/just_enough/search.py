"""One group's search: calibrate with the default, probe what the forecast favours, race the winner with the default."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np

from lagom_overlap.backends.base import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.tune.groupwise import Probe
from lagom_overlap.tune.just_enough.evidence import TOLERATED, Arms
from lagom_overlap.tune.just_enough.allocate import Allocation
from lagom_overlap.tune.just_enough.belief import Belief
from lagom_overlap.tune.just_enough.forecast import Forecast
from lagom_overlap.tune.just_enough.pool import Pool
from lagom_overlap.tune.just_enough.sight import LEAST_S, Record, record_of, sight_of
from lagom_overlap.tune.just_enough.victim import victim_of
from lagom_overlap.tune.just_enough.wire import wire_prior

NORMAL: Final = NormalDist()
MODEL_SD: Final = 0.015
"""How far a forecast beside a measurement may be off."""
BLIND_MODEL_SD: Final = 0.03
"""The same where the kernels' grids are unknown."""
FIRST_TRUSTED: Final = 4
"""Earlier forecasts come from priors: they may be far off."""
SURPRISE: Final = 0.1
"""A makespan farther than this from its forecast, noise apart, counts against the model."""
MOST_SURPRISES: Final = 3
"""As many in a row, and the model is not asked any more."""
DOUBT: Final = 0.03
"""Uncertainty of a forecast X or Y: an assignment that balances them is worth less than it seems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """When a group's search ends: `confidence` in standard deviations of the comparison with the default."""

    max_measurements: int = 24
    max_repeats: int = 5
    confidence: float = 1.6
    least_gain: float = 0.003
    num_draws: int = 4
    max_explore: int = 8
    tolerated_loss: float = 0.004
    check_at: int = 4


STEPS: Final = (
    ("half the channels", 0.5, 1.0),
    ("twice the channels", 2.0, 1.0),
    ("half the chunk", 1.0, 0.5),
    ("twice the chunk", 1.0, 2.0),
)
"""Words, factor of the channels, factor of the chunk."""


class GroupSearch:
    """The state of one group: what was measured, what is asked, what is recommended."""

    def __init__(self, problem: GroupProblem, patience: Patience, seed: int, pool: Pool) -> None:
        self._problem, self._patience = problem, patience
        self._sight = sight_of(problem)
        self._arms = Arms(problem.default)
        self._barred: list[set[int]] = [set() for _ in self._sight.lattices]
        self._belief: Belief | None = None
        self._record: Record | None = None
        self._seed, self._pool = seed, pool
        self._forecast: Forecast | None = None
        self._num_told = 0
        self._surprises = 0
        self._expected_s: float | None = None
        self.stand = problem.default
        self.probe: Probe | None = Probe(assignment=problem.default, reason="the default, as the incumbent")

    def tell(self, outcome: Outcome) -> None:
        """Takes the outcome of the probe just asked for."""
        assert self.probe is not None, "told a finished search"
        assignment = self.probe.assignment
        self._num_told += 1
        self._arms.add(assignment, outcome)
        if isinstance(outcome, Failure):
            self._bar(assignment)
        elif self._expected_s is not None and self._num_told > FIRST_TRUSTED and self._surprises < MOST_SURPRISES:
            off = abs(log(max(outcome.makespan_s, LEAST_S) / self._expected_s))
            self._surprises = self._surprises + 1 if off > SURPRISE + 3 * self._arms.sigma else 0
        self._expected_s = None

    def plan(self) -> None:
        """The next probe, None at the end, and the stand."""
        self.probe = self._next()
        if self.probe is None or self._forecast is None:
            self.stand = self._settled()

    def _settled(self) -> Assignment:
        best = self._contender()
        default = self._problem.default
        if best is None or not self._arms.ran(best):
            return default
        if not self._arms.ran(default):
            return best if self._arms.failed(default) else default
        return best if self._is_better(best) else default

    def _is_better(self, arm: Assignment) -> bool:
        """Whether an arm is faster than the default on average, and beyond doubt not slower."""
        default, arms = self._problem.default, self._arms
        if not arms.mean_s(arm) < arms.mean_s(default):
            return False
        gain = log(max(self._estimate(default), LEAST_S) / max(self._estimate(arm), LEAST_S))
        doubt = sqrt(self._variance(arm) + self._variance(default))
        return gain + TOLERATED > self._patience.confidence * doubt

    def _variance(self, arm: Assignment) -> float:
        """Of the logarithm of an estimate: measurements and forecast together."""
        precision = self._arms.num(arm) / self._arms.sigma**2
        trusted = self._belief is not None and self._surprises < MOST_SURPRISES
        if trusted and self._sight.places_of(arm) is not None:
            assert self._belief is not None
            precision += (MODEL_SD if self._belief.victim.knows_grid else BLIND_MODEL_SD) ** -2
        return 1 / precision

    def _next(self) -> Probe | None:
        if self._num_told >= self._patience.max_measurements:
            return None
        self._forecast = self._look()
        if self._forecast is None:
            return self._calibrate()
        probe = self._propose(self._forecast)
        return probe if probe is not None else self._race()

    # -- calibrate

    def _look(self) -> Forecast | None:
        runs = {
            places: done
            for assignment, done in self._arms.runs.items()
            if (places := self._sight.places_of(assignment)) is not None
        }
        first = next(iter(self._arms.runs.values()), None)
        if first is None or not runs or min(min(run.comm_s) for done in runs.values() for run in done) <= 0:
            return None
        if self._belief is None:
            most = max(int(lattice.channels.max()) for lattice in self._sight.lattices)
            victim = victim_of(self._problem.group, most, first[0].comp_s)
            kinds = self._sight.lattices[0].kinds
            self._belief = Belief(
                sight=self._sight,
                victim=victim,
                wire_prior=wire_prior(kinds, self._sight.wire_bytes, np.array(first[0].comm_s)),
                wire_key=("wire", kinds, frozenset(comm.communicator for comm in self._problem.group.comms)),
                sms=np.arange(len(victim.sm_counts)),
            )
        self._record = record_of(runs)
        self._belief.update(self._record, self._arms.sigma, self._pool, self._problem.group.name)
        return self._belief.forecast(self._record, self._arms.sigma)

    def _calibrate(self) -> Probe | None:
        """Middling resources where the default says nothing about the lattice, less after failures."""
        for share in (0.6, 0.3, 1.0, 0.0):
            assignment = tuple(
                lattice.configs[_at_share(lattice.channels, lattice.chunk_bytes, lattice.kind, share, barred)]
                for lattice, barred in zip(self._sight.lattices, self._barred, strict=True)
            )
            if not self._arms.knows(assignment):
                return Probe(assignment=assignment, reason="calibrate: resources between the extremes")
        return None

    # -- probe

    def _propose(self, forecast: Forecast) -> Probe | None:
        if self._num_told == self._patience.check_at and self._num_told > 0 and self._arms.ran(self._problem.default):
            return Probe(assignment=self._problem.default, reason="noise: the default once more")
        if self._surprises >= MOST_SURPRISES:
            return self._step()
        probe = self._favoured(forecast, "forecast")
        if probe is not None or self._num_told >= self._patience.max_explore:
            return probe
        assert self._belief is not None and self._record is not None
        rng = np.random.default_rng([self._seed, self._num_told])
        for _ in range(self._patience.num_draws):
            probe = self._favoured(self._belief.drawn(self._record, self._arms.sigma, rng), "could be")
            if probe is not None:
                return probe
        return None

    def _step(self) -> Probe | None:
        """Without the model: from the fastest so far, twice or half the channels or the chunk of all."""
        known = [arm for arm in self._arms.runs if self._sight.places_of(arm) is not None]
        if not known:
            return None
        places = self._sight.places_of(min(known, key=self._arms.mean_s))
        assert places is not None, "a known arm off the lattice"
        for words, channels, chunk in STEPS:
            moved = [
                lattice.moved(place, channels, chunk, barred)
                for lattice, place, barred in zip(self._sight.lattices, places, self._barred, strict=True)
            ]
            assignment = self._sight.assignment_at(moved)
            if not self._arms.knows(assignment):
                return Probe(assignment=assignment, reason=f"the model does not fit here: {words} of all")
        return None

    def _favoured(self, forecast: Forecast, why: str) -> Probe | None:
        incumbent = self._contender()
        places = None if incumbent is None else self._sight.places_of(incumbent)
        starts = [] if places is None else [places]
        _, best = Allocation(forecast, self._barred, DOUBT).best(starts)
        assignment = self._sight.assignment_at(best)
        if self._arms.knows(assignment):
            return None
        expected_s = float(forecast.makespans(best[None])[0])
        if places is not None:
            now_s = float(forecast.makespans(np.array([places]))[0])
            if expected_s > now_s * (1 - self._tolerance()):
                return None
        self._expected_s = expected_s + self._arms.gap_s
        return Probe(assignment=assignment, reason=f"{why}: makespan {expected_s:.3g} s, the smallest")

    def _tolerance(self) -> float:
        return max(self._patience.least_gain, min(0.01, self._arms.sigma / 3))

    def _contender(self) -> Assignment | None:
        """The best of what ran by its estimate, the default too."""
        ran = list(self._arms.runs)
        return min(ran, key=self._estimate, default=None)

    def _estimate(self, assignment: Assignment) -> float:
        places = self._sight.places_of(assignment)
        if places is None or self._forecast is None or self._surprises >= MOST_SURPRISES:
            return self._arms.mean_s(assignment)
        return float(self._forecast.makespans(np.array([places]))[0]) + self._arms.gap_s

    # -- race

    def _race(self) -> Probe | None:
        """Repeats of the best and what it has to beat: first the default, beyond doubt, then its closest rival."""
        best, default = self._contender(), self._problem.default
        if best is None or not self._arms.ran(default):
            return None
        rival = default
        if best == default or self._is_better(best):
            rivals = [arm for arm in self._arms.runs if arm not in (best, default)]
            losses = {arm: self._loss(best, arm) for arm in rivals}
            rival = max(rivals, key=losses.__getitem__, default=best)
            if rival == best or losses[rival] <= self._patience.tolerated_loss:
                return None
        arm = best if self._arms.num(best) <= self._arms.num(rival) else rival
        if self._arms.num(arm) >= self._patience.max_repeats:
            return None
        against = "the default" if rival == default else "its closest rival"
        return Probe(assignment=arm, reason=f"race: the best so far against {against}")

    def _loss(self, arm: Assignment, rival: Assignment) -> float:
        """The expected loss, as a share, of taking an arm where the rival might be faster."""
        lead = log(max(self._estimate(rival), LEAST_S) / max(self._estimate(arm), LEAST_S))
        doubt = sqrt(self._variance(arm) + self._variance(rival))
        return doubt * NORMAL.pdf(lead / doubt) - lead * NORMAL.cdf(-lead / doubt)

    def _bar(self, assignment: Assignment) -> None:
        """No more of the configurations of a failed assignment that never ran anywhere."""
        for j, config in enumerate(assignment):
            place = self._sight.lattices[j].place.get(config)
            if place is not None and not any(ran[j] == config for ran in self._arms.runs):
                self._barred[j].add(place)


def _at_share(channels: np.ndarray, chunks: np.ndarray, kind: np.ndarray, share: float, barred: set[int]) -> int:
    logs = [np.log(channels), np.log(chunks)]
    wanted = [low + share * (axis.max() - low) for axis in logs if (low := axis.min()) is not None]
    apart = sum(np.abs(axis - want) for axis, want in zip(logs, wanted, strict=True)) + 100.0 * (kind != kind[0])
    apart[list(barred)] = np.inf
    return int(np.argmin(apart))


_ = (Mapping, exp, Measurement)
