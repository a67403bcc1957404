"""Memory of steps that PyTorch runs itself, against cases worked by hand and peaks of PyTorch's allocator."""

from dataclasses import replace

import pytest

from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute, StageMemory, plan_stages, stage_memory
from lagom_overlap.workload.parallel.eager_memory import EagerStep, StepSizes, moments

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
    one, two = memory(layout, 4096, wide), memory(replace(layout, backward_prefetch=2), 4096, wide)
    assert one.total_bytes / 2**30 == pytest.approx(26.30, rel=0.02)
    assert two.total_bytes - one.total_bytes == 2 * wide.layer_params


def test_recomputed_layers_keep_their_inputs_alone_until_the_loss() -> None:
    full = memory(replace(EIGHT, recompute=Recompute.FULL))
    assert full.activation_bytes == 32 * 2 * T * H


SIZES = StepSizes(
    params=800, own=100, element_bytes=2, reduced_bytes=4, kept_bytes=10**9, layer_bytes=10**8, again_bytes=10**7,
    layer=1000, layers=9000, num_layers=9, made=500, copied=600, head=11, embedding=13, logits=7, rows=3,
    inside_bytes=10**6, accumulates=False, is_whole=False, ahead=1, has_list=False, ahead_forward=0, kept_layers=0,
    kept_head=0, kept_embedding=0, root=0, reduce_buffers=1, holds_gradients_whole=False, is_trained=True,
    is_loss_cut=False,
)  # fmt: skip


def test_what_is_there_at_each_moment_of_a_sharded_step_is_the_docstrings_sum() -> None:
    """Bytes a logit: 14 in the loss, 2 after it; the unit at work and the next one gathered; FP32 that is reduced."""
    inside = 2 * 7 + WORKSPACE + 2 * 2 * 1000 + 2 * 500 + 10**6  # logits, two layers gathered, gradients, the layer's
    assert [(m.gradients, m.activations, m.transient) for m in moments(SIZES, EagerStep())] == [
        (0, 10**9 - 10**8, 2 * 1000),
        (0, 10**9, 14 * 7 + 4 * 3 + WORKSPACE),
        (0, 10**9, 2 * 7 + WORKSPACE + 4 * 11 + 2 * 11 + 2 * 1000 + 4 * 3),
        (0, 10**9 + 10**7, inside + 4 * 11),
        (4 * 100 * 1011 // 800, 10**9 + 10**7 - 10**8, inside + 4 * 1000),
        (4 * 100, 10**8 + 10**7, inside + 4 * 1000),
        (4 * 100, 0, 2 * 7 + WORKSPACE + 6 * 13 + 4 * 1000),
        (4 * 100, 0, 4 * 100 + WORKSPACE),
    ]


def test_what_is_there_at_each_moment_of_a_step_in_buckets_is_the_docstrings_sum() -> None:
    """DDP under autocast, a micro-batch after the first: buckets and gradients of all, copies that products read."""
    facts = EagerStep(in_buckets=True, autocasts=True)
    sizes = replace(SIZES, accumulates=True, is_whole=True, holds_gradients_whole=True)
    buckets, copies, logits = 4 * 800, 2 * 600, 2 * 7 + WORKSPACE
    assert [(m.gradients, m.activations, m.transient) for m in moments(sizes, facts)] == [
        (4 * 800, 10**9 - 10**8, buckets + copies),
        (4 * 800, 10**9, buckets + copies + 14 * 7 + 4 * 3 + WORKSPACE),
        (4 * 800, 10**9, buckets + copies + logits + 2 * 7 + 4 * 3),
        (4 * 800, 10**9 + 10**7, buckets + copies + logits + 10**6),
        (4 * 800, 10**9 + 10**7 - 10**8, buckets + copies + logits + 10**6),
        (4 * 800, 10**8 + 10**7, buckets + copies + logits + 10**6),
        (4 * 800, 0, buckets + copies + logits),
        (4 * 800, 0, buckets + 4 * 100 + WORKSPACE),
    ]


def transients(**changes: object) -> list[int]:
    return [moment.transient for moment in moments(replace(SIZES, **changes), EagerStep())]  # type: ignore[arg-type]


def test_what_is_kept_after_forward_is_there_until_its_own_backward() -> None:
    """Three of nine layers and the head, at 2 bytes: none is gathered again; behind their backward they are gone."""
    plain, kept = transients(), transients(kept_layers=3000, kept_head=11)
    more = [kept_by - plain_by for kept_by, plain_by in zip(kept, plain, strict=True)]
    # Forward's last layer; the loss; the head, whose own parameters are there either way; the last layer, where two are
    # gathered otherwise; the layer before it; the first layer, the embedding and the update are as ever.
    assert more == [2 * 2000, 2 * 3011, 2 * (3000 - 1000), 2 * (3000 - 2000), 0, 0, 0, 0]
    every = transients(kept_layers=9000, kept_head=11, kept_embedding=13)
    assert every[1] - plain[1] == 2 * (9000 + 11 + 13)
    assert every[-3] - plain[-3] == 2 * (13 - 1000)  # nothing is gathered ahead
    assert every[-2:] == plain[-2:]


def test_lists_gather_more_ahead_and_leave_out_what_is_kept() -> None:
    plain = transients()
    forward = transients(ahead_forward=3)
    assert [a - b for a, b in zip(forward, plain, strict=True)] == [2 * 3000, *[0] * 7]
    backward = transients(ahead=3, has_list=True)
    assert [a - b for a, b in zip(backward, plain, strict=True)] == [0, 0, *[2 * 2000] * 4, 0, 0]
    both = transients(ahead=3, has_list=True, kept_layers=2000)
    assert both[3] - plain[3] == 2 * (2000 + 3000 - 2000)


def test_more_inputs_of_reductions_in_flight_are_as_many_layers_gradients_in_fp32() -> None:
    """The head's and those of the layers that backward has passed; each layer passed leaves its activations."""
    found = moments(replace(SIZES, reduce_buffers=3), EagerStep())
    plain = moments(SIZES, EagerStep())
    assert len(found) == len(plain) + 2
    reducing = [moment.transient - plain[3].transient for moment in found[3:7]]
    assert reducing == [0, 4 * 1000, 4 * 2000, 4 * (3000 - 11)]
    assert [moment.activations for moment in found[3:7]] == [10**9 + 10**7 - passed * 10**8 for passed in range(4)]


def test_a_tied_table_is_the_roots_which_stays_gathered_and_is_reduced_last() -> None:
    tied = replace(LLAMA, tied_embeddings=True)
    layout = replace(EIGHT, data=2, global_batch=2)
    apart, root = memory(layout), memory(layout, model=tied)
    table = V * H
    assert apart.transient_bytes == pytest.approx(T * (14 * V + 4 * H) + WORKSPACE)
    assert root.transient_bytes == apart.transient_bytes + 2 * table
    found, plain = transients(root=11), transients()
    # Forward; the loss; the head, which is reduced at the end (the logits' gradients are there, and the table, in place
    # of its reduction); the layers, next to the table and its gradients, not its reduction.
    head, layers = 2 * 7 + 2 * 11 - 4 * 11, 2 * (11 + 11) - 4 * 11
    assert [a - b for a, b in zip(found, plain, strict=True)][:4] == [2 * 11, 2 * 11, head, layers]
