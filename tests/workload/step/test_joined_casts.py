"""torchao's casts in compiled layers against the kernels that PyTorch 2.15's Inductor writes for torchtitan's block.

Bytes per token of Llama-3-8B's layer, added up by hand from the kernels' source: each tensor that one loads or stores
times the width of its elements. torchtitan 9dec370 with torchao 0.8.0 and 820504e with 0.11.0, recomputation by
operators. Rotary positions and repeated keys are left out: they are as without FP8.
"""

from dataclasses import replace

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.workload import Access, CommOp, CompOp, MemoryBound, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute
from lagom_overlap.workload.precision import Precision, ProductFormat
from lagom_overlap.workload.step import build_step, load_rules

LLAMA = replace(load_model("llama-3-8b"), num_layers=2)
SEQ, TENSOR = 4096, 8
TOKENS = 2 * SEQ
H, F, KV = LLAMA.hidden, LLAMA.ffn, LLAMA.num_kv_heads * LLAMA.head_dim
ALONE = ParallelLayout(micro_batch=2, global_batch=2, recompute=Recompute.PRODUCTS)
CUT = replace(ALONE, tensor=TENSOR, sequence_parallel=True)
QKV, OUT, UP, DOWN = H * (H + 2 * KV), H * H, 2 * H * F, H * F
"""Elements of matrices."""
AS_IN_BF16 = ("reduce_copy_in", "rotary", "rotary_again", "repeat", "repeat_again", "rotary_d")


def built(layout: ParallelLayout, framework: str, products: ProductFormat) -> IssuedStep:
    return build_step(LLAMA, layout, seq_len=SEQ, rules=load_rules(framework), precision=Precision(products=products))


def kernels(step: IssuedStep) -> list[CompOp]:
    """Of the second layer, those that move memory."""
    ops = [op for op in step.iteration.computations if op.name.startswith("mb0.layer1.")]
    return [op for op in ops if isinstance(op.work, MemoryBound) and op.name.partition("r1.")[2] not in AS_IN_BF16]


def moved(step: IssuedStep, *, forward: bool) -> tuple[int, int]:
    """Bytes of kernels that stream, and of those that turn, in forward or after it."""
    found = [op for op in kernels(step) if (op.origin.phase is Phase.FORWARD) == forward]
    works = [op.work for op in found if isinstance(op.work, MemoryBound)]
    return (
        sum(work.num_bytes for work in works if work.access is Access.STREAM),
        sum(work.num_bytes for work in works if work.access is Access.REARRANGE),
    )


def test_forward_casts_as_inductor_does() -> None:
    # q, k and v: 2 and 2 + 3; out 2 and 2 + 1; gate and up 4 and 4 + 1; the sum of three 8; down 4 and 4 + 1.
    operands = TOKENS * ((2 + 5 + 2 + 3 + 4 + 5 + 8) * H + (4 + 5) * F)
    matrices = (2 + 3) * (QKV + OUT + UP + DOWN)
    assert moved(built(ALONE, "torchtitan_blocks", ProductFormat.FP8), forward=True) == (operands + matrices, 0)


def test_backward_casts_as_inductor_does() -> None:
    step = built(ALONE, "torchtitan_blocks", ProductFormat.FP8)
    # What is recomputed: attention's result both ways 4, gate's operand once by rows and twice by columns 4 + 3, the
    # layer's input for k and by columns for q, k and v 2 + 1 + 3.
    # Gradients: of down 2 and 4, of out 4; norms with two and three gradients 12 each; SwiGLU 6 and 11; of queries in
    # FP32 4 and 6, of keys 4 and 6, of values from all heads 2 and 2 + 2 by keys' columns.
    streamed = TOKENS * ((7 + 2 + 12 + 12 + 4 + 2) * H + 4 * KV + 6 * F)
    turned = TOKENS * ((4 + 6 + 4 + 4 + 6 + 2) * H + (6 + 2) * KV + 11 * F)
    # Matrices with a product again 2 + 1 + 1, the others 2 + 1.
    again = OUT + UP // 2 + H * KV
    turned += 4 * again + 3 * (QKV + OUT + UP + DOWN - again)
    found = moved(step, forward=False)
    assert found == (streamed, turned)


def test_with_tensor_parallelism_the_copy_of_what_was_gathered_writes_the_columns() -> None:
    step = built(CUT, "torchtitan_compiled", ProductFormat.FP8)
    forward = TOKENS * ((2 + 3 + 4 + 5 + 8) * H + (2 + 3) * H + (4 + 5) * F) // TENSOR
    forward += TOKENS * H * (2 + 2 + 4 + 4)  # two gathers of FP8 moved, two scatters of bf16
    matrices = (QKV + OUT + UP + DOWN) // TENSOR
    assert moved(step, forward=True) == (forward + 5 * matrices, 0)
    ops = {op.name.partition("layer1.")[2]: op.work for op in kernels(step)}
    turned = {"attention_gather": 2 + 3, "mlp_gather": 2 + 2}
    for name, num_bytes in turned.items():
        assert ops[f"{name}_move_again"] == MemoryBound(num_bytes * TOKENS * H, Access.REARRANGE)
    for name in ("attention_gather_d", "mlp_gather_d"):
        assert ops[f"{name}_move"] == MemoryBound(3 * TOKENS * H, Access.REARRANGE)
    # One scale for all that ranks hold in parts: 11 of forward; 11 operands and gradients and 7 matrices after it.
    scales = [op for op in step.iteration.comms if op.collective.num_bytes == 4 and ".layer1." in op.name]
    assert [sum((op.origin.phase is Phase.FORWARD) == forward for op in scales) for forward in (True, False)] == [
        11,
        18,
    ]


def test_row_scales_are_found_by_the_kernels_that_cast() -> None:
    step = built(ALONE, "torchtitan_compiled", ProductFormat.FP8_ROWWISE)
    # q, k and v: 2, an FP32 copy 4, 3; out 2 + 1; gate and up 4, 4, 2; the sum of three 8; down 4 + 1; matrices 2 + 1.
    operands = TOKENS * ((9 + 3 + 10 + 8) * H + 5 * F)
    assert moved(step, forward=True) == (operands + 3 * (QKV + OUT + UP + DOWN), 0)


def test_row_scales_cost_backward_casts_along_other_axes() -> None:
    streamed, turned = moved(built(ALONE, "torchtitan_compiled", ProductFormat.FP8_ROWWISE), forward=False)
    # Streams of hidden columns: gradient 3, attention's result again 3, gate's operand again 5; up's input gradients
    # to FP32 6; norms with what is cast with them 37 + 10 + 15 + 4 and 31 + 2 + 4; out's input gradient scaled 4,
    # attention's columns found 2; q's, k's and v's to FP32 6 + 6; queries' gradients 4 and 6, of values 2 and 2.
    per_token = (3 + 3 + 5 + 6 + 66 + 37 + 4 + 2 + 12 + 4 + 6 + 2 + 2) * H + (4 + 6 + 2) * KV + 66 * F
    # Matrices: again 3; columns 2, q's, k's and v's copied 4; gradients scaled 4; down's at once 3.
    matrices = 3 * (OUT + UP // 2 + H * KV) + 6 * QKV + 2 * (OUT + UP) + 3 * DOWN + 4 * (QKV + OUT + UP + DOWN)
    assert streamed == TOKENS * per_token + matrices
    assert turned == TOKENS * (3 * H + 5 * F) + 3 * (QKV + OUT + UP)


def test_row_scales_gather_bf16_and_find_scales_along_cut_axes_together() -> None:
    step = built(CUT, "torchtitan_compiled", ProductFormat.FP8_ROWWISE)
    calls = [op for op in step.iteration.comms if isinstance(op, CommOp) and ".layer1." in op.name]
    gathered = [op.collective.num_bytes for op in calls if "_gather" in op.name]
    assert set(gathered) == {2 * TOKENS * H}
    # FP64: for each token, and for each column of the hidden size: out and down forward, gate, up, q, k and v backward.
    found = [op.collective.num_bytes for op in calls if op.collective.num_bytes in (8 * TOKENS, 8 * H)]
    assert sorted(found) == [8 * H] * 7 + [8 * TOKENS] * 7
    names = {op.name for op in kernels(step)}
    assert not any("gather" in name for name in names)


def test_eager_casts_stay_kernels_of_their_own() -> None:
    names = {op.name.partition("layer1.")[2] for op in kernels(built(ALONE, "torchtitan", ProductFormat.FP8))}
    assert {"qkv_cast", "qkv_cast_turn", "norm", "add1", "act"} <= names
    joined = {op.name.partition("layer1.")[2] for op in kernels(built(ALONE, "torchtitan_blocks", ProductFormat.FP8))}
    assert "add1" not in joined
    assert "qkv_cast_turn" not in joined


@pytest.mark.parametrize("framework", ["torchtitan", "fsdp2", "megatron"])
def test_row_scales_are_refused_where_they_were_not_counted(framework: str) -> None:
    with pytest.raises(JobError, match="fp8_rowwise, which is modelled for torchao"):
        built(replace(ALONE, recompute=Recompute.NONE), framework, ProductFormat.FP8_ROWWISE)
