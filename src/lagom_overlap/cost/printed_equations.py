"""Eqs 4 to 6 of the Lagom paper (arXiv 2602.20656v1, section 3.2) as printed, for comparison with the repaired form.

    y_i  = sum over the overlapped collectives j of f_ij g_ij                       (4)
    g_ij = ceil(mu_i / ((lambda - NC_j) TB_i))                                      (5)
    f_ij = theta_ij + (lambda - NC_j) TB_i D_i / (B - V(NC_j, C_j))                 (6)

Symbols and the repair are in `contention.py`. As printed a kernel that two collectives overlap, one after the other,
takes twice its time (4), a collective slows the whole kernel however short it is (4), and the last, partial wave moves
the bytes of a full one (6). The paper gives no theta, D or V: they are the repaired model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from lagom_overlap.workload import Kernel


@dataclass(frozen=True, slots=True)
class Overlapping:
    """What Eqs 4 to 6 know of a collective: NC_j and V (B/s)."""

    num_channels: int
    traffic_bytes_per_s: float


def printed_waves(kernel: Kernel, num_sms: int, num_channels: int) -> int:
    """g_ij of Eq. 5.

    Raises:
        ValueError: if the channels leave no SM: Eq. 5 divides by nothing or less.
    """
    if num_channels >= num_sms:
        raise ValueError(f"{num_channels} channels on {num_sms} SMs: Eq. 5 divides by {num_sms - num_channels}")
    return ceil(kernel.num_blocks / ((num_sms - num_channels) * kernel.blocks_per_sm))


def printed_wave_s(kernel: Kernel, num_sms: int, bytes_per_s: float, comm: Overlapping) -> float:
    """f_ij of Eq. 6 (s)."""
    blocks = (num_sms - comm.num_channels) * kernel.blocks_per_sm
    return kernel.wave_s + blocks * kernel.block_bytes / (bytes_per_s - comm.traffic_bytes_per_s)


def printed_kernel_s(kernel: Kernel, num_sms: int, bytes_per_s: float, comms: Sequence[Overlapping]) -> float:
    """y_i of Eq. 4 (s); with nothing overlapped the sum has no term, and the kernel takes no time.

    `bytes_per_s` is B.
    """
    return sum(
        printed_waves(kernel, num_sms, comm.num_channels) * printed_wave_s(kernel, num_sms, bytes_per_s, comm)
        for comm in comms
    )
