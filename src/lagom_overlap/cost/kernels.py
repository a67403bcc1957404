"""From what is computed to a kernel in the terms of Eqs 5 and 6: grid, resident blocks, wave time, bytes per block.

A matrix product takes the fastest of the tiles `TILES` x split-K 1-4:

    mu = ceil(m/a) ceil(n/b) split,   t = t0 + ceil(mu / lambda) 2 a b k / split / (rate per SM) + (split > 1) t_split

with one resident block per SM. Its memory traffic counts the reloads of each wave's super-tile, 2 sqrt(lambda a b) k
elements, at least every operand once. Attention is a grid of 128 query rows per block and head at a fixed share of the
GPU's rate; a memory-bound operator is a grid of many small blocks. theta is what remains of the time t alone after the
transfer, so that Eqs 5 and 6 without communication give t back.

Mean error against microsoft/vidur @513ddc1, m >= 1024, with our presets: A40 4.6 % on Phi-2 (whose shapes the rates
were fitted on) and 6.7 % on Llama-2-7B with all its tensor-parallel widths, A100 9.5 and 7.7 %, H100 7.1 % (Phi-2).

Known limits: the fastest of all tiles is more even than what cuBLAS does. Measured times show whole waves of 128x256
tiles (Vidur, A40, 2560 x 2560: one time for every m in 3232..4096) where this model finds a smaller tile. Forcing large
tiles would show them, but doubles the mean error on the same measurements (4.6 -> 8.7 %, m >= 1024). A caller who knows
the grid gives a `Kernel`. Split-K's workspace traffic is not counted; rates scale with 2 / element_bytes from bf16.
"""

from math import ceil, inf
from typing import Final

from lagom_overlap.cost.contention import eq5_waves
from lagom_overlap.cost.profile import TILES, Profile
from lagom_overlap.hardware import Gpu
from lagom_overlap.workload import Attention, Gemm, Kernel, MemoryBound, Work

MAX_SPLIT: Final = 4
QUERY_ROWS: Final = 128
"""Query rows of one attention block."""
SMALL_BLOCKS: Final = 16
"""Resident blocks per SM of an elementwise kernel..."""
SMALL_WAVES: Final = 8
"""...and its waves: enough that quantisation does not matter."""
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


def gemm_kernel(gemm: Gemm, gpu: Gpu, profile: Profile) -> Kernel:
    """The kernel of a matrix product under its fastest tile and split; ties go to the first in `TILES`."""
    rate = gpu.gemm_flops / gpu.num_sms * 2 / gemm.element_bytes
    best: tuple[float, int, int, int] | None = None
    for (rows, columns), efficiency in zip(TILES, profile.for_gpu(gpu.name).tile_efficiency, strict=True):
        tiles = ceil(gemm.m / rows) * ceil(gemm.n / columns)
        for split in range(1, MAX_SPLIT + 1):
            waves = ceil(tiles * split / gpu.num_sms)
            tile_s = 2.0 * rows * columns * gemm.k / split / (rate * efficiency)
            alone_s = profile.launch_s + waves * tile_s + (profile.split_s if split > 1 else 0.0)
            if best is None or alone_s < best[0]:
                best = (alone_s, tiles * split, rows, columns)
    assert best is not None
    alone_s, num_blocks, rows, columns = best
    compulsory = gemm.m * gemm.k + gemm.n * gemm.k + gemm.m * gemm.n
    fluid_waves = ceil(gemm.m / rows) * ceil(gemm.n / columns) / gpu.num_sms
    reloaded = fluid_waves * 2 * (gpu.num_sms * rows * columns) ** 0.5 * gemm.k
    elements = max(compulsory, reloaded + gemm.m * gemm.n)
    return kernel_of_time(
        gpu, profile, alone_s=alone_s, num_blocks=num_blocks, blocks_per_sm=1, total_bytes=elements * gemm.element_bytes
    )


def attention_kernel(attention: Attention, gpu: Gpu, profile: Profile) -> Kernel:
    """The kernel of a flash attention: queries, keys, values and output move once per pass."""
    heads = attention.batch * attention.num_heads
    num_blocks = heads * ceil(attention.seq_len / QUERY_ROWS)
    rate = gpu.gemm_flops * profile.attention_efficiency * 2 / attention.element_bytes
    idle = max(1.0, gpu.num_sms / num_blocks)
    alone_s = profile.launch_s + attention.flops / rate * idle
    tensor_bytes = heads * attention.seq_len * attention.head_dim * attention.element_bytes
    return kernel_of_time(
        gpu,
        profile,
        alone_s=alone_s,
        num_blocks=num_blocks,
        blocks_per_sm=1,
        total_bytes=4 * tensor_bytes * attention.passes,
    )


def memory_kernel(work: MemoryBound, gpu: Gpu, profile: Profile) -> Kernel:
    """The kernel of an elementwise operator: many small blocks, as fast as the memory."""
    num_blocks = gpu.num_sms * SMALL_BLOCKS * SMALL_WAVES
    alone_s = profile.launch_s + work.num_bytes / gpu.hbm_bytes_per_s
    return kernel_of_time(
        gpu,
        profile,
        alone_s=alone_s,
        num_blocks=num_blocks,
        blocks_per_sm=SMALL_BLOCKS,
        total_bytes=float(work.num_bytes),
    )


def kernel_of(work: Work, gpu: Gpu, profile: Profile) -> Kernel:
    """The kernel of any work; a `Kernel` passes through."""
    match work:
        case Kernel():
            return work
        case Gemm():
            return gemm_kernel(work, gpu, profile)
        case Attention():
            return attention_kernel(work, gpu, profile)
        case MemoryBound():
            return memory_kernel(work, gpu, profile)
