"""Time of a matrix product alone, from tiles, waves and split-K.

For every tile a x b and split s of the depth:

    waves  w = g + q (ceil(g) - g),  g = ceil(m/a) ceil(n/b) batch s / lambda,  at least 1
    t      = t0 + [ (w (2 a b k / s / rate_ab + store))^p + (bytes / B)^p ]^(1/p)   (s > 1: + t_split and the workspace)

and the product takes the fastest. `store` is the tile's way back to memory, a b elements from every SM at once, which
one resident block per SM cannot hide: no constant of its own. `bytes` are the operands and the result once, of which
the share that the L2 can hold is read at `l2_speedup` times B. q blends the ceiling (1) and the fluid quotient (0).

The grid is that of the fastest tile. Its memory traffic, which the contention model needs and the time alone does not,
counts the reloads of each wave's super-tile of lambda a b elements: 2 sqrt(lambda a b) k per wave, at least every
operand once, and the result once.

hipBLASLt on AMD's GPUs has tiles of 256 rows and many widths (`wide_tiles`): its grid is not that of the fastest tile
above, and whole waves of it are what a product loses next to RCCL.

Fitted: rates of three classes of tile, t0, t_split, B, p, q, L2 share and speedup; which rows, in the data file.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Final

TILES: Final = ((128, 128), (128, 64), (64, 128), (64, 64))
"""Larger tiles were never the fastest in the fit: what they gain in rate they lose in whole waves."""
_RATE_OF_TILE: Final = (0, 1, 1, 2)
"""Which of the three fitted rates a tile of `TILES` runs at: by its area."""
SPLITS: Final = (1, 2, 3, 4, 6, 8)
"""Parts of k that are computed apart and added. Powers of two and their threefolds: chosen, not measured."""


WIDE_ROWS: Final = 256
"""Rows of hipBLASLt's tiles."""
WIDE_WIDTHS: Final = (128, 160, 176, 192, 224, 256)
"""Widths of hipBLASLt's tiles, from numbers of tiles that tritonBLAS's documents print (2026)."""


def wide_tiles(m: int, n: int, num_sms: int) -> int:
    """Tiles of 256 rows, of the width that needs the least waves times width; of equals the widest."""
    counts = ((width, ceil(m / WIDE_ROWS) * ceil(n / width)) for width in WIDE_WIDTHS)
    return min(counts, key=lambda found: (ceil(found[1] / num_sms) * found[0], -found[0]))[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConstants:
    """Constants of one GPU.

    `tile_flops` are the rates per SM of tiles 128x128, 128x64 and 64x64; `norm` is p, `quantisation` q.
    """

    tile_flops: tuple[float, float, float]
    launch_s: float
    split_s: float
    bytes_per_s: float
    norm: float
    quantisation: float
    l2_share: float
    l2_speedup: float

    def __post_init__(self) -> None:
        for field in ("tile_flops", "launch_s", "split_s", "bytes_per_s", "l2_share", "l2_speedup"):
            value = getattr(self, field)
            if not all(0 < one < float("inf") for one in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"gemm: {field} is {value}, must be positive and finite")
        if not self.norm >= 1:
            raise ValueError(f"gemm: norm is {self.norm}, must be at least 1")
        if not 0 <= self.quantisation <= 1:
            raise ValueError(f"gemm: quantisation is {self.quantisation}, must be 0 to 1")


@dataclass(frozen=True, slots=True)
class GemmTime:
    """A product's time alone in seconds, its grid under the tile that was fastest, the bytes that it moves."""

    alone_s: float
    num_blocks: int
    total_bytes: float


@lru_cache(maxsize=65_536)
def gemm_time(
    shape: tuple[int, int, int],
    *,
    batch: int = 1,
    element_bytes: float = 2,
    result_bytes: int | None = None,
    num_sms: int,
    l2_bytes: int,
    constants: GemmConstants,
    moved_bytes: float | None = None,
) -> GemmTime:
    """The time alone of `batch` products (m x k) (k x n) on a GPU with `num_sms` SMs, launched together.

    `moved_bytes` are read and written where they are fewer than operands and result: a convolution's.
    """
    m, n, k = shape
    c, width = constants, element_bytes
    l2_rate = c.bytes_per_s * c.l2_speedup
    out = width if result_bytes is None else result_bytes
    num_bytes = float(batch * (width * (m * k + n * k) + out * m * n)) if moved_bytes is None else moved_bytes
    hit = min(1.0, c.l2_share * l2_bytes / num_bytes)
    memory_s = num_bytes * ((1.0 - hit) / c.bytes_per_s + hit / l2_rate)
    best: tuple[float, int, int, int] | None = None
    for (rows, columns), place in zip(TILES, _RATE_OF_TILE, strict=True):
        tiles = ceil(m / rows) * ceil(n / columns) * batch
        store_s = rows * columns * out * num_sms / l2_rate
        rate = c.tile_flops[place] * 2 / width
        for split in SPLITS:
            fluid = tiles * split / num_sms
            waves = max(1.0, fluid + c.quantisation * (ceil(fluid) - fluid))
            tile_s = 2.0 * rows * columns * k / split / rate + store_s * (1 if split == 1 else 2)
            longer, shorter = max(waves * tile_s, memory_s), min(waves * tile_s, memory_s)
            alone_s = c.launch_s + longer * (1.0 + (shorter / longer) ** c.norm) ** (1.0 / c.norm)
            if split > 1:
                alone_s += c.split_s + 8.0 * m * n * batch * split / l2_rate
            if best is None or alone_s < best[0]:
                best = alone_s, tiles * split, tiles, rows * columns
    assert best is not None
    alone_s, num_blocks, tiles, area = best
    reloaded = tiles / num_sms * 2 * (num_sms * area) ** 0.5 * k * width
    return GemmTime(alone_s, num_blocks, max(num_bytes, reloaded + out * batch * m * n))
