"""How long the computations take beside collectives: lost SMs in whole waves, memory bandwidth, cache.

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

Here are the constants and what is believed of them; times are computed in csrc/lagom_search_body.c.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import log
from typing import Final

import numpy as np

from lagom_overlap.tune.just_enough.lattice import Floats
from lagom_overlap.tune.just_enough.wire import Prior
from lagom_overlap.units import MIB
from lagom_overlap.workload import Kernel, OverlapGroup

SM_COUNTS: Final = (56, 68, 72, 78, 80, 84, 108, 114, 128, 132, 142, 148, 160)
"""SMs of GPUs that run collectives, P100 to B200; the group does not say which it is."""
UNKNOWN_SMS: Final = 108
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
    """What is known of the computations before any measurement."""

    GRIDS = "grids"
    """Their kernels' grids."""
    NONE = "none"
    """Nothing; on a GPU their waves are hidden steps."""
    HOST = "host"
    """They run on processor cores beside threads that make the collectives: no waves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Victim:
    """What is known of a group's computations: solo times and waves by (SM count, channels, kernel)."""

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


def victim_of(group: OverlapGroup, most_channels: int, default_comp_s: float, *, by_host: bool) -> Victim:
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
        return Victim(
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
    return Victim(
        sm_counts=counts,
        fluid=np.ascontiguousarray(fluid * wave_s),
        whole=np.ascontiguousarray(whole * wave_s),
        intensity=intensity,
        knowledge=Knowledge.GRIDS,
        prior=Prior(mean, sd),
    )
