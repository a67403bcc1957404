"""A group's model where it is computed: its curves, fits and forecasts in C, behind numpy arrays.

wire, a collective alone            `wire.py`
computations beside collectives     `victim.py`
what both curves miss               Gaussian processes over the lattice (`Evidence`, `Forecast`)
"""

from ctypes import addressof, byref, c_int64
from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.tune.just_enough.lattice import Floats, Ints
from lagom_overlap.tune.just_enough.library import (
    ForecastStruct,
    GroupStruct,
    LatticeStruct,
    RecordStruct,
    address,
    call,
)
from lagom_overlap.tune.just_enough.sight import Record, Sight
from lagom_overlap.tune.just_enough.victim import NUM_PARAMS, Knowledge, Victim
from lagom_overlap.tune.just_enough.wire import Prior

SPOT_SD = 0.01
"""How far one collective at one place may be from all else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """How far the curves may be off, as shares.

    `curve_sd` the communication's, smoothly; `collective_sd` one collective against the others at equal bytes;
    `body_sd` the computations' slowdown, smoothly and alike beside all collectives; `step_sd` that beside each by
    itself, in steps of its channels, whole waves that nobody told of.
    """

    curve_sd: float
    collective_sd: float
    body_sd: float
    step_sd: float


MISFITS: Final = {
    Knowledge.GRIDS: Misfit(curve_sd=0.04, collective_sd=0.05, body_sd=0.02, step_sd=0.0),
    Knowledge.NONE: Misfit(curve_sd=0.04, collective_sd=0.05, body_sd=0.02, step_sd=0.04),
    Knowledge.HOST: Misfit(curve_sd=0.08, collective_sd=0.3, body_sd=0.03, step_sd=0.02),
}
"""Gloo's reduce-scatter takes twice as long as its all-gather at equal bytes (recorded)."""
NUM_STEPS = 8
"""Damped Gauss-Newton steps of a fit at most; it starts where the last one ended."""

CALL_WORK = 2000
"""What a call costs beside its own work: its arguments, and the Python around it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """Best parameters (S, P), their covariances (S, P, P) and costs (S,), half a sum of squares, prior included."""

    params: Floats
    covariance: Floats
    cost: Floats

    def log_evidence(self, prior: Prior) -> float:
        """The logarithm of how probable the data are under a prior, but for a constant (Laplace, 1774), at the best."""
        best = int(np.argmin(self.cost))
        _, spread = np.linalg.slogdet(self.covariance[best])
        return float(0.5 * spread - self.cost[best] - np.log(prior.sd).sum())


class GroupModel:
    """One group's sight and victim as the library reads them; `work` counts what was computed, in evaluations."""

    def __init__(self, sight: Sight, victim: Victim) -> None:
        self.sight, self.victim, misfit = sight, victim, MISFITS[victim.knowledge]
        lattices = [surface.lattice for surface in sight.surfaces]
        self.most_places = max(map(len, lattices))
        self._lattices = (LatticeStruct * len(lattices))(
            *(
                LatticeStruct(
                    len(surface.lattice),
                    address(surface.lattice.channels),
                    address(surface.lattice.chunk_bytes),
                    address(surface.lattice.kind),
                    address(surface.near),
                    address(surface.steps),
                )
                for surface in sight.surfaces
            )
        )
        self.struct = GroupStruct(
            num_comms=len(sight.lattices),
            num_lattices=len(lattices),
            most_places=self.most_places,
            num_kernels=victim.fluid.shape[-1],
            most_channels=victim.fluid.shape[-2] - 1,
            knows_grid=victim.knows_grid,
            num_kinds=len(lattices[0].kinds),
            lattices=addressof(self._lattices),
            lattice_of=address(sight.surface_of),
            wire_bytes=address(sight.wire_bytes),
            fluid=address(victim.fluid),
            whole=address(victim.whole),
            intensity=address(victim.intensity),
            curve_sd=misfit.curve_sd,
            collective_sd=misfit.collective_sd,
            spot_sd=SPOT_SD,
            body_sd=misfit.body_sd,
            step_sd=misfit.step_sd,
        )
        self._work, self._num_calls = c_int64(0), 0

    @property
    def work(self) -> int:
        """Evaluations so far, roughly, and what Python adds in their terms: effort that no clock disturbs."""
        return self._work.value + CALL_WORK * self._num_calls

    def run(self, name: str, *arguments: object) -> None:
        """A function of the library on this group that counts its work."""
        self._num_calls += 1
        call(name, byref(self.struct), *arguments, byref(self._work))


class Evidence:
    """A record with the noise of one measurement, prepared: what the same data give every fit and forecast."""

    def __init__(self, model: GroupModel, record: Record, sigma: float) -> None:
        self.model, self.record, self.sigma = model, record, sigma
        num_runs, num_comms = record.places.shape
        rooms = [min(len(surface.lattice), num_runs * num_comms) for surface in model.sight.surfaces]
        self._numbers = np.empty(len(rooms) + sum(rooms) + num_runs * num_comms, dtype=np.int64)
        self._reals = np.empty(sum(rooms) + sum(room * room for room in rooms))
        seen, precision = address(self._numbers) + 8 * len(rooms), address(self._reals)
        self.struct = RecordStruct(
            num_runs=num_runs,
            places=address(record.places),
            comm_s=address(record.comm_s),
            comp_s=address(record.comp_s),
            num=address(record.num),
            sigma=sigma,
            num_seen=address(self._numbers),
            seen=seen,
            index=seen + 8 * sum(rooms),
            precision=precision,
            factor=precision + 8 * sum(rooms),
        )
        model.run("ls_prepare", byref(self.struct))

    def fit_wire(self, prior: Prior, start: Floats) -> Fit:
        """The wire's constants, from all collectives' times."""
        params, covariance, cost = start.copy(), np.empty((len(start), len(start))), np.empty(1)
        self.model.run(
            "ls_fit_wire",
            *(byref(self.struct), address(prior.mean), address(prior.sd), NUM_STEPS),
            *map(address, (params, covariance, cost)),
        )
        return Fit(params=params[None], covariance=covariance[None], cost=cost)

    def fit_body(self, wires: "Wires", sms: Ints, prior: Prior, start: Floats) -> Fit:
        """The computations' constants for S SM counts, from starts (S, P), beside what the wires are like."""
        params, cost = start.copy(), np.empty(len(sms))
        covariance = np.empty((len(sms), NUM_PARAMS, NUM_PARAMS))
        self.model.run(
            "ls_fit_body",
            *(byref(self.struct), byref(wires.struct), address(sms), len(sms)),
            *(address(prior.mean), address(prior.sd), NUM_STEPS),
            *map(address, (params, covariance, cost)),
        )
        return Fit(params=params, covariance=covariance, cost=cost)


class Wires:
    """Every collective at every place: the curve, the smooth rest of all, its own factor, what one spot showed.

    `comm_s` is (N, most places), `use` and `pace` the shares of the largest rate of bytes
    and of chunks by surface (surfaces, most places).
    """

    def __init__(self, evidence: Evidence, wire: Floats) -> None:
        model = evidence.model
        self.comm_s = np.empty((len(model.sight.lattices), model.most_places))
        self.use = np.empty((len(model.sight.surfaces), model.most_places))
        self.pace = np.empty_like(self.use)
        self.struct = ForecastStruct(use=address(self.use), pace=address(self.pace), comm_s=address(self.comm_s))
        model.run("ls_wires", byref(evidence.struct), address(wire), byref(self.struct))
