"""Context parallelism, FP8 products, parts of tensor parallelism, eager kernels and torchtitan's recomputation."""

from dataclasses import replace

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, MemoryBound, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute
from lagom_overlap.workload.precision import Precision, ProductFormat
from lagom_overlap.workload.step import build_step, load_rules

LLAMA = replace(load_model("llama-3-8b"), num_layers=2)
SEQ = 4096
ALONE = ParallelLayout(micro_batch=2, global_batch=2)


def built(layout: ParallelLayout, framework: str = "torchtitan", precision: Precision | None = None) -> IssuedStep:
    return build_step(LLAMA, layout, seq_len=SEQ, rules=load_rules(framework), precision=precision)


def works(step: IssuedStep, kind: type, phase: Phase | None = None) -> list[object]:
    return [
        op.work
        for op in step.iteration.computations
        if isinstance(op.work, kind) and phase in (None, op.origin.phase) and op.origin.layer is not None
    ]


def flops(step: IssuedStep, phase: Phase | None = None) -> float:
    products = [*works(step, Gemm, phase), *works(step, Attention, phase)]
    return sum(work.flops for work in products)  # type: ignore[attr-defined]


def test_context_ranks_share_all_work_evenly_and_carry_every_key_and_value() -> None:
    cut = built(replace(ALONE, context=4, zero_stage=3))
    assert flops(cut) * 4 == pytest.approx(flops(built(ALONE)))
    carried = [
        op.collective for op in cut.iteration.comms if op.communicator == "cp" and op.origin.phase is Phase.FORWARD
    ]
    assert [call.num_ranks for call in carried] == [4, 4]
    # torchtitan repeats keys and values to all heads before attention (repeat_kv).
    assert carried[0].num_bytes == 2 * (2 * SEQ) * LLAMA.num_heads * LLAMA.head_dim * 2
    assert {op.collective.num_ranks for op in cut.iteration.comms if op.communicator == "fsdp"} == {4}


def test_fp8_products_have_one_byte_operands_and_pay_for_their_casts() -> None:
    plain, cast = built(ALONE), built(ALONE, precision=Precision(products=ProductFormat.FP8))
    assert {work.element_bytes for work in works(cast, Gemm)} == {1}  # type: ignore[attr-defined]
    head = [op.work for op in cast.iteration.computations if op.name == "mb0.head.logits"]
    assert head[0].element_bytes == 2  # type: ignore[union-attr]
    assert {work.element_bytes for work in works(cast, Attention)} == {2}  # type: ignore[attr-defined]
    moved = [sum(w.num_bytes for w in works(step, MemoryBound)) for step in (plain, cast)]  # type: ignore[attr-defined]
    # Forward inputs and backward gradients of four matrices, and the matrices twice, 8 bytes each.
    h, tokens = LLAMA.hidden, 2 * SEQ
    inputs = h + LLAMA.attention_columns + h + LLAMA.ffn
    outputs = LLAMA.qkv_columns + h + 2 * LLAMA.ffn + h
    assert moved[1] - moved[0] == 2 * 8 * (tokens * (inputs + outputs) + 2 * LLAMA.layer_matrix_params)


def test_the_operator_mode_recomputes_keys_the_output_and_half_of_the_mlps_first_product() -> None:
    step = built(replace(ALONE, recompute=Recompute.PRODUCTS))
    h, tokens = LLAMA.hidden, 2 * SEQ
    keys = LLAMA.num_kv_heads * LLAMA.head_dim
    assert flops(step, Phase.RECOMPUTE) == 2 * 2 * tokens * h * (keys + LLAMA.attention_columns + LLAMA.ffn)
    assert not works(step, Attention, Phase.RECOMPUTE)


def test_every_second_layer_is_recomputed_whole() -> None:
    half, whole = (built(replace(ALONE, recompute=mode)) for mode in (Recompute.LAYERS, Recompute.FULL))
    assert flops(half, Phase.RECOMPUTE) * 2 == flops(whole, Phase.RECOMPUTE)


def test_in_parts_a_products_gather_does_not_hold_it_back() -> None:
    layout = replace(ALONE, tensor=4, sequence_parallel=True)
    for overlap in (False, True):
        step = built(replace(layout, overlap_tensor=overlap))
        ops = {op.name: op for op in step.iteration.ops}
        product = next(op for op in ops.values() if op.name == "mb0.layer0.qkv")
        assert isinstance(product, CompOp)
        held = {*product.deps, *step.waits.get(product.name, ())}
        assert ("mb0.layer0.attention_gather" in held or "mb0.layer0.attention_gather_move" in held) is not overlap
        gathers = [op for op in ops.values() if isinstance(op, CommOp) and op.name == "mb0.layer0.attention_gather"]
        assert gathers[0].collective.num_bytes == 2 * (2 * SEQ) * LLAMA.hidden


def test_compiled_kernels_move_less_than_eager_ones_and_multiply_the_same() -> None:
    eager, compiled = built(ALONE), built(ALONE, "torchtitan_compiled")
    assert flops(eager) == flops(compiled)
    norms = [
        next(op.work.num_bytes for op in step.iteration.computations if op.name == "mb0.layer0.norm")  # type: ignore[union-attr]
        for step in (eager, compiled)
    ]
    assert norms == [36 * 2 * SEQ * LLAMA.hidden, 4 * 2 * SEQ * LLAMA.hidden]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context": 3, "zero_stage": 3}, "must divide seq_len"),
        ({"context": 2, "flash_attention": False, "zero_stage": 3}, "must be 1 without flash_attention"),
        ({"overlap_tensor": True}, "needs sequence_parallel"),
        ({"recompute": Recompute.PRODUCTS, "flash_attention": False}, "parallel.recompute is products"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(JobError, match=words):
        built(replace(ALONE, **changes))  # type: ignore[arg-type]
