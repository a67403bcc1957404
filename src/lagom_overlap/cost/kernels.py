"""A kernel in the terms of Eqs 5 and 6 from its time alone, its grid and its memory traffic.

theta is what remains of the time alone after the transfer, so that Eqs 5 and 6 without communication give the time
back. How long an operator takes alone, and on which grid, is said in `operators`.
"""

from math import inf
from typing import Final

from lagom_overlap.cost.contention import eq5_waves
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Gpu
from lagom_overlap.workload import Kernel

_LEAST_COMPUTE: Final = 0.02
"""Share of a kernel's time alone that is computation at least: no kernel is pure transfer."""


def kernel_of_time(
    gpu: Gpu, profile: Profile, *, alone_s: float, num_blocks: int, blocks_per_sm: int, total_bytes: float
) -> Kernel:
    """The kernel that the model runs alone in `alone_s`, or slower where its memory traffic needs longer."""
    waves = eq5_waves(num_blocks, blocks_per_sm, num_sms=gpu.num_sms, quantisation=profile.quantisation)
    transfer_s = total_bytes / gpu.hbm_bytes_per_s
    norm = profile.overlap_norm
    if transfer_s >= alone_s:
        compute_s = 0.0
    elif norm == inf:
        compute_s = alone_s
    else:
        compute_s = alone_s * (1.0 - (transfer_s / alone_s) ** norm) ** (1.0 / norm)
    compute_s = max(compute_s, _LEAST_COMPUTE * max(alone_s, transfer_s))
    return Kernel(
        num_blocks=num_blocks,
        blocks_per_sm=blocks_per_sm,
        wave_s=compute_s / waves,
        block_bytes=total_bytes / num_blocks,
    )
