"""A kernel in the terms of Eqs 5 and 6 from its time alone, its grid and its memory traffic.

theta is what remains of the time alone after the transfer, so that Eqs 5 and 6 without communication give the time
back. Where the rate of one SM is known (`GpuConstants.sm_flops`), it is the other way round for products: theta follows
from the rate, and what a wave takes beyond it is a limit that the SMs share, in the form of memory traffic.

How long an operator takes alone, and on which grid, is said in `operators`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from lagom_overlap.cost.lagom_equations import Waves, eq5_dispatch, eq6_kernel_time
from lagom_overlap.cost.persistent import TileGrid, persistent_waves
from lagom_overlap.cost.profile import Profile
from lagom_overlap.hardware import Gpu
from lagom_overlap.workload import Kernel

_LEAST_COMPUTE: Final = 0.02
"""Share of a kernel's time alone that is computation at least: no kernel is pure transfer."""
_STEPS: Final = 60
"""Halvings: beyond the digits of a double."""


def kernel_of_time(
    gpu: Gpu, profile: Profile, *, alone_s: float, num_blocks: int, blocks_per_sm: int, total_bytes: float
) -> Kernel:
    """The kernel that the model runs alone in `alone_s`, or slower where its memory traffic needs longer."""
    profile = profile.on_gpu(gpu)
    waves = _waves_alone(gpu, num_blocks, blocks_per_sm)
    count = waves.count(profile.quantisation)
    transfer_s = total_bytes / gpu.hbm_bytes_per_s
    block_bytes = total_bytes / num_blocks
    if transfer_s >= alone_s:
        compute_s = 0.0
    elif profile.overlap_norm == 1.0:
        compute_s = alone_s * (1.0 - transfer_s / alone_s)
    else:
        law = profile.overlap_norm, profile.quantisation
        compute_s = count * _wave_of_time(alone_s, waves, block_bytes, gpu.hbm_bytes_per_s, law)
    compute_s = max(compute_s, _LEAST_COMPUTE * max(alone_s, transfer_s))
    return Kernel(num_blocks=num_blocks, blocks_per_sm=blocks_per_sm, wave_s=compute_s / count, block_bytes=block_bytes)


def persistent_of_time(
    gpu: Gpu, profile: Profile, *, alone_s: float, grid: TileGrid, total_bytes: float, launched: TileGrid | None = None
) -> Kernel:
    """The persistent kernel that the model runs alone in `alone_s` on that grid, but `launched` on another one."""
    profile = profile.on_gpu(gpu)
    waves = persistent_waves(grid, gpu)
    total_bytes = min(total_bytes, alone_s * gpu.hbm_bytes_per_s)
    block_bytes = total_bytes / grid.num_tiles
    wave_s = _bisected(
        alone_s, alone_s / waves.count(), lambda wave_s: _alone_s(gpu, profile, waves, wave_s, block_bytes)
    )
    runs = grid if launched is None else launched
    area = grid.num_tiles / runs.num_tiles  # of one tile to the other
    return Kernel(
        num_blocks=runs.num_tiles,
        blocks_per_sm=1,
        wave_s=area * max(wave_s, _LEAST_COMPUTE * alone_s / waves.count()),
        block_bytes=total_bytes / runs.num_tiles,
        grid=runs.num_blocks,
        cluster=runs.cluster,
        own_tiles=runs.own_tiles,
    )


def product_of_time(
    gpu: Gpu, profile: Profile, *, alone_s: float, flops: float, num_blocks: int, grid: int | None = None
) -> Kernel:
    """The product that the model runs alone in `alone_s`, its theta from the rate of one SM of the profile.

    A product that is as fast as its SMs allow shares nothing. `flops` are the equivalent of 2-byte elements.

    Raises:
        ValueError: if the profile has no such rate for the GPU.
    """
    profile, rate = profile.on_gpu(gpu), profile.for_gpu(gpu).sm_flops
    if rate is None:
        raise ValueError(f"profile {profile.name!r} has no sm_flops for {gpu.name}")
    waves = _waves_alone(gpu, num_blocks, 1, grid)
    own_s = min(flops / num_blocks / rate, alone_s / waves.count())
    whole_bytes = alone_s * gpu.hbm_bytes_per_s / waves.count()  # one block that alone moves this fills a wave
    block_bytes = _bisected(alone_s, whole_bytes, lambda num_bytes: _alone_s(gpu, profile, waves, own_s, num_bytes))
    return Kernel(num_blocks=num_blocks, blocks_per_sm=1, wave_s=own_s, block_bytes=block_bytes, grid=grid)


def _waves_alone(gpu: Gpu, num_blocks: int, blocks_per_sm: int, grid: int | None = None) -> Waves:
    return eq5_dispatch(num_blocks, blocks_per_sm, num_sms=gpu.num_sms, num_xcds=gpu.num_xcds, grid=grid)


def _alone_s(gpu: Gpu, profile: Profile, waves: Waves, wave_s: float, block_bytes: float) -> float:
    return eq6_kernel_time(
        wave_s,
        waves,
        block_bytes=block_bytes,
        free_bytes_per_s=gpu.hbm_bytes_per_s,
        norm=profile.overlap_norm,
        quantisation=profile.quantisation,
    )


@lru_cache(maxsize=65_536)
def _wave_of_time(
    alone_s: float, waves: Waves, block_bytes: float, free_bytes_per_s: float, law: tuple[float, float]
) -> float:
    """The theta of a wave; `law` is norm and quantisation. Kept: layouts of one model run the same kernels."""
    norm, quantisation = law

    def of(wave_s: float) -> float:
        return eq6_kernel_time(
            wave_s,
            waves,
            block_bytes=block_bytes,
            free_bytes_per_s=free_bytes_per_s,
            norm=norm,
            quantisation=quantisation,
        )

    return _bisected(alone_s, alone_s / waves.count(quantisation), of)


def _bisected(wanted: float, most: float, of: Callable[[float], float]) -> float:
    """Where the increasing function reaches what is wanted, between 0 and `most`."""
    low, high = 0.0, most
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) < wanted else (low, middle)
    return (low + high) / 2
