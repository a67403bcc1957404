"""The best assignment on a forecast: exact for up to two collectives, else coordinate search with trades.

One collective's places at a time are searched, all others fixed, until none helps; then pairs are moved against each
other (one faster, one gentler), which a maximum of two sums needs to get past its ridges. Nothing is measured.

What does not change is not computed again: the collectives before the one that varies give a start, those after it are
piecewise linear functions of what it leaves.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np

from lagom_overlap.tune.just_enough.forecast import Forecast, rounded_max
from lagom_overlap.tune.just_enough.lattice import Floats, Ints

LEAST_STEP: Final = 1e-6
"""A smaller relative gain is none."""
MOST_PAIRS: Final = 4096
"""Assignments of two collectives that are all looked at."""
REACH: Final = 2
"""Places up and down in speed that a trade looks at."""
NEAR: Final = 8
"""Up to as many collectives all pairs trade, beyond only neighbours."""


class Allocation:
    """The search over `allowed` places per collective; `doubt` as in `Forecast.makespans`."""

    def __init__(self, forecast: Forecast, barred: Sequence[set[int]], doubt: float) -> None:
        self._forecast, self._barred, self._doubt = forecast, barred, doubt
        self._allowed = [
            np.array([place for place in front.tolist() if place not in bar], dtype=np.intp)
            for front, bar in zip(forecast.fronts, barred, strict=True)
        ]

    def best(self, starts: Sequence[Sequence[int]]) -> Ints | None:
        """Where the expected makespan is smallest, searched from the starts and from the best equal places.

        None without any of them.
        """
        if self._forecast.num_comms == 2 and 0 < len(self._allowed[0]) * len(self._allowed[1]) <= MOST_PAIRS:
            pairs = np.stack(np.meshgrid(*self._allowed, indexing="ij"), axis=-1).reshape(-1, 2)
            return np.asarray(pairs[int(np.argmin(self._forecast.makespans(pairs, self._doubt)))])
        found = [self._descend(start) for start in (*starts, *self._alike())]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def best_of_kind(self, kind: int) -> Ints | None:
        """The best equal places of one implementation; where a collective lacks it, None."""
        chosen = [
            np.array(
                [place for place in np.flatnonzero(lattice.kind == kind).tolist() if place not in bar], dtype=np.intp
            )
            for lattice, bar in zip(self._forecast.lattices, self._barred, strict=True)
        ]
        if not self._forecast.shares_lattice or any(len(places) == 0 for places in chosen):
            return None
        return self._best_equal(chosen)

    def _alike(self) -> list[Sequence[int]]:
        """The best assignment with one place for all, where the collectives share a lattice."""
        if not self._forecast.shares_lattice:
            return []
        found = self._best_equal(self._allowed)
        return [] if found is None else [found.tolist()]

    def _best_equal(self, choices: Sequence[Ints]) -> Ints | None:
        common = sorted(set.intersection(*(set(places.tolist()) for places in choices)))
        if not common:
            return None
        places = np.repeat(np.array(common)[:, None], self._forecast.num_comms, axis=1)
        return np.asarray(places[int(np.argmin(self._forecast.makespans(places, self._doubt)))])

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
            if since == num_comms and (trade := self._trade(places, best)) is not None:
                (best, places), since = trade, 0
        return best, places

    def _trade(self, places: Ints, best: float) -> tuple[float, Ints] | None:
        """The best move of two collectives at once, a few places in speed; None if none helps."""
        options = [self._near_in_speed(places[j], j) for j in range(len(places))]
        tried = []
        for i, j in combinations(range(len(places)), 2):
            if len(places) <= NEAR or j == i + 1:
                rows = np.repeat(places[None], len(options[i]) * len(options[j]), axis=0)
                rows[:, i], rows[:, j] = np.repeat(options[i], len(options[j])), np.tile(options[j], len(options[i]))
                tried.append(rows)
        if not tried:
            return None
        moves = np.concatenate(tried)
        makespans = self._forecast.makespans(moves, self._doubt)
        at = int(np.argmin(makespans))
        return (float(makespans[at]), moves[at]) if makespans[at] < best * (1 - LEAST_STEP) else None

    def _near_in_speed(self, place: int, j: int) -> Ints:
        comm_s, allowed = self._forecast.comm_s[j], self._allowed[j]
        order = allowed[np.argsort(comm_s[allowed], kind="stable")]
        at = int(np.searchsorted(comm_s[order], comm_s[place]))
        return order[max(0, at - REACH) : at + REACH + 1]

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
