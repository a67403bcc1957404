"""A group's model where it is computed: its curves, fits and surrogates in C, behind numpy arrays.

What both curves below miss is left to Gaussian processes over the lattice (`Evidence`, `Surrogate`).

Wire, how long a collective takes at a configuration: a smooth curve with few constants, fitted to all of them at once.

Form (spec, contention model, section 1, with its sharpness m left free), W wire bytes, NC channels, C bytes of chunk:

    x = L + (W + fill min(W, NC C)) / R
    s = NC / r (C / (C + C0))^q        channels over those that would fill the link; the cost per chunk
    R = B s / (1 + s^m)^(1/m) exp(-p NC)

The constants and their priors are here; the curve itself is `predict_wire` in csrc/lagom_search_wire.c.

Computation, how long kernels take next to collectives: lost SMs in whole waves, memory bandwidth, cache.

Form (spec, contention model, section 1; Lagom Eqs 4 to 6), kernel i under a collective with NC channels, C bytes of
chunk and u = R / (largest R):

    T_i = scale theta_i waves_i(NC) (1 + a q_i h(u) + g F / (F + F0) + k v),   h(u) = u / (2 - u),   F = NC C

`waves` lies between the fluid and the whole count, q is the kernel's memory intensity over the mean. Eq. 6's
B / (B - V) gives h, with V = B / 2 at full speed. v = (R / C) / (largest R / C) is the pace of chunks: whoever makes
them pays for each (a slice costs gloo's threads milliseconds of the cores that compute), so that k v is the cost per
chunk times chunks per second, and a larger chunk is gentler. On a GPU k stays near zero: F and v pull opposite ways.

Where the kernels' grids are unknown the computations are one body whose time grows with NC / (lambda - NC) to a fitted
extent, and what whole waves add is left to the residual (`Misfit.step_sd`).

Progress (Eq. 4 as repaired): collective j lasts x_j and during it computation advances at the rate of T under j.

The constants and their priors are here; times are computed in csrc/lagom_search_body.c.
"""

from collections.abc import Mapping
from ctypes import addressof, byref
from dataclasses import dataclass
from enum import StrEnum
from math import log, sqrt
from typing import Final

import numpy as np

from lagom_overlap.collective import Protocol, Transport
from lagom_overlap.tuners.machine.library import (
    GroupStruct,
    LatticeStruct,
    RecordStruct,
    SurrogateStruct,
    address,
    call,
)
from lagom_overlap.tuners.machine.search_space import Floats, Implementation, Ints, Lattice, Record, SearchSpace
from lagom_overlap.tuners.waiting import SM_COUNTS
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import Kernel, OverlapGroup

UNKNOWN_SMS: Final = 108
"""SMs where the space does not say the GPU: an A100's."""


NUM_PARAMS: Final = 6
"""ln scale, share of whole waves (or ln extent of SM loss), ln a, ln g, ln F0, k."""


TOLL_SD: Final = 0.02
"""Of k on a GPU, about 0: a channel's own SM makes its chunks."""


HOST_TOLL: Final = (0.4, 0.3)
"""Mean and spread of k where processor threads make them; fits to whole recorded surfaces: 0.4 to 1.3 on gloo, 0 on
worker threads."""


HOST_LN_POLLUTION: Final = (log(0.1), 0.8)
"""Of ln g there."""


class Knowledge(StrEnum):
    """What is known about the computations before any measurement."""

    GRIDS = "grids"
    """Their kernels' grids."""
    NONE = "none"
    """Nothing; on a GPU their waves are hidden steps."""
    HOST = "host"
    """They run on processor cores shared with threads that make the collectives: no waves."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Independent normal distributions."""

    mean: Floats
    sd: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputeModel:
    """What is known about a group's computations: solo times and waves by (SM count, channels, kernel)."""

    sm_counts: tuple[int, ...]
    fluid: Floats
    whole: Floats
    intensity: Floats
    knowledge: Knowledge
    prior: Prior

    @property
    def knows_grid(self) -> bool:
        """Whether the tables are of the kernels' own waves."""
        return self.knowledge is Knowledge.GRIDS


def compute_model_of(group: OverlapGroup, most_channels: int, default_comp_s: float, *, by_host: bool) -> ComputeModel:
    """The body of a group; `most_channels` bounds the table, `by_host`: processor threads make the collectives."""
    kernels = [op.work for op in group.computations if isinstance(op.work, Kernel)]
    sd = np.array([0.05, 0.2, 0.6, 0.6, 0.5, TOLL_SD])
    mean = np.array([0.0, 0.9, log(0.3), log(0.2), log(6 * MIB), 0.0])
    if by_host:
        (mean[3], sd[3]), (mean[5], sd[5]) = HOST_LN_POLLUTION, HOST_TOLL
    channels = np.arange(most_channels + 1)
    if len(kernels) < len(group.computations):
        num_sms = max(UNKNOWN_SMS, most_channels + 1)
        share = channels / (num_sms - channels)
        sd[:2], mean[:2] = (0.15, 0.5), (log(0.85 * max(default_comp_s, 1e-12)), log(0.7))
        table = np.ascontiguousarray(share[None, :, None])
        prior = Prior(mean, sd)
        return ComputeModel(
            sm_counts=(num_sms,),
            fluid=table,
            whole=table,
            intensity=np.ones(1),
            knowledge=Knowledge.HOST if by_host else Knowledge.NONE,
            prior=prior,
        )
    counts = tuple(count for count in SM_COUNTS if count > most_channels) or (most_channels + 1,)
    blocks = np.array([kernel.num_blocks / kernel.blocks_per_sm for kernel in kernels])
    wave_s = np.array([kernel.wave_s for kernel in kernels])
    free = np.array(counts)[:, None, None] - channels[None, :, None]
    fluid, whole = np.maximum(blocks / free, 1.0), np.ceil(blocks / free - 1e-9)
    per_s = np.array([kernel.block_bytes / kernel.wave_s for kernel in kernels])
    mean_per_s = float((per_s * wave_s * whole[0, 0]).sum() / (wave_s * whole[0, 0]).sum())
    intensity = per_s / mean_per_s if mean_per_s > 0 else np.ones(len(kernels))
    return ComputeModel(
        sm_counts=counts,
        fluid=np.ascontiguousarray(fluid * wave_s),
        whole=np.ascontiguousarray(whole * wave_s),
        intensity=intensity,
        knowledge=Knowledge.GRIDS,
        prior=Prior(mean, sd),
    )


NUM_SHARED: Final = 8
"""ln B, ln r, ln C0, ln L, ln m, ln q, ln fill, p."""


NUM_OF_KIND: Final = 4
"""Per further implementation: ln of its link's, channel's, C0's and latency's ratio to the first's."""


USUAL_CHUNK: Final = 256 * KIB
"""Where the engine lets nobody choose."""


HALF_CHUNK: Final = 0.86
"""C0 over the middle of the chunks that a space offers, which are what its engine can make use of."""


LN_LINK: Final = {Protocol.LL: log(0.5), Protocol.LL128: log(0.93)}
"""Share of the link that a protocol's flags leave to data (spec, contention model, section 1)."""


LN_HALF_CHUNK: Final = {Protocol.LL: log(0.25), Protocol.LL128: log(0.25)}
"""LL and LL128 carry flags with the data: no synchronisation per slice, so small chunks cost less (a guess)."""


LN_COPY_CHANNEL: Final = log(16.0)
"""Copy engines are one place with one channel, which nearly fills the link."""


KIND_SD: Final = [0.12, 0.4, 0.7, 0.5]


def _kind_prior(kind: Implementation, first: Implementation) -> list[float]:
    """What a change of implementation does before anything is measured: the protocol counts, and a lack of channels."""
    (_, new, way), (_, old, first_way) = kind, first

    def change(table: Mapping[Protocol, float]) -> float:
        return (table.get(new, 0.0) if new else 0.0) - (table.get(old, 0.0) if old else 0.0)

    copies = (way is Transport.COPY_ENGINE) - (first_way is Transport.COPY_ENGINE)
    return [change(LN_LINK), 0.5 * change(LN_LINK) + copies * LN_COPY_CHANNEL, change(LN_HALF_CHUNK), 0.0]


def wire_prior(lattice: Lattice, wire_bytes: Floats, default_comm_s: Floats) -> Prior:
    """What is believed before any fit, from the default's own times."""
    least, most = float(lattice.chunk_bytes.min()), float(lattice.chunk_bytes.max())
    middle = sqrt(least * most) if most > 1 else USUAL_CHUNK
    rate = float(wire_bytes.sum() / max(default_comm_s.sum(), 1e-12))
    mean = [log(1.4 * rate), log(5.0), log(HALF_CHUNK * middle), log(0.03 * float(default_comm_s.mean()) + 1e-9)]
    mean += [log(1.4), log(0.75), log(0.1), 0.002]
    sd = [0.4, 0.6, 0.8, 1.0, 0.3, 0.3, 0.5, 0.002]
    for kind in lattice.kinds[1:]:
        mean += _kind_prior(kind, lattice.kinds[0])
        sd += KIND_SD
    return Prior(np.array(mean), np.array(sd))


SPOT_SD = 0.01
"""How far one collective at one place may be from all else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """How far the curves may be off, as shares.

    `curve_sd` the communication's, smoothly; `collective_sd` one collective against the others at equal bytes;
    `body_sd` the computations' slowdown, smoothly and alike during all collectives; `step_sd` that under each by
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFit:
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
    """One group as the library reads it."""

    def __init__(self, search_space: SearchSpace, compute_model: ComputeModel) -> None:
        self.search_space, self.compute_model, misfit = search_space, compute_model, MISFITS[compute_model.knowledge]
        lattices = [surface.lattice for surface in search_space.surfaces]
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
                for surface in search_space.surfaces
            )
        )
        self.struct = GroupStruct(
            num_comms=len(search_space.lattices),
            num_lattices=len(lattices),
            most_places=self.most_places,
            num_kernels=compute_model.fluid.shape[-1],
            most_channels=compute_model.fluid.shape[-2] - 1,
            knows_grid=compute_model.knows_grid,
            num_kinds=len(lattices[0].kinds),
            lattices=addressof(self._lattices),
            lattice_of=address(search_space.surface_of),
            wire_bytes=address(search_space.wire_bytes),
            fluid=address(compute_model.fluid),
            whole=address(compute_model.whole),
            intensity=address(compute_model.intensity),
            curve_sd=misfit.curve_sd,
            collective_sd=misfit.collective_sd,
            spot_sd=SPOT_SD,
            body_sd=misfit.body_sd,
            step_sd=misfit.step_sd,
        )

    def run(self, name: str, *arguments: object) -> None:
        """A function of the library on this group."""
        call(name, byref(self.struct), *arguments)


class Evidence:
    """A record with the noise of one measurement, prepared: what the same data give every fit and surrogate."""

    def __init__(self, model: GroupModel, record: Record, sigma: float) -> None:
        self.model, self.record, self.sigma = model, record, sigma
        num_runs, num_comms = record.places.shape
        rooms = [min(len(surface.lattice), num_runs * num_comms) for surface in model.search_space.surfaces]
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

    def fit_wire(self, prior: Prior, start: Floats) -> ModelFit:
        """The wire's constants, from all collectives' times."""
        params, covariance, cost = start.copy(), np.empty((len(start), len(start))), np.empty(1)
        self.model.run(
            "ls_fit_wire",
            *(byref(self.struct), address(prior.mean), address(prior.sd), NUM_STEPS),
            *map(address, (params, covariance, cost)),
        )
        return ModelFit(params=params[None], covariance=covariance[None], cost=cost)

    def fit_body(self, wires: "Wires", sms: Ints, prior: Prior, start: Floats) -> ModelFit:
        """The computations' constants for S SM counts, from starts (S, P), given what the wires are like."""
        params, cost = start.copy(), np.empty(len(sms))
        covariance = np.empty((len(sms), NUM_PARAMS, NUM_PARAMS))
        self.model.run(
            "ls_fit_body",
            *(byref(self.struct), byref(wires.struct), address(sms), len(sms)),
            *(address(prior.mean), address(prior.sd), NUM_STEPS),
            *map(address, (params, covariance, cost)),
        )
        return ModelFit(params=params, covariance=covariance, cost=cost)


class Wires:
    """Every collective at every place: the curve, the smooth rest of all, its own factor, what one spot showed.

    `comm_s` is (N, most places), `use` and `pace` the shares of the largest rate of bytes
    and of chunks by surface (surfaces, most places).
    """

    def __init__(self, evidence: Evidence, wire: Floats) -> None:
        model = evidence.model
        self.comm_s = np.empty((len(model.search_space.lattices), model.most_places))
        self.use = np.empty((len(model.search_space.surfaces), model.most_places))
        self.pace = np.empty_like(self.use)
        self.struct = SurrogateStruct(use=address(self.use), pace=address(self.pace), comm_s=address(self.comm_s))
        model.run("ls_wires", byref(evidence.struct), address(wire), byref(self.struct))
