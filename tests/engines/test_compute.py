# ruff: noqa: E402  # without torch the file is skipped before it imports what needs torch
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional

from lagom_overlap.engines.compute import ComputeBuilder
from lagom_overlap.errors import BackendError
from lagom_overlap.workload import Attention, Gemm, Kernel, MemoryBound

pytestmark = pytest.mark.torch


def test_a_gemm_computes_the_product_of_its_shape_into_one_place() -> None:
    product = ComputeBuilder().build(Gemm(3, 5, 7))
    assert isinstance(product, partial)
    left, right = (tensor.numpy() for tensor in product.args)
    assert (left.shape, right.shape) == ((3, 7), (7, 5))
    out = product.keywords["out"]
    assert product() is out
    np.testing.assert_allclose(out.numpy(), left @ right, rtol=1e-5, atol=1e-5)


def test_a_memory_bound_work_reads_and_writes_its_bytes() -> None:
    scaling = ComputeBuilder().build(MemoryBound(1 << 20))
    assert isinstance(scaling, partial)
    moved = scaling.args[0].numel() + scaling.keywords["out"].numel()
    assert 4 * moved == 1 << 20
    scaling()
    np.testing.assert_array_equal(scaling.keywords["out"].numpy(), scaling.args[0].numpy() / 2)


def test_passes_of_attention_are_whole_calls_and_a_share_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[int] = []
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda query, *_, **__: heads.append(query.shape[1])
    )
    ComputeBuilder().build(Attention(batch=2, num_heads=4, seq_len=3, head_dim=2, passes=2.5))()
    ComputeBuilder().build(Attention(batch=1, num_heads=4, seq_len=3, head_dim=2, passes=0.01))()
    assert heads == [8, 8, 4, 1]


def test_attention_runs() -> None:
    ComputeBuilder().build(Attention(batch=1, num_heads=2, seq_len=8, head_dim=4))()


def test_equal_works_share_their_tensors() -> None:
    builder = ComputeBuilder()
    assert builder.build(Gemm(2, 2, 2)) is builder.build(Gemm(2, 2, 2))


def test_a_kernel_cannot_be_run() -> None:
    with pytest.raises(BackendError, match="does not say what to compute"):
        ComputeBuilder().build(Kernel(num_blocks=1, blocks_per_sm=1, wave_s=1.0, block_bytes=0.0))
