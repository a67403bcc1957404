"""Contention between one kernel and the collectives beside it: Eqs 1-6 of the Lagom paper, repaired.

Source: Lagom (arXiv 2602.20656v1), section 3.1 (Eqs 1-3) and 3.2 (Eqs 4-6). Eq. 7 is the tuner's.

    paper      here                   unit     meaning
    y_i        (result of Eq. 4)      s        time of kernel i
    x_j        comm_s                 s        time of collective j
    g_ij       waves                  -        waves of kernel i while j runs
    f_ij       (result of Eq. 6)      s        time of one such wave
    theta_i    wave_s                 s        time of one wave without memory traffic
    mu_i       num_blocks             -        grid of kernel i
    TB_i       blocks_per_sm          -        blocks of kernel i resident on one SM
    D_i        block_bytes            B        memory traffic of one block
    lambda     num_sms                -        SMs of the GPU
    NC_j       num_channels           -        channels (= blocks = SMs) of collective j
    B          hbm_bytes_per_s        B/s      memory bandwidth that a copy achieves (not the datasheet's)
    V          traffic_bytes_per_s    B/s      memory bandwidth that communication takes

Departures from the paper:
- Eq. 1 holds for two streams that start together and never wait for each other; `sim` returns the end of the event
  graph, of which max(X, Y) is a lower bound.
- Eqs 2 and 3 are the two arguments of that maximum; that the minimum of a sum is the sum of minima (Eq. 2) holds only
  where the x_j do not depend on each other.
- Eq. 4 as printed counts the whole kernel once per collective. Here it is time-weighted: under collective j the kernel
  advances at rate 1 / (g_ij f_ij), and y_i is the time at which the integral of the rate is 1; j = 0 means none.
- Eq. 5: Table 1 calls TB_i "the computation's threadblocks"; the grid is mu_i, TB_i what is resident on one SM. Small
  blocks that fit beside a communication block keep a share of its SM. The ceiling can be turned off (fluid).
- Eq. 6 as printed charges the last, partial wave for a full one; here the kernel moves mu_i D_i bytes in all. Its sum
  of computation and transfer is the norm p = 1 of a family (p = infinity: perfectly hidden). One theta for all j.
- V is not an input: it follows from the collective's rate, the touches per byte and the L2 (`traffic_bytes_per_s`).
"""

from collections.abc import Iterable, Sequence
from math import ceil, inf
from typing import Final

_ROUNDING: Final = 1e-9
"""Waves that exceed a whole number by less than this are that number: quotients of integers carry rounding."""


def eq1_makespan(comp_end_s: float, comm_end_s: float) -> float:
    """Z = max(Y, X) (Eq. 1): the end of the later of two streams that started together."""
    return max(comp_end_s, comm_end_s)


def eq2_communication_time(comm_s: Iterable[float]) -> float:
    """X = sum_j x_j (Eq. 2): the makespan where communication is the bottleneck."""
    return sum(comm_s)


def eq3_computation_time(comp_s: Iterable[float]) -> float:
    """Y = sum_i y_i (Eq. 3): the makespan where computation is the bottleneck."""
    return sum(comp_s)


def eq4_kernel_time(phases: Sequence[tuple[float, float]], alone_s: float) -> float:
    """y_i = sum_j Dt_ij with sum_j Dt_ij / (g_ij f_ij) = 1 (Eq. 4, time-weighted): the kernel's time.

    `phases` lists what runs beside the kernel in order: how long (s) and g_ij f_ij (s), the kernel's whole time under
    it; afterwards it runs alone, in `alone_s` = g_i0 f_i0.
    """
    left, elapsed_s = 1.0, 0.0
    for length_s, whole_s in phases:
        if left * whole_s <= length_s:
            return elapsed_s + left * whole_s
        left -= length_s / whole_s
        elapsed_s += length_s
    return elapsed_s + left * alone_s


def eq5_waves(
    num_blocks: float,
    blocks_per_sm: float,
    *,
    num_sms: int,
    num_channels: int = 0,
    shared_blocks_per_sm: float = 0.0,
    quantisation: float = 1.0,
) -> float:
    """Waves g = ceil(mu / ((lambda - NC) TB + NC TB')) (Eq. 5), at least 1, of a kernel on the SMs left.

    `shared_blocks_per_sm` is TB', the kernel's blocks that fit on an SM beside a communication block. `quantisation`
    blends the fluid quotient (0) and the ceiling (1).
    """
    capacity = (num_sms - num_channels) * blocks_per_sm + num_channels * shared_blocks_per_sm
    fluid = num_blocks / capacity
    return max(1.0, fluid + quantisation * (ceil(fluid - _ROUNDING) - fluid))


def eq6_wave_time(
    wave_s: float, waves: float, *, num_blocks: float, block_bytes: float, free_bytes_per_s: float, norm: float = 1.0
) -> float:
    """Seconds of one wave, f = (theta^p + tau^p)^(1/p) with tau = mu D / (B - V) / g (Eq. 6).

    `free_bytes_per_s` is B - V, `norm` is p; p = 1 is the paper's sum.
    """
    transfer_s = num_blocks * block_bytes / free_bytes_per_s / waves
    if norm == 1.0:
        return wave_s + transfer_s
    if norm == inf:
        return max(wave_s, transfer_s)
    longer = max(wave_s, transfer_s)
    return float(longer * ((wave_s / longer) ** norm + (transfer_s / longer) ** norm) ** (1.0 / norm))


def l2_miss_share(fifo_bytes: float, l2_bytes: float, l2_share: float) -> float:
    """m(F) = F / (F + phi L2): the share of the communication's FIFO traffic that reaches the device memory."""
    return fifo_bytes / (fifo_bytes + l2_share * l2_bytes)


def traffic_bytes_per_s(
    wire_bytes_per_s: float, touches: float, *, amplification: float, ceiling_bytes_per_s: float
) -> float:
    """V = min(vcap B, kappa R (k_u + k_f m(F))), the V of Eq. 6: memory bandwidth that communication takes, in B/s.

    `touches` is k_u + k_f m(F), memory bytes per byte on the wire; `ceiling_bytes_per_s` is vcap B.
    """
    return min(ceiling_bytes_per_s, amplification * wire_bytes_per_s * touches)
