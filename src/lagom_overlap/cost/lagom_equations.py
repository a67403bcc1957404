"""Contention between one kernel and the concurrent collectives: Eqs 1-6 of the Lagom paper, repaired.

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
  advances at rate 1 / (g_ij f_ij), and y_i is the time at which the integral of the rate is 1; j = 0 means none. `sim`
  plays that out, set after set of what runs together.
- Eq. 5: Table 1 calls TB_i "the computation's threadblocks"; the grid is mu_i, TB_i what is resident on one SM. Small
  blocks that fit next to a communication block keep a share of its SM. The ceiling can be turned off (fluid).
- Eq. 6 as printed charges the last, partial wave for a full one; here the kernel moves mu_i D_i bytes in all, wave by
  wave. Its sum of computation and transfer is the norm p = 1 of a family (p = infinity: perfectly hidden). One theta
  for all j.
- GPUs of several dies (XCDs) deal the blocks of a kernel, and the channels of a collective, to the dies in turn, and a
  die keeps what it was dealt: the fullest die decides. The same rule makes a persistent grid that meets too many
  channels take a second pass. Tiles that resident blocks fetch as they go are not dealt; there the grid is a limit.
- V is not an input: it follows from the collective's rate, the touches per byte and the L2 (`traffic_bytes_per_s`).
"""

from dataclasses import dataclass
from math import ceil, floor, inf
from typing import Final

_ROUNDING: Final = 1e-9
"""Waves that exceed a whole number by less than this are that number: quotients of integers carry rounding."""


def eq1_makespan(comp_end_s: float, comm_end_s: float) -> float:
    """Z = max(Y, X) (Eq. 1): the end of the later of two streams that started together."""
    return max(comp_end_s, comm_end_s)


@dataclass(frozen=True, slots=True)
class Waves:
    """How the blocks of a kernel follow each other: whole waves of `capacity` blocks, then `last` blocks (0: none)."""

    num_full: int
    capacity: float
    last: float

    def count(self, quantisation: float = 1.0) -> float:
        """The g of Eq. 5, at least 1; `quantisation` blends the fluid quotient (0) and the ceiling (1)."""
        fluid = self.num_full + self.last / self.capacity
        return max(1.0, fluid + quantisation * (ceil(fluid - _ROUNDING) - fluid))


def eq5_dispatch(
    num_blocks: float,
    blocks_per_sm: float,
    *,
    num_sms: int,
    num_channels: int = 0,
    shared_blocks_per_sm: float = 0.0,
    num_xcds: int = 1,
    channel_xcds: int = 0,
    grid: int | None = None,
    spill: float = 0.0,
) -> Waves:
    """The waves g = ceil(mu / ((lambda - NC) TB + NC TB')) of Eq. 5 on the SMs left, on the fullest of `num_xcds` dies.

    `shared_blocks_per_sm` is TB', the kernel's blocks that fit on an SM next to a communication block. The channels lie
    on `channel_xcds` of the dies (0: on all).

    With a `grid` that many resident blocks fetch the `num_blocks` tiles, wherever they lie. `spill` is the share of
    the blocks after the first wave that miss theirs, since blocks that the hardware dispatches do not march in step.
    """
    dies = num_xcds if grid is None else 1
    sms, channels = num_sms // dies, ceil(num_channels / min(dies, channel_xcds or dies))
    channels = min(channels, sms - 1)
    capacity = (sms - channels) * blocks_per_sm + channels * shared_blocks_per_sm
    if grid is not None:
        capacity = min(capacity, grid)
    blocks = num_blocks if dies == 1 else float(ceil(num_blocks / dies))
    if grid is None:
        blocks += spill * max(0.0, blocks - capacity)  # those of the first wave all start at once
    num_full = floor(blocks / capacity + _ROUNDING)
    return Waves(num_full, dies * capacity, dies * max(0.0, blocks - num_full * capacity))


def eq6_kernel_time(
    wave_s: float, waves: Waves, *, block_bytes: float, free_bytes_per_s: float, norm: float, quantisation: float
) -> float:
    """Seconds of a whole kernel: Eq. 6 for each of its waves, which moves the bytes of the blocks that it has."""

    def wave(num_blocks: float) -> float:
        return eq6_wave_time(
            wave_s, 1.0, num_blocks=num_blocks, block_bytes=block_bytes, free_bytes_per_s=free_bytes_per_s, norm=norm
        )

    if not waves.num_full:
        return wave(waves.last)
    full_s = wave(waves.capacity)
    if not waves.last:
        return waves.num_full * full_s
    fluid_s = waves.last / waves.capacity * full_s
    return waves.num_full * full_s + quantisation * wave(waves.last) + (1.0 - quantisation) * fluid_s


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
