"""What a group's measurements say about assignments not measured: two curves, and what is left of the residuals.

The communication's curve and the computation's slowdown are fitted one after the other, each from all measurements and
all collectives (`belief.py`). What the curves miss is smoothed over the lattice (a Gaussian process of small
amplitude), so that a forecast near a measurement follows the measurement, however wrong the curve is there.
"""

from ctypes import byref

import numpy as np

from lagom_overlap.tune.just_enough.lattice import Floats, Ints
from lagom_overlap.tune.just_enough.library import ForecastStruct, address, call
from lagom_overlap.tune.just_enough.model import Evidence, Wires


def rounded_max(comm_s: Floats, comp_s: Floats, doubt: float) -> Floats:
    """The expected larger of two uncertain times: half of sum and distance, rounded off where they meet.

    Equal means give 0.4 standard deviations more than either, as the expected larger of two normals does.
    """
    blur = doubt * np.maximum(comm_s, comp_s)
    return np.asarray(0.5 * (comm_s + comp_s + np.sqrt((comm_s - comp_s) ** 2 + 0.64 * blur**2)))


class Forecast:
    """Forecasts of one group: its wires, its computations under one SM count's constants, its measurements so far."""

    def __init__(self, evidence: Evidence, wires: Wires, sm: int, body: Floats) -> None:
        self._evidence, self._wires = evidence, wires
        model = self.model = evidence.model
        self.lattices, self.num_comms = model.sight.lattices, len(model.sight.lattices)
        num_surfaces, num_kernels = len(model.sight.surfaces), model.victim.fluid.shape[-1]
        self._under = np.empty((num_surfaces, model.most_places, num_kernels))
        self._reals = np.empty(num_kernels + len(evidence.record.num))
        self._fronts = np.empty((num_surfaces, model.most_places), dtype=np.int64)
        self._num_front = np.empty(num_surfaces, dtype=np.int64)
        self.struct = ForecastStruct(
            use=wires.struct.use,
            comm_s=wires.struct.comm_s,
            under=address(self._under),
            alone=address(self._reals),
            weights=address(self._reals) + 8 * num_kernels,
            fronts=address(self._fronts),
            num_front=address(self._num_front),
        )
        model.run("ls_computations", byref(evidence.struct), sm, address(body), byref(self.struct))

    @property
    def evidence(self) -> Evidence:
        """What it rests on."""
        return self._evidence

    @property
    def fronts(self) -> list[Ints]:
        """Per collective the places that no other beats in speed and in harmlessness, nearly; the fastest first."""
        return [self._fronts[m, : self._num_front[m]] for m in self.model.sight.surface_of]

    def times(self, places: Ints) -> tuple[Floats, Floats]:
        """X and Y of assignments (A, N)."""
        places = np.ascontiguousarray(places, dtype=np.intp)
        comm_s, comp_s = np.empty(len(places)), np.empty(len(places))
        call(
            "ls_times",
            *(byref(self.model.struct), byref(self._evidence.struct), byref(self.struct), address(places), len(places)),
            *(address(comm_s), address(comp_s)),
        )
        return comm_s, comp_s

    def makespans(self, places: Ints, doubt: float = 0.0) -> Floats:
        """Expected Z of assignments (A, N); `doubt` is the uncertainty of X and Y as a share."""
        return rounded_max(*self.times(places), doubt)
