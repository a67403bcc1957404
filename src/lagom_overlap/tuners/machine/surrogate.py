"""What a group's measurements say about assignments not measured: two curves, and what is left of the residuals.

The communication's curve and the computation's slowdown are fitted one after the other, each from all measurements and
all collectives (`posterior.py`). What the curves miss is smoothed over the lattice (a Gaussian process of small
amplitude), so that a surrogate near a measurement follows the measurement, however wrong the curve is there.

What the computations' curve misses is a sum over collectives, in logarithms: collective j, which is a share s_j of all
communication (mean over the measurements), at place p_j adds s_j (f(p_j) + e_j(p_j)).

    f     one for all, smooth: exp(-d^2 / 2) of the lattice's distance         variance body_sd^2
    e_j   each one's own, steps: exp(-|NC - NC'| / 5), whatever the chunk      variance step_sd^2 / sum s^2

So one measurement of four collectives at four places speaks of each place, and of other assignments that share any.

The best assignment on a surrogate: exact for up to two collectives, else coordinate search with trades.

One collective's places at a time are searched, all others fixed, until none helps; then pairs are moved against each
other (one faster, one gentler), which a maximum of two sums needs to get past its ridges. Nothing is measured. The
search itself is `ls_best` in csrc/lagom_search_allocate.c.
"""

from collections.abc import Sequence
from ctypes import byref

import numpy as np

from lagom_overlap.tuners.machine.group_model import Evidence, Wires
from lagom_overlap.tuners.machine.library import SurrogateStruct, address, call
from lagom_overlap.tuners.machine.search_space import Floats, Ints


class Surrogate:
    """Surrogates of one group: its wires, its computations under one SM count's constants, its measurements so far."""

    def __init__(self, evidence: Evidence, wires: Wires, sm: int, body: Floats) -> None:
        self._evidence, self._wires = evidence, wires
        model = self.model = evidence.model
        self.lattices, self.num_comms = model.search_space.lattices, len(model.search_space.lattices)
        num_surfaces, num_kernels = len(model.search_space.surfaces), model.compute_model.fluid.shape[-1]
        self._under = np.empty((num_surfaces, model.most_places, num_kernels))
        self._alone, self._rest = np.empty(num_kernels), np.empty((self.num_comms, model.most_places))
        self._fronts = np.empty((num_surfaces, model.most_places), dtype=np.int64)
        self._num_front = np.empty(num_surfaces, dtype=np.int64)
        self.struct = SurrogateStruct(
            use=wires.struct.use,
            pace=wires.struct.pace,
            comm_s=wires.struct.comm_s,
            under=address(self._under),
            alone=address(self._alone),
            rest=address(self._rest),
            fronts=address(self._fronts),
            num_front=address(self._num_front),
        )
        model.run("ls_computations", byref(evidence.struct), sm, address(body), byref(self.struct))

    @property
    def fronts(self) -> list[Ints]:
        """Per collective the places that no other beats in speed and in harmlessness, nearly; the fastest first."""
        return [self._fronts[m, : self._num_front[m]] for m in self.model.search_space.surface_of]

    def times(self, places: Ints) -> tuple[Floats, Floats]:
        """X and Y of assignments (A, N)."""
        places = np.ascontiguousarray(places, dtype=np.intp)
        comm_s, comp_s = np.empty(len(places)), np.empty(len(places))
        call(
            "ls_times",
            *(byref(self.model.struct), byref(self.struct), address(places), len(places)),
            *(address(comm_s), address(comp_s)),
        )
        return comm_s, comp_s

    def makespans(self, places: Ints, doubt: float = 0.0) -> Floats:
        """Expected Z of assignments (A, N); `doubt` is the uncertainty of X and Y as a share."""
        return rounded_max(*self.times(places), doubt)


class Allocation:
    """The search over all but the `excluded` places of each collective; `doubt` as in `Surrogate.makespans`."""

    def __init__(self, surrogate: Surrogate, excluded: Sequence[set[int]], doubt: float) -> None:
        self._surrogate, self._excluded, self._doubt = surrogate, excluded, doubt

    def best(self, starts: Sequence[Sequence[int]]) -> Ints | None:
        """Where the expected makespan is smallest, searched from the starts and from the best equal places.

        None without any of them.
        """
        surrogate = self._surrogate
        begin = np.array(starts, dtype=np.intp).reshape(len(starts), surrogate.num_comms)
        places, makespan_s = np.empty(surrogate.num_comms, dtype=np.intp), np.empty(1)
        mask = self._mask()
        surrogate.model.run(
            "ls_best",
            *(byref(surrogate.struct), None if mask is None else address(mask)),
            *(address(begin), len(begin), self._doubt, address(places), address(makespan_s)),
        )
        return places if np.isfinite(makespan_s[0]) else None

    def _mask(self) -> np.ndarray | None:
        """(N, most places): 1 where a place is excluded; None if none is."""
        if not any(self._excluded):
            return None
        mask = np.zeros((self._surrogate.num_comms, self._surrogate.model.most_places), dtype=np.uint8)
        for row, bar in zip(mask, self._excluded, strict=True):
            row[list(bar)] = 1
        return mask


def rounded_max(comm_s: Floats, comp_s: Floats, doubt: float) -> Floats:
    """The expected larger of two uncertain times: half of sum and distance, rounded off where they meet.

    Equal means give 0.4 standard deviations more than either, as the expected larger of two normals does.
    """
    blur = doubt * np.maximum(comm_s, comp_s)
    return np.asarray(0.5 * (comm_s + comp_s + np.sqrt((comm_s - comp_s) ** 2 + 0.64 * blur**2)))
