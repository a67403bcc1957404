from dataclasses import replace
from typing import Any

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.workload import Attention, Gemm, Kernel, MemoryBound


def test_a_product_counts_a_multiplication_and_an_addition_per_term() -> None:
    rows, columns, depth = 3, 5, 7
    by_loops = sum(2 for _ in range(rows) for _ in range(columns) for _ in range(depth))
    assert Gemm(rows, columns, depth).flops == by_loops


def test_attention_is_two_products_per_head_of_which_the_mask_leaves_half() -> None:
    full = Attention(batch=2, num_heads=3, seq_len=16, head_dim=8, causal=False)
    scores, values = Gemm(16, 16, 8).flops, Gemm(16, 8, 16).flops
    assert full.flops == 2 * 3 * (scores + values)
    assert replace(full, causal=True).flops == full.flops / 2
    assert replace(full, passes=2.5).flops == 2.5 * full.flops


@pytest.mark.parametrize(
    ("work", "field"),
    [
        (Gemm(1, 1, 1), "m"),
        (Gemm(1, 1, 1), "n"),
        (Gemm(1, 1, 1), "k"),
        (Gemm(1, 1, 1), "element_bytes"),
        (Attention(batch=1, num_heads=1, seq_len=1, head_dim=1), "seq_len"),
        (Attention(batch=1, num_heads=1, seq_len=1, head_dim=1), "passes"),
        (MemoryBound(1), "num_bytes"),
        (Kernel(num_blocks=1, blocks_per_sm=1, wave_s=1.0, block_bytes=0.0), "num_blocks"),
        (Kernel(num_blocks=1, blocks_per_sm=1, wave_s=1.0, block_bytes=0.0), "blocks_per_sm"),
        (Kernel(num_blocks=1, blocks_per_sm=1, wave_s=1.0, block_bytes=0.0), "wave_s"),
    ],
)
def test_a_work_without_size_is_refused_by_field(work: Any, field: str) -> None:
    with pytest.raises(JobError, match=f"{field} is 0"):
        replace(work, **{field: 0})


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_kernel_may_move_no_bytes_but_not_fewer(value: float) -> None:
    with pytest.raises(JobError, match="block_bytes"):
        Kernel(num_blocks=1, blocks_per_sm=1, wave_s=1.0, block_bytes=value)
