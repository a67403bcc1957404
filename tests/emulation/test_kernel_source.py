"""Bytes that Triton kernels move, counted by hand from kernels as Inductor writes them."""

from types import SimpleNamespace

import pytest

from lagom_emulate.kernel_source import KernelSource, Residency

HEAD = "import triton\n@triton.jit\n"
ADD = (
    HEAD
    + """def triton_poi_fused_add_0(in_out_ptr0, in_ptr0, in_ptr1, xnumel, XBLOCK : tl.constexpr):
    xnumel = 8192
    x0 = (xindex % 64)
    tmp0 = tl.load(in_out_ptr0 + (x2), None).to(tl.float32)
    tmp1 = tl.load(in_ptr0 + (x2), None)
    tmp2 = tl.load(in_ptr1 + (x0), None, eviction_policy='evict_last')
    tl.store(in_out_ptr0 + (x2), tmp0 + tmp1 * tmp2, None)
"""
)
HALVES = (
    HEAD
    + """def triton_poi_fused_cat_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 100
    tmp0 = tl.load(in_ptr0 + (x0 + 200*x1), xmask)
    tmp1 = tl.load(in_ptr0 + (100 + x0 + 200*x1), xmask)
    tmp2 = tl.load(in_ptr0 + (x0 + 200*x1), xmask)
    tl.store(out_ptr0 + (x0), tmp0 + tmp1, xmask)
"""
)
NORM = (
    HEAD
    + """def triton_red_fused_norm_0(in_ptr0, in_ptr1, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    xnumel = 16
    r0_numel = 1024
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_1 + 1024*x0), r0_mask, other=0.0)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp1 = tl.load(in_ptr0 + (r0_1 + 1024*x0), r0_mask, other=0.0)
        tmp2 = tl.load(in_ptr1 + (r0_1), r0_mask, other=0.0)
        tl.store(out_ptr0 + (r0_1 + 1024*x0), tmp1 * tmp2, r0_mask)
"""
)
CAST = (
    HEAD
    + """def triton_red_fused_cast_0(in_ptr0, in_ptr1, out_ptr0, out_ptr1, xnumel, r0_numel, XBLOCK : tl.constexpr):
    xnumel = 16
    r0_numel = 1024
    tmp9 = tl.load(in_ptr1 + (x0), None)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_1 + 1024*x0), r0_mask, other=0.0)
        tl.store(out_ptr0 + (r0_1 + 1024*x0), tmp0 * tmp9, r0_mask)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp1 = tl.load(out_ptr0 + (r0_1 + 1024*x0), r0_mask, other=0.0)
        tl.store(out_ptr1 + (x0 + 16*r0_1), tmp1, r0_mask)
"""
)
TABLE = (
    HEAD
    + """def triton_poi_fused_embedding_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x1), None)
    tl.device_assert((0 <= tmp0) & (tmp0 < 1000))
    tmp1 = tl.load(in_ptr1 + (x0 + 64*tmp0), None)
    tl.store(out_ptr0 + (x2), tmp1, None)
"""
)
TURN = (
    HEAD
    + """def triton_poi_fused_t_0(in_ptr0, out_ptr0, ynumel, xnumel, YBLOCK : tl.constexpr, XBLOCK : tl.constexpr):
    ynumel = 32
    xnumel = 64
    tmp0 = tl.load(in_ptr0 + (x1 + 64*y0), xmask & ymask)
    tl.store(out_ptr0 + (y0 + 32*x1), tmp0, xmask & ymask)
"""
)
SUMS = (
    HEAD
    + """def triton_poi_fused_scatter_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 10
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tl.atomic_add(out_ptr0 + (tl.broadcast_to(tmp0, [XBLOCK])), 1.0, xmask, sem='relaxed')
"""
)
SEVERAL = (
    HEAD
    + """def triton_for_fused_0(in_ptr0, out_ptr0, in_ptr1, out_ptr1, XBLOCK : tl.constexpr):
    if pid < 4:
        xnumel = 10
        tmp0 = tl.load(in_ptr0 + (x0), xmask)
        tl.store(out_ptr0 + (x0), tmp0, xmask)
    else:
        xnumel = 1000
        tmp1 = tl.load(in_ptr1 + (x0), xmask)
        tl.store(out_ptr1 + (x0), tmp1, xmask)
"""
)


def tensor(numel: int, width: int = 2) -> SimpleNamespace:
    return SimpleNamespace(numel=lambda: numel, element_size=lambda: width)


def moved(text: str, *args: object, residency: Residency | None = None) -> int:
    source = KernelSource.read(text)
    assert source is not None
    return source.bytes_moved(args, residency)


def test_what_is_read_and_written_in_place_counts_twice_and_what_is_broadcast_once() -> None:
    assert moved(ADD, tensor(8192), tensor(8192), tensor(64, 4), 8192) == 2 * 2 * 8192 + 2 * 8192 + 4 * 64


def test_of_a_larger_buffer_only_the_places_that_are_addressed_count() -> None:
    assert moved(HALVES, tensor(100_000), tensor(100), 100) == 2 * (2 * 100) + 2 * 100
    assert moved(HALVES, tensor(150), tensor(100), 100) == 2 * 150 + 2 * 100


def test_a_table_gives_one_row_for_each_index() -> None:
    assert moved(TABLE, tensor(10, 8), tensor(64_000), tensor(640), 640) == 8 * 10 + 2 * 640 + 2 * 640


def test_rows_are_read_again_from_memory_only_where_the_cache_does_not_hold_them() -> None:
    args = (tensor(16 << 10), tensor(1024), tensor(16 << 10), 16, 1024)
    once = 2 * (16 << 10) + 2 * 1024 + 2 * (16 << 10)
    assert moved(NORM, *args) == once
    assert moved(NORM, *args, residency=Residency(8, 8 * 1024 * 2)) == once
    assert moved(NORM, *args, residency=Residency(8, 8 * 1024 * 2 - 1)) == once + 2 * (16 << 10)
    # No more rows are under way than there are.
    assert moved(NORM, *args, residency=Residency(1000, 16 * 1024 * 2)) == once


def test_what_an_earlier_loop_stored_comes_from_the_cache_if_it_fits() -> None:
    elements = 16 << 10
    args = (tensor(elements), tensor(1 << 20, 4), tensor(elements, 4), tensor(elements, 1), 16, 1024)
    once = 2 * elements + 4 * 16 + 4 * elements + elements  # of the larger buffer one scale for each row
    assert moved(CAST, *args, residency=Residency(8, 8 * 1024 * 4)) == once
    assert moved(CAST, *args, residency=Residency(8, 8 * 1024 * 4 - 1)) == once + 4 * elements


def test_atomic_sums_are_read_and_written() -> None:
    assert moved(SUMS, tensor(10, 8), tensor(10_000, 4), 10) == 8 * 10 + 2 * 4 * 10


def test_kernels_put_together_move_their_tensors() -> None:
    assert moved(SEVERAL, tensor(10), tensor(10), tensor(1000), tensor(1000)) == 2 * 2 * 1010


def test_tiles_are_made_where_tensors_lie_in_different_orders() -> None:
    found = [KernelSource.read(text) for text in (TURN, ADD, NORM)]
    assert [each is not None and each.turns for each in found] == [True, False, False]
    assert moved(TURN, tensor(2048), tensor(2048, 1), 32, 64) == 3 * 2048


@pytest.mark.parametrize("text", ["", "x = 1\n"])
def test_what_is_no_kernel_is_not_read(text: str) -> None:
    assert KernelSource.read(text) is None


def test_what_a_launch_overwrites_is_neither_read_nor_a_few_rows_of_a_table() -> None:
    x, y, z = (SimpleNamespace(data_ptr=lambda at=at: at) for at in (1, 2, 3))
    add, cast, norm = (KernelSource.read(text) for text in (ADD, CAST, NORM))
    assert add is not None
    assert cast is not None
    assert norm is not None
    assert add.overwritten((x, y, z, 8192)) == []
    assert cast.overwritten((x, y, z, SimpleNamespace(data_ptr=lambda: 4), 16, 1024)) != []
    assert norm.overwritten((x, y, z, 16, 1024)) == [z]
    assert norm.overwritten((x, y, x, 16, 1024)) == []  # by another pointer the kernel reads it
    rows = KernelSource.read(ADD.replace("tl.store(in_out_ptr0 + (x2)", "tl.store(out_ptr0 + (x0 + 64*tmp0)"))
    assert rows is not None
    assert rows.outputs == ()
