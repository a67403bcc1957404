"""Megatron-LM's options: gathers in FP8, gradients in BF16, parameters behind the first forward, frozen weights."""

from dataclasses import replace

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost.operators import load_operators
from lagom_overlap.cost.operators.operator_times import OperatorTimes
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.workload import CommOp, Gemm, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import DType, Precision, ProductFormat
from lagom_overlap.workload.step import build_step, load_rules

MEGATRON = load_rules("megatron")

LLAMA = replace(load_model("llama-3-8b"), num_layers=2)
SEQ = 4096
HIDDEN_BYTES = SEQ * LLAMA.hidden  # of one byte per element


def built(
    products: ProductFormat = ProductFormat.PARAMETER, reduction: DType = DType.FP32, **layout: object
) -> IssuedStep:
    precision = Precision(reduction=reduction, products=products)
    return build_step(LLAMA, ParallelLayout(**layout), seq_len=SEQ, rules=MEGATRON, precision=precision)  # type: ignore[arg-type]


def gathered(step: IssuedStep, word: str) -> list[int]:
    found = [op for op in step.iteration.comms if word in op.name and op.origin.layer == 0]
    return [op.collective.num_bytes for op in found if op.collective.kind is CollectiveKind.ALL_GATHER]


@pytest.mark.parametrize(
    ("products", "bytes_each"),
    # FP8 with a scale per tensor, with one per 32 elements, FP4 with one per 16 elements; 2 where nothing is cast.
    [
        (ProductFormat.PARAMETER, 2.0),
        (ProductFormat.FP8, 1.0),
        (ProductFormat.MXFP8, 1 + 1 / 32),
        (ProductFormat.NVFP4, 1 / 2 + 1 / 16),
    ],
)
def test_transformer_engine_gathers_what_it_has_cast(products: ProductFormat, bytes_each: float) -> None:
    step = built(products, tensor=4, sequence_parallel=True)
    for word in ("attention_gather", "mlp_gather", "qkv_gather_w", "attention_gather_d"):
        assert gathered(step, word)[0] == int(bytes_each * HIDDEN_BYTES), word
    scattered = [op for op in step.iteration.comms if op.collective.kind is CollectiveKind.REDUCE_SCATTER]
    assert {op.collective.num_bytes for op in scattered if op.origin.layer == 0} == {2 * HIDDEN_BYTES}


def test_a_scale_of_the_tensors_own_is_found_over_all_ranks_of_a_gather() -> None:
    def scales(products: ProductFormat) -> int:
        step = built(products, tensor=4, sequence_parallel=True)
        return sum("_scale" in op.name and op.origin.layer == 0 for op in step.iteration.comms)

    assert scales(ProductFormat.FP8_CURRENT) == 4  # inputs of qkv and up, gradients of out and down
    assert scales(ProductFormat.FP8) == scales(ProductFormat.MXFP8) == 0


def test_gradients_in_bf16_are_added_to_a_buffer_of_half_the_bytes() -> None:
    for reduction, moved in ((DType.FP32, 8), (DType.BF16, 4)):
        products = [
            op.work for op in built(reduction=reduction).iteration.computations if op.origin.phase is Phase.WEIGHT_GRAD
        ]
        assert {work.result_bytes for work in products if isinstance(work, Gemm)} == {moved}


def test_parameters_gathered_behind_the_first_forward_hold_up_their_own_layer_alone() -> None:
    def waits(overlaps: bool) -> set[str]:
        step = built(data=8, global_batch=8, zero_stage=1, overlap_gradients=True, overlap_parameters=overlaps)
        ops = {op.name: op for op in step.iteration.ops}
        first = next(op for op in step.iteration.computations if op.origin.module == "layers.0.qkv")
        return {name for name in first.deps if isinstance(ops[name], CommOp)}

    behind = waits(overlaps=True)
    assert len(behind) == 1
    assert "layer0" in next(iter(behind))


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_only_parameters_that_stage_1_shards_are_gathered_behind_forward(zero_stage: int) -> None:
    with pytest.raises(JobError, match=f"overlap_parameters needs zero_stage = 1 and .*, not {zero_stage} and"):
        ParallelLayout(data=8, global_batch=8, zero_stage=zero_stage, overlap_parameters=True)


def test_frozen_weights_have_no_gradients_and_nothing_is_reduced_or_updated() -> None:
    trained, frozen = built(data=8, global_batch=8), built(data=8, global_batch=8, frozen=True)
    phases = {op.origin.phase for op in frozen.iteration.ops}
    assert not phases & {Phase.WEIGHT_GRAD, Phase.OPTIMIZER}
    assert not frozen.iteration.comms

    def flops(step: IssuedStep) -> float:
        return sum(op.work.flops for op in step.iteration.computations if isinstance(op.work, Gemm))

    assert flops(frozen) == pytest.approx(flops(trained) * 2 / 3)  # forward and the gradients of activations
    with pytest.raises(JobError, match="zero_stage is 1, must be 0 with frozen"):
        ParallelLayout(data=8, global_batch=8, zero_stage=1, frozen=True)


def test_products_with_a_scale_per_block_keep_a_share_of_the_rate() -> None:
    gpu = load_preset("gb200").gpu
    times = OperatorTimes(gpu, load_operators(gpu))
    plain = Gemm(16384, 8192, 8192, 1)
    ratio = times.seconds(plain) / times.seconds(replace(plain, block_scaled=True))
    assert ratio == pytest.approx(load_operators(gpu).block_share, abs=0.02)
    assert all(
        op.work.block_scaled is ("logits" not in op.name)
        for op in built(ProductFormat.MXFP8).iteration.computations
        if isinstance(op.work, Gemm)
    )
