"""What a group's measurements say about assignments not measured: two curves, and what is left of the residuals.

The communication's curve and the computation's slowdown are fitted one after the other, each from all measurements and
all collectives (`belief.py`). What the curves miss is smoothed over the lattice (a Gaussian process of small
amplitude), so that a forecast near a measurement follows the measurement, however wrong the curve is there.
"""

from functools import cached_property
from typing import Final

import numpy as np

from lagom_overlap.tune.just_enough.lattice import Floats, Ints, gather
from lagom_overlap.tune.just_enough.sight import Record, Sight
from lagom_overlap.tune.just_enough.victim import Beside, Pace, Victim, finish_times
from lagom_overlap.tune.just_enough.wire import comm_times, rates

CURVE_SD: Final = 0.04
"""How far the communication's curve may be off, smoothly, as a share."""
COLLECTIVE_SD: Final = 0.05
"""How far one collective may be from the others at equal bytes."""
SPOT_SD: Final = 0.01
"""How far one collective at one place may be from all else."""
BODY_SD: Final = 0.02
"""How far the computation's slowdown may be off, smoothly over assignments, where grids are known."""
BLIND_BODY_SD: Final = 0.04
"""The same where they are not."""
NEAR_FRONT: Final = 1.004
"""Places that slow the computation by less than this over the least at their speed stay candidates."""
LEAST_VARIANCE: Final = 1e-8


def body_sd(victim: Victim) -> float:
    """The amplitude that fits the victim."""
    return BODY_SD if victim.knows_grid else BLIND_BODY_SD


def rounded_max(comm_s: Floats, comp_s: Floats, doubt: float) -> Floats:
    """The expected larger of two uncertain times: half of sum and distance, rounded off where they meet.

    Equal means give 0.4 standard deviations more than either, as the expected larger of two normals does.
    """
    blur = doubt * np.maximum(comm_s, comp_s)
    return np.asarray(0.5 * (comm_s + comp_s + np.sqrt((comm_s - comp_s) ** 2 + 0.64 * blur**2)))


def use_of(sight: Sight, wire: Floats) -> list[Floats]:
    """Per collective the share of the largest rate at every place."""
    shares: dict[int, Floats] = {}
    for lattice in sight.lattices:
        if id(lattice) not in shares:
            rate = rates(wire, lattice.channels, lattice.chunk_bytes, lattice.kind)
            shares[id(lattice)] = rate / rate.max()
    return [shares[id(lattice)] for lattice in sight.lattices]


class Wires:
    """x_j at every place: the curve, the smooth rest of all, the collective's own factor, what one spot showed."""

    def __init__(self, sight: Sight, record: Record, wire: Floats, sigma: float) -> None:
        self._sight, self._record = sight, record
        variance = sigma**2 / record.num + LEAST_VARIANCE
        curves = [
            np.log(comm_times(wire, wire_bytes, lattice.channels, lattice.chunk_bytes, lattice.kind))
            for lattice, wire_bytes in zip(sight.lattices, sight.wire_bytes, strict=True)
        ]
        rest = np.log(record.comm_s) - gather(curves, record.places)
        smooth = [np.zeros(len(lattice)) for lattice in sight.lattices]
        factor = np.zeros(len(sight.lattices))
        for _ in range(2):
            smooth = self._smoothed(rest - factor, variance)
            left = rest - gather(smooth, record.places)
            factor = left.sum(axis=0) / (len(left) + (variance.mean() + SPOT_SD**2) / COLLECTIVE_SD**2)
        spot = self._spots(rest - factor - gather(smooth, record.places), variance)
        self.comm_s = [
            np.exp(parts) for parts in (c + s + f + o for c, s, f, o in zip(curves, smooth, factor, spot, strict=True))
        ]

    def _smoothed(self, rest: Floats, variance: Floats) -> list[Floats]:
        """The smooth rest on every lattice; collectives on one lattice share what they show."""
        result: dict[int, Floats] = {}
        for lattice, spread in zip(self._sight.lattices, self._sight.spreads, strict=True):
            if id(lattice) in result:
                continue
            mine = [j for j, other in enumerate(self._sight.lattices) if other is lattice]
            weights = np.repeat(1 / (variance + SPOT_SD**2), len(mine))
            seen, index = np.unique(self._record.places[:, mine].ravel(), return_inverse=True)
            precision = np.bincount(index, weights)
            mean = np.bincount(index, weights * rest[:, mine].ravel()) / precision
            cover = CURVE_SD**2 * np.exp(-0.5 * spread[:, seen])
            result[id(lattice)] = cover @ np.linalg.solve(cover[seen] + np.diag(1 / precision), mean)
        return [result[id(lattice)] for lattice in self._sight.lattices]

    def _spots(self, rest: Floats, variance: Floats) -> list[Floats]:
        spots = []
        for j, lattice in enumerate(self._sight.lattices):
            places = self._record.places[:, j]
            precision = np.bincount(places, 1 / variance, minlength=len(lattice))
            spots.append(np.bincount(places, rest[:, j] / variance, minlength=len(lattice)) / (precision + SPOT_SD**-2))
        return spots


class Forecast:
    """Forecasts of one group: its wire's constants (P,), its computations, and its measurements so far."""

    def __init__(self, sight: Sight, record: Record, sigma: float, *, wire: Floats, beside: Beside) -> None:
        self._sight, self._record = sight, record
        self.num_comms, self.lattices = len(sight.lattices), sight.lattices
        self.comm_s = Wires(sight, record, wire, sigma).comm_s
        self._pace = Pace.of(beside.alone_times())
        tables: dict[int, Floats] = {}
        for lattice, use in zip(sight.lattices, use_of(sight, wire), strict=True):
            if id(lattice) not in tables:
                tables[id(lattice)] = beside.kernel_times(lattice.channels, lattice.chunk_bytes, use)
        self._under = [tables[id(lattice)] for lattice in sight.lattices]
        self.knots = np.concatenate([[0.0], self._pace.ends])
        self.alone_upto = np.concatenate([[0.0], np.cumsum(self._pace.alone)])
        upto = {key: np.pad(np.cumsum(table, axis=-1), ((0, 0), (1, 0))) for key, table in tables.items()}
        self.upto = [upto[id(lattice)] for lattice in sight.lattices]
        self.shares_lattice = len(tables) == 1
        rest = np.log(record.comp_s) - np.log(self._base(record.places))
        variance = body_sd(beside.victim) ** 2
        cover = variance * self._likeness(record.places) + np.diag(sigma**2 / record.num + LEAST_VARIANCE)
        self._weights = variance * np.linalg.solve(cover, rest)

    def _likeness(self, places: Ints) -> Floats:
        """(A, D) between assignments and the record's, by their mean squared distance."""
        apart = np.zeros((len(places), len(self._record.num)))
        for j, spread in enumerate(self._sight.spreads):
            apart += spread[places[:, j][:, None], self._record.places[:, j]]
        return np.asarray(np.exp(-0.5 * apart / self.num_comms))

    def _base(self, places: Ints) -> Floats:
        under = [table[places[:, j]] for j, table in enumerate(self._under)]
        return finish_times(self._pace, under, [table[places[:, j]] for j, table in enumerate(self.comm_s)])

    def times(self, places: Ints) -> tuple[Floats, Floats]:
        """X and Y of assignments (A, N)."""
        total = sum((table[places[:, j]] for j, table in enumerate(self.comm_s)), start=np.zeros(len(places)))
        return total, self._base(places) * np.exp(self._likeness(places) @ self._weights)

    def makespans(self, places: Ints, doubt: float = 0.0) -> Floats:
        """Expected Z of assignments (A, N); `doubt` is the uncertainty of X and Y as a share."""
        return rounded_max(*self.times(places), doubt)

    def correction(self, places: Ints, j: int, tried: Ints) -> Floats:
        """What the residuals do to Y as a factor, with collective j at each of the tried places."""
        apart = self._sight.spreads[j][tried[:, None], self._record.places[:, j]]
        for i, spread in enumerate(self._sight.spreads):
            if i != j:
                apart = apart + spread[places[i], self._record.places[:, i]]
        return np.asarray(np.exp(np.exp(-0.5 * apart / self.num_comms) @ self._weights))

    @cached_property
    def fronts(self) -> list[Ints]:
        """Per collective the places that no other beats in speed and in harmlessness, nearly."""
        fronts: dict[int, Ints] = {}
        for lattice, comm_s, under in zip(self._sight.lattices, self.comm_s, self._under, strict=True):
            if id(lattice) in fronts:
                continue
            harm = under.sum(axis=-1)
            order = np.lexsort((harm, comm_s))
            least = np.minimum.accumulate(harm[order])
            before = np.concatenate([[np.inf], least[:-1]])
            fronts[id(lattice)] = np.sort(order[harm[order] <= before * NEAR_FRONT])
        return [fronts[id(lattice)] for lattice in self._sight.lattices]
