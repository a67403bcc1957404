"""A bf16 GEMM whose grid is its tiles: the non-persistent victim, for which losing SMs costs waves."""

import triton
import triton.language as tl

TILE_M, TILE_N, TILE_K = 128, 256, 64
NUM_WARPS, NUM_STAGES = 8, 3


@triton.jit
def gemm_kernel(  # noqa: PLR0917 - a kernel takes its arguments by position
    a_ptr, b_ptr, c_ptr, m, n, k, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr
):  # fmt: skip
    """Write a @ b to c, for row-major a (m, k), b (k, n), c (m, n), dimensions multiples of the tile."""
    num_tiles_n = n // tile_n
    tile = tl.program_id(0)
    rows = (tile // num_tiles_n) * tile_m + tl.arange(0, tile_m)
    columns = (tile % num_tiles_n) * tile_n + tl.arange(0, tile_n)
    inner = tl.arange(0, tile_k)
    a = a_ptr + rows[:, None] * k + inner[None, :]
    b = b_ptr + inner[:, None] * n + columns[None, :]
    total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for _ in range(0, k, tile_k):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += tile_k
        b += tile_k * n
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16))
