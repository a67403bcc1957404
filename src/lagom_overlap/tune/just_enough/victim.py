"""How long the computations take beside collectives: lost SMs in whole waves, memory bandwidth, cache.

Form (spec, contention model, section 1; Lagom Eqs 4 to 6), kernel i under a collective with NC channels, C bytes of
chunk and u = R / (largest R):

    T_i = scale theta_i waves_i(NC) (1 + a q_i h(u) + g F / (F + F0)),   h(u) = u / (2 - u),   F = NC C

`waves` lies between the fluid and the whole count, q is the kernel's memory intensity over the mean. Eq. 6's
B / (B - V) gives h, with V = B / 2 at full speed. Where the kernels' grids are unknown the computations are one body
whose time grows with NC / (lambda - NC) to a fitted extent.

Progress (Eq. 4 as repaired): collective j lasts x_j and during it computation advances at the rate of T under j.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Final

import numpy as np

from lagom_overlap.tune.just_enough.lattice import Floats, Ints
from lagom_overlap.tune.just_enough.wire import Prior
from lagom_overlap.units import MIB
from lagom_overlap.workload import Kernel, OverlapGroup

SM_COUNTS: Final = (56, 68, 72, 78, 80, 84, 108, 114, 128, 132, 142, 148, 160)
"""SMs of GPUs that run collectives, P100 to B200; the group does not say which it is."""
UNKNOWN_SMS: Final = 108
NUM_PARAMS: Final = 5
"""ln scale, share of whole waves (or ln extent of SM loss), ln a, ln g, ln F0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Victim:
    """What is known of a group's computations: solo times and waves by (SM count, channels, kernel)."""

    sm_counts: tuple[int, ...]
    fluid: Floats
    whole: Floats
    intensity: Floats
    knows_grid: bool
    prior: Prior


def victim_of(group: OverlapGroup, most_channels: int, default_comp_s: float) -> Victim:
    """The body of a group; `most_channels` bounds the table."""
    kernels = [op.work for op in group.computations if isinstance(op.work, Kernel)]
    sd = np.array([0.05, 0.2, 0.6, 0.6, 0.5])
    mean = np.array([0.0, 0.9, log(0.3), log(0.2), log(6 * MIB)])
    channels = np.arange(most_channels + 1)
    if len(kernels) < len(group.computations):
        num_sms = max(UNKNOWN_SMS, most_channels + 1)
        share = channels / (num_sms - channels)
        sd[:2], mean[:2] = (0.15, 0.5), (log(0.85 * max(default_comp_s, 1e-12)), log(0.7))
        table = share[None, :, None]
        prior = Prior(mean, sd)
        return Victim(
            sm_counts=(num_sms,), fluid=table, whole=table, intensity=np.ones(1), knows_grid=False, prior=prior
        )
    counts = tuple(count for count in SM_COUNTS if count > most_channels) or (most_channels + 1,)
    blocks = np.array([kernel.num_blocks / kernel.blocks_per_sm for kernel in kernels])
    wave_s = np.array([kernel.wave_s for kernel in kernels])
    free = np.array(counts)[:, None, None] - channels[None, :, None]
    fluid, whole = np.maximum(blocks / free, 1.0), np.ceil(blocks / free - 1e-9)
    per_s = np.array([kernel.block_bytes / kernel.wave_s for kernel in kernels])
    mean_per_s = float((per_s * wave_s * whole[0, 0]).sum() / (wave_s * whole[0, 0]).sum())
    intensity = per_s / mean_per_s if mean_per_s > 0 else np.ones(len(kernels))
    return Victim(
        sm_counts=counts,
        fluid=fluid * wave_s,
        whole=whole * wave_s,
        intensity=intensity,
        knows_grid=True,
        prior=Prior(mean, sd),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Beside:
    """The computations under constants `params` (..., P), with indices of SM counts `sms` (...)."""

    victim: Victim
    sms: Ints
    params: Floats

    def kernel_times(self, channels: Floats, chunk_bytes: Floats, use: Floats) -> Floats:
        """T beside collectives that broadcast against (...); a kernel axis is added at the end."""
        scale, share, pressure, pollution, half = (self.params[..., i] for i in range(NUM_PARAMS))
        index, flight = channels.astype(np.intp), channels * chunk_bytes
        polluted = np.exp(pollution) * flight / (flight + np.exp(half))
        pressed = (np.exp(pressure) * use / (2 - use))[..., None] * self.victim.intensity
        return self._solo(scale, share, index) * (1 + pressed + polluted[..., None])

    def alone_times(self) -> Floats:
        """T beside nothing, at (..., K)."""
        scale, share = self.params[..., 0], self.params[..., 1]
        return self._solo(scale, share, np.zeros(np.shape(scale), dtype=np.intp))

    def _solo(self, scale: Floats, share: Floats, channels: Ints) -> Floats:
        fluid, whole = self.victim.fluid[self.sms, channels], self.victim.whole[self.sms, channels]
        if self.victim.knows_grid:
            mix = np.clip(share, 0.0, 1.0)[..., None]
            waves = fluid * (1 - mix) + whole * mix
        else:
            waves = 1 + np.exp(share)[..., None] * fluid
        return np.asarray(np.exp(scale)[..., None] * waves)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pace:
    """The computations in solo time: shares of the work by kernel (K,), where each begins and ends."""

    alone: Floats
    work: Floats
    begins: Floats
    ends: Floats

    @classmethod
    def of(cls, alone: Floats) -> "Pace":
        """From solo times (..., K)."""
        work = alone / alone.sum(axis=-1, keepdims=True)
        ends = np.cumsum(work, axis=-1)
        return cls(alone=alone, work=work, begins=ends - work, ends=ends)

    def beside(self, done: Floats, under: Floats, comm_s: Floats) -> tuple[Floats, Floats]:
        """The share of the work done after a collective, and the time computed beside it.

        Kernels take `under` (..., K) beside the collective, which lasts `comm_s` (...), from a share `done` (...).
        """
        slope = under / self.work
        spent = (np.clip(done[..., None] - self.begins, 0.0, self.work) * slope).sum(axis=-1)
        upto = np.cumsum(under, axis=-1)
        left = np.maximum(upto[..., -1] - spent, 0.0)
        inside = comm_s < left
        took = np.where(inside, comm_s, left)
        gone = np.clip((spent + took)[..., None] - (upto - under), 0.0, under)
        return np.where(inside, (gone / slope).sum(axis=-1), 1.0), took

    def rest_s(self, done: Floats) -> Floats:
        """The time of the work that no collective runs beside."""
        left = np.clip(self.ends - np.maximum(self.begins, done[..., None]), 0.0, None)
        return np.asarray((left / self.work * self.alone).sum(axis=-1))


def finish_times(pace: Pace, under: Sequence[Floats], comm_s: Sequence[Floats]) -> Floats:
    """Y: kernels take `under[j]` (..., K) beside collective j, which lasts `comm_s[j]` (...)."""
    done, finish = np.zeros(comm_s[0].shape), np.zeros(comm_s[0].shape)
    for each, times in zip(under, comm_s, strict=True):
        done, took = pace.beside(done, each, times)
        finish = finish + took
    return np.asarray(finish + pace.rest_s(done))
