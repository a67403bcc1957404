"""Memory of steps that PyTorch runs itself, against cases worked by hand and peaks of PyTorch's allocator."""

from dataclasses import replace

import pytest

from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute, StageMemory, plan_stages, stage_memory
from lagom_overlap.workload.parallel.eager_memory import EagerStep

LLAMA = load_model("llama-3-8b")
H, V, T = 4096, 128256, 8192
EIGHT = ParallelLayout(data=8, global_batch=8, zero_stage=3)
WORKSPACE = 32 << 20


def memory(
    layout: ParallelLayout, seq_len: int = T, model: TransformerModel = LLAMA, eager: EagerStep | None = None
) -> StageMemory:
    (stage,) = plan_stages(model, layout)
    return stage_memory(model, layout, stage, seq_len, eager=eager or EagerStep())


def test_the_loss_of_a_large_vocabulary_is_the_fullest_moment() -> None:
    """By hand, and 73,636,781,568 bytes of PyTorch 2.15's allocator (`benchmarks/results/memory_emulated.csv`)."""
    norms, turned = 2 * 4 * H, 2 * (6144 + 5120 + 4096)  # q, k and v; q and k turned; attention's result
    layer = T * (norms + turned + 2 * 4 * 14336 + 4 * 32)  # gate, up, SiLU of the gate, their product; softmax's sums
    by_hand = 12 * LLAMA.num_params // 8 + 32 * layer + T * (14 * V + 4 * H) + WORKSPACE
    found = memory(EIGHT)
    assert found.total_bytes == pytest.approx(by_hand, rel=1e-5)
    assert found.total_bytes == pytest.approx(73_636_781_568, rel=0.002)
    assert found.gradient_bytes == 0  # before the first backward there are none


def test_with_few_tokens_the_update_is_the_fullest_moment() -> None:
    """Weights, two moments, gradients and AdamW's one temporary, in FP32: 20 bytes.

    Where the update is fused, 16, and the embedding's gradient and its copy, next to the layer's that is reduced.
    """
    own, layout = LLAMA.num_params / 4, ParallelLayout(data=4, global_batch=4, zero_stage=3)
    assert memory(layout, 512).total_bytes == pytest.approx(20 * own + WORKSPACE, rel=1e-3)
    fused = memory(layout, 64, eager=EagerStep(runs_update=False))
    reduced = 6 * V * H + 4 * LLAMA.layer_params + 2 * 64 * V
    assert fused.total_bytes == pytest.approx(16 * own + reduced + WORKSPACE, rel=1e-3)


def test_a_job_that_drops_its_logits_and_one_whose_logits_are_cut_hold_other_bytes_for_each() -> None:
    kept, dropped = memory(EIGHT), memory(EIGHT, eager=EagerStep(keeps_logits=False))
    assert kept.total_bytes - dropped.total_bytes == 2 * T * V
    two = replace(EIGHT, tensor=2, sequence_parallel=True)
    assert memory(two).transient_bytes == pytest.approx(T * (18 * V // 2 + 4 * H) + WORKSPACE, rel=1e-3)


def test_a_longer_prefetch_holds_more_where_a_layer_is_the_fullest_moment() -> None:
    """Eight wide layers, few tokens: 26.30 GiB allocated with one gather ahead."""
    wide = replace(LLAMA, num_layers=8, hidden=8192, ffn=28672, num_heads=64, head_dim=128)
    layout = ParallelLayout(data=16, global_batch=16, zero_stage=3)
    one, two = memory(layout, 4096, wide), memory(replace(layout, prefetch=2), 4096, wide)
    assert one.total_bytes / 2**30 == pytest.approx(26.30, rel=0.02)
    assert two.total_bytes - one.total_bytes == 2 * wide.layer_params


def test_recomputed_layers_keep_their_inputs_alone_until_the_loss() -> None:
    full = memory(replace(EIGHT, recompute=Recompute.FULL))
    assert full.activation_bytes == 32 * 2 * T * H
