"""Coordinate search on a forecast: one collective's places at a time, all others fixed, until none helps.

Nothing is measured here. What does not change is not computed again: the collectives before the one that varies give a
start, those after it are piecewise linear functions of what it leaves.
"""

from collections.abc import Sequence

import numpy as np

from lagom_overlap.tune.just_enough.forecast import Forecast, rounded_max
from lagom_overlap.tune.just_enough.lattice import Floats, Ints

LEAST_STEP = 1e-6
"""A smaller relative gain is none."""


class Allocation:
    """The search over `allowed` places per collective; `doubt` as in `Forecast.makespans`."""

    def __init__(self, forecast: Forecast, barred: Sequence[set[int]], doubt: float) -> None:
        self._forecast, self._doubt = forecast, doubt
        self._allowed = [
            np.array([place for place in front.tolist() if place not in bar], dtype=np.intp)
            for front, bar in zip(forecast.fronts, barred, strict=True)
        ]

    def best(self, starts: Sequence[Sequence[int]]) -> tuple[float, Ints]:
        """The smallest expected makespan found from the starts and from the best equal places, and where.

        Raises:
            ValueError: if there is no start: none given and no equal places.
        """
        found = [self._descend(start) for start in (*starts, *self._alike())]
        if not found:
            raise ValueError("no place to start from")
        return min(found, key=lambda pair: pair[0])

    def _alike(self) -> list[Sequence[int]]:
        """The best assignment with one place for all, where the collectives share a lattice."""
        if not self._forecast.shares_lattice:
            return []
        common = sorted(set.intersection(*(set(places.tolist()) for places in self._allowed)))
        if not common:
            return []
        places = np.repeat(np.array(common)[:, None], self._forecast.num_comms, axis=1)
        return [places[int(np.argmin(self._forecast.makespans(places, self._doubt)))].tolist()]

    def _descend(self, start: Sequence[int]) -> tuple[float, Ints]:
        places, num_comms = np.array(start, dtype=np.intp), self._forecast.num_comms
        best = float(self._forecast.makespans(places[None], self._doubt)[0])
        since = j = 0
        while since < num_comms:
            since += 1
            if len(self._allowed[j]):
                makespans = self._vary(places, j)
                at = int(np.argmin(makespans))
                if makespans[at] < best * (1 - LEAST_STEP):
                    best, since = float(makespans[at]), 1
                    places[j] = self._allowed[j][at]
            j = (j + 1) % num_comms
        return best, places

    def _vary(self, places: Ints, j: int) -> Floats:
        """Expected makespans with collective j at each of its allowed places."""
        forecast, tried = self._forecast, self._allowed[j]
        done, comp_s = np.zeros(1), np.zeros(1)
        for i in range(j):
            done, took = self._beside(i, places[i], done, forecast.comm_s[i][places[i]])
            comp_s = comp_s + took
        times = forecast.comm_s[j][tried]
        done, took = self._beside_any(j, tried, float(done[0]), times)
        comp_s = comp_s + took
        for i in range(j + 1, forecast.num_comms):
            done, took = self._beside(i, places[i], done, forecast.comm_s[i][places[i]])
            comp_s = comp_s + took
        alone = forecast.alone_upto
        comp_s = comp_s + alone[-1] - np.interp(done, forecast.knots, alone)
        others = sum(float(forecast.comm_s[i][places[i]]) for i in range(forecast.num_comms) if i != j)
        return rounded_max(others + times, comp_s * forecast.correction(places, j, tried), self._doubt)

    def _beside(self, i: int, place: int, done: Floats, comm_s: float) -> tuple[Floats, Floats]:
        knots, upto = self._forecast.knots, self._forecast.upto[i][place]
        spent = np.interp(done, knots, upto)
        return np.interp(spent + comm_s, upto, knots), np.minimum(comm_s, upto[-1] - spent)

    def _beside_any(self, j: int, tried: Ints, done: float, comm_s: Floats) -> tuple[Floats, Floats]:
        """The same for many places of one collective from one start."""
        knots, upto = self._forecast.knots, self._forecast.upto[j][tried]
        last = len(knots) - 2
        at = min(int(np.searchsorted(knots, done, side="right")) - 1, last)
        share = (done - knots[at]) / (knots[at + 1] - knots[at])
        spent = upto[:, at] + share * (upto[:, at + 1] - upto[:, at])
        reach = np.minimum(spent + comm_s, upto[:, -1])
        end = np.minimum((upto[:, 1:] <= reach[:, None]).sum(axis=1), last)
        rows = np.arange(len(tried))
        low, high = upto[rows, end], upto[rows, end + 1]
        after = knots[end] + (reach - low) / (high - low) * (knots[end + 1] - knots[end])
        return after, reach - spent
