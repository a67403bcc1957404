"""Persistent kernels: as many blocks as SMs, each of which works through its share of the tiles (cuBLAS on Hopper).

A plain kernel loses SMs in proportion: its blocks go wherever there is room. A persistent one counts on every SM: a
block whose SM a collective holds starts only when that SM is free again, or after another block has ended, so that one
channel can cost a whole second pass (pytorch/pytorch#143988 measured "2x as long"). The remedy is a carve-out: launch
fewer blocks and leave the rest of the SMs to communication (cuBLAS's SM_COUNT_TARGET, PyTorch's
`torch._C._set_sm_carveout_experimental`). Then nothing is displaced while NC does not exceed the carve-out, at the
price of SMs / (SMs - carve-out) when no communication runs.

Departure: tiles are shared out once, before the start, in whole rounds; kernels that fetch tiles as they go (stream-K,
Blackwell's cluster launch control) lie between this and a plain kernel.
"""

from math import ceil

from lagom_overlap.workload import Kernel


def as_persistent(kernel: Kernel, num_sms: int, carve_out_sms: int = 0) -> Kernel:
    """The same work as one block per SM on all but `carve_out_sms` of the SMs.

    Raises:
        ValueError: if the carve-out leaves no SM.
    """
    num_blocks = num_sms - carve_out_sms
    if not 0 <= carve_out_sms < num_sms:
        raise ValueError(f"carve_out_sms is {carve_out_sms}, must lie in 0..{num_sms - 1}")
    rounds = ceil(kernel.num_blocks / (num_blocks * kernel.blocks_per_sm))
    return Kernel(
        num_blocks=num_blocks,
        blocks_per_sm=1,
        wave_s=kernel.wave_s * rounds,
        block_bytes=kernel.num_blocks * kernel.block_bytes / num_blocks,
    )
