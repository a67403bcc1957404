"""Persistent kernels: at most as many blocks as SMs, in clusters, each of which works through several tiles.

    T    tiles of the kernel, in clusters of c: the tiles that a cluster computes at once count as one
    G    clusters that are launched
    L    clusters that find SMs while a collective holds some (`resident_clusters`)
    k    tiles that a cluster brings with it: c, c + G, c + 2 G, ...; the rest is fetched by whoever is free

A plain kernel loses SMs in proportion: its blocks go wherever there is room. A persistent one was launched for every
SM: where L < G, the others start only after a running cluster has ended, and then work through their own k tiles. The
tiles that are fetched are gone by then. So the kernel takes about (T - k (G - L)) / L + k rounds instead of T / G, and
`rounds` counts them exactly, tile by tile.

    all tiles brought (k = T / G)   a static grid: a second whole pass for one SM (pytorch/pytorch#143988: "2x as long")
    k = 2                           cuBLAS on Hopper, nvjet_sm90: measured, below
    k = 0                           stream-K, Blackwell's cluster launch control: whoever comes late finds nothing

k = 2 of nvjet is what our surface of an H100 shows (benchmarks/results/gpu_h100_contention_2026-11-22.md): products of
1 to 13 rounds on 1 to 64 lost SMs take one round more, two, ... as the rule says, and no other k does. With T = 2 G - 4
the short clusters are every second one from the end. cuBLAS's documents say neither.

The remedy is a carve-out: launch fewer blocks and leave the rest of the SMs to communication (cuBLAS's SM_COUNT_TARGET,
PyTorch's `torch._C._set_sm_carveout_experimental`). Then nothing is displaced while NC does not exceed the carve-out,
at the price of SMs / (SMs - carve-out) when no communication runs.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Final

from lagom_overlap.cost.lagom_equations import Waves
from lagom_overlap.hardware import Gpu
from lagom_overlap.workload import Kernel

NVJET_OWN_TILES: Final = 2
"""k of cuBLAS's kernels for Hopper."""
NVJET_CLUSTER: Final = 2
"""Blocks of a cluster in 27 of the 32 products that we measured."""
NVJET_TILES: Final = ((256, 128), (320, 128), (192, 192))
"""Tiles, n x m of a row-major product, of 30 of the 32 products."""
LAST_ROUND_IDLE: Final = 0.1
"""Of a round, what is idle in the last one: 0 to 0.24 in the products of our surface, 0.06 to 0.39 held out."""
_NVJET: Final = re.compile(r"nvjet_sm90_\w*?_(\d+)x(\d+)_\d+x\d+_(\d+)x(\d+)_")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGrid:
    """The tiles of a persistent kernel and the blocks that work through them; both in blocks, not in clusters."""

    num_tiles: int
    num_blocks: int
    cluster: int
    own_tiles: int


def persistent_waves(grid: TileGrid, gpu: Gpu, num_channels: int = 0) -> Waves:
    """The rounds of a persistent kernel while channels hold SMs, its tiles spread evenly over them."""
    launched = grid.num_blocks // grid.cluster
    resident = resident_clusters(gpu, min(num_channels, gpu.num_sms - 1), grid.cluster)
    count = rounds(ceil(grid.num_tiles / grid.cluster), launched, max(1, min(launched, resident)), grid.own_tiles)
    return Waves(count, grid.num_tiles / count, 0.0)


@lru_cache(maxsize=65_536)
def rounds(num_tiles: int, launched: int, resident: int, own_tiles: int) -> int:
    """Rounds until the last cluster has ended, of which `resident` run at once; all tiles take equally long."""
    own = _own(num_tiles, launched, own_tiles)
    pool = num_tiles - sum(own)
    free_at: dict[int, int] = defaultdict(int)
    for tiles in own[:resident]:
        free_at[tiles] += 1
    late = iter(own[resident:])
    end = 0
    while free_at:
        now = min(free_at)
        free = free_at.pop(now)
        fetched = min(pool, free)
        pool -= fetched
        if fetched:
            free_at[now + 1] += fetched
        if free > fetched:
            end = now
        for _, tiles in zip(range(free - fetched), late, strict=False):
            free_at[now + tiles] += 1
    return end


def _own(num_tiles: int, launched: int, most: int) -> list[int]:
    """How many tiles each cluster brings; the shorter ones are every second one from the end, then the others."""
    brought = min(num_tiles, launched * most)
    full, longer = divmod(brought, launched)
    if not longer:
        return [full] * launched
    own = [full + 1] * launched
    from_the_end = [*range(launched - 1, -1, -2), *range(launched - 2, -1, -2)]
    for place in from_the_end[: launched - longer]:
        own[place] = full
    return own


def nvjet_grid(name: str, num_blocks: int, shape: tuple[int, int]) -> TileGrid | None:
    """What a kernel of cuBLAS for Hopper works through, by its name, its grid and the product's m and n (row-major).

    None for other kernels, and where the blocks do not make up clusters.
    """
    match = _NVJET.search(name)
    if match is None:
        return None
    wide, high, across, down = map(int, match.groups())
    m, n = shape
    return _nvjet(ceil(ceil(n / wide) / across) * ceil(ceil(m / high) / down), across * down, num_blocks)


def nvjet_grid_of_time(name: str, num_blocks: int, area: float) -> TileGrid | None:
    """The same where the shape is not known: of as many rounds as the grid needs for so many elements (m n).

    The last round is `LAST_ROUND_IDLE` short of full.
    """
    match = _NVJET.search(name)
    if match is None:
        return None
    wide, high, across, down = map(int, match.groups())
    num_rounds = max(1, round(area / (wide * high * num_blocks)))
    launched = num_blocks // (across * down)
    return _nvjet(max(1, round((num_rounds - LAST_ROUND_IDLE) * launched)), across * down, num_blocks)


def _nvjet(clusters: int, cluster: int, num_blocks: int) -> TileGrid | None:
    if num_blocks % cluster:
        return None
    return TileGrid(num_tiles=clusters * cluster, num_blocks=num_blocks, cluster=cluster, own_tiles=NVJET_OWN_TILES)


def hopper_grid(shape: tuple[int, int], batch: int, num_sms: int) -> TileGrid:
    """The grid that cuBLAS would launch on so many SMs of a Hopper GPU, with the tile that wastes the least."""
    m, n = shape
    launched = max(1, num_sms // NVJET_CLUSTER)

    def clusters(tile: tuple[int, int]) -> int:
        return batch * ceil(n / tile[0]) * ceil(ceil(m / tile[1]) / NVJET_CLUSTER)

    best = min(NVJET_TILES, key=lambda tile: ceil(clusters(tile) / launched) * tile[0] * tile[1])
    grid = clusters(best)
    return TileGrid(
        num_tiles=grid * NVJET_CLUSTER,
        num_blocks=min(grid, launched) * NVJET_CLUSTER,
        cluster=NVJET_CLUSTER,
        own_tiles=NVJET_OWN_TILES,
    )


def as_persistent(kernel: Kernel, num_sms: int, carve_out_sms: int = 0) -> Kernel:
    """The same work as one block per SM on all but `carve_out_sms` of the SMs, tiles shared out before the start.

    Raises:
        ValueError: if the carve-out leaves no SM.
    """
    num_blocks = num_sms - carve_out_sms
    if not 0 <= carve_out_sms < num_sms:
        raise ValueError(f"carve_out_sms is {carve_out_sms}, must lie in 0..{num_sms - 1}")
    rounds_each = ceil(kernel.num_blocks / (num_blocks * kernel.blocks_per_sm))
    return Kernel(
        num_blocks=num_blocks,
        blocks_per_sm=1,
        wave_s=kernel.wave_s * rounds_each,
        block_bytes=kernel.num_blocks * kernel.block_bytes / num_blocks,
    )


SMS_PER_TPC: Final = 2
"""Of NVIDIA's data-centre GPUs since Pascal."""


def resident_clusters(gpu: Gpu, num_held_sms: int, cluster: int) -> int:
    """Clusters of so many blocks, a whole SM each, that run at once while the blocks of a collective hold SMs.

    A cluster runs inside one GPC, on any of its free SMs: a GPC with s free SMs holds floor(s / c) clusters of c
    blocks. So channels that are spread over the GPCs cost a product more clusters than their SMs would make up.

    The order in which blocks of a whole SM each take the SMs was read off one H100 (resident_clusters.csv of
    benchmarks/results/h100_2026-11-22; all 90 counts agree): first those of each GPC that the preset calls
    `gpc_first_sms`, then one SM of every GPC in turn, each in a TPC of its own as long as the GPC has an empty one,
    then what is left. NVIDIA promises none of it, and other dies have other SMs switched off.

    Departure: where the GPCs of a GPU are not known, the free SMs count as one GPC.
    """
    return _resident(gpu.num_sms, gpu.gpc_sms, gpu.gpc_first_sms, num_held_sms, cluster)


@lru_cache(maxsize=65_536)
def _resident(num_sms: int, gpcs: tuple[int, ...], first: tuple[int, ...], num_held_sms: int, cluster: int) -> int:
    free = _free_sms(gpcs, first, num_held_sms) if gpcs else [num_sms - num_held_sms]
    return sum(sms // cluster for sms in free)


def _free_sms(gpcs: Sequence[int], first: Sequence[int], num_held_sms: int) -> list[int]:
    """The free SMs of each GPC."""
    rest = [sms - own for sms, own in zip(gpcs, first, strict=True)]
    apart = [sms // SMS_PER_TPC for sms in rest]
    second = [sms - own for sms, own in zip(rest, apart, strict=True)]
    free = list(gpcs)
    left = num_held_sms
    for room in (list(first), apart, second):
        while left and any(room):
            for place, sms in enumerate(room):
                if sms and left:
                    room[place] -= 1
                    free[place] -= 1
                    left -= 1
    return free
