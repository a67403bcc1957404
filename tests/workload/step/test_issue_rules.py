"""What frameworks add around a step: DDP's and Megatron's buckets, ZeRO's gathers, clipping, the optimizer."""

from collections import Counter
from dataclasses import replace

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, MemoryBound, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute
from lagom_overlap.workload.precision import DType, Precision
from lagom_overlap.workload.step import IssueRules, build_step, load_rules
from lagom_overlap.workload.streams import ALL_GATHER, REDUCE_SCATTER

DDP = load_rules("ddp")
DEEPSPEED = load_rules("deepspeed")
FSDP2 = load_rules("fsdp2")
MEGATRON = load_rules("megatron")

GPT = replace(load_model("gpt-22b"), num_layers=3, hidden=512, ffn=2048, num_heads=8, num_kv_heads=8, head_dim=64)
DATA = ("fsdp", "dp")


def built(rules: IssueRules, *, clips: bool | None = None, **layout: object) -> IssuedStep:
    fields = {"data": 8, "global_batch": 8, **layout}
    return build_step(GPT, ParallelLayout(**fields), seq_len=256, rules=rules, clips=clips)  # type: ignore[arg-type]


def by_ddp(bucket_bytes: int | None = DDP.bucket_bytes) -> IssuedStep:
    return built(DDP, bucket_bytes=bucket_bytes, overlap_gradients=True)


def reductions(step: IssuedStep) -> list[CommOp]:
    kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
    found = [op for op in step.iteration.comms if op.communicator in DATA and op.collective.kind in kinds]
    return [op for op in found if op.origin.phase is not Phase.OPTIMIZER]


def test_ddps_first_bucket_is_small_and_the_others_close_at_25_mib() -> None:
    step = by_ddp()
    sizes = [op.collective.num_bytes for op in reductions(step)]
    largest = GPT.vocab * GPT.hidden * 4 + GPT.learned_positions * GPT.hidden * 4
    assert sum(sizes) == GPT.num_params * 4
    assert sizes[0] >= MIB
    assert all(25 * MIB <= size < 25 * MIB + largest for size in sizes[1:-1])
    assert {op.collective.kind for op in reductions(step)} == {CollectiveKind.ALL_REDUCE}


def test_a_size_that_a_job_gives_ddps_buckets_is_that_of_the_first_one_too() -> None:
    """`bucket_cap_mb`, of PyTorch's own reducer: 1 MiB is the first bucket's size only where it is not given."""
    sizes = [op.collective.num_bytes for op in reductions(by_ddp(100 * MIB))]
    assert sum(sizes) == GPT.num_params * 4
    assert all(size >= 100 * MIB for size in sizes[:-1])
    assert len(sizes) < len(reductions(by_ddp()))


def test_ddp_copies_gradients_into_a_bucket_and_out_again() -> None:
    step = by_ddp()
    ops = {op.name: op for op in step.iteration.ops}
    for bucket in reductions(step):
        (copy_in,) = bucket.deps
        copied = ops[copy_in]
        assert not isinstance(copied, CommOp)
        assert copied.work == MemoryBound(2 * bucket.collective.num_bytes)
        assert ops[bucket.name.replace(".reduce", ".copy_out")].deps == (bucket.name,)


@pytest.mark.parametrize("overlaps", [True, False])
def test_megatron_reduces_buckets_beside_the_last_backward_or_everything_after_it(overlaps: bool) -> None:
    step = built(MEGATRON, overlap_gradients=overlaps, bucket_bytes=16_000_000, global_batch=24)
    found = reductions(step)
    assert sum(op.collective.num_bytes for op in found) == GPT.num_params * 4
    assert {op.origin.microbatch for op in found} == {2}
    place = {op.name: number for number, op in enumerate(step.iteration.ops)}
    last = max(place[op.name] for op in step.iteration.computations if op.origin.phase is Phase.WEIGHT_GRAD)
    assert (place[found[0].name] < last) is overlaps
    assert len(found) == 1 or all(op.collective.num_bytes >= 16_000_000 for op in found[:-1])


def test_megatrons_distributed_optimizer_scatters_gradients_and_gathers_before_the_forward() -> None:
    step = built(MEGATRON, zero_stage=1)
    ops = step.iteration.ops
    gathers = [op.name for op in step.iteration.comms if op.collective.kind is CollectiveKind.ALL_GATHER]
    assert [op.name for op in ops[: len(gathers)]] == gathers
    assert set(gathers) <= {*ops[len(gathers)].deps, *step.waits[ops[len(gathers)].name]}
    assert {op.collective.kind for op in reductions(step)} == {CollectiveKind.REDUCE_SCATTER}
    updated = sum(op.work.num_bytes for op in step.iteration.computations if op.name.endswith(".update"))  # type: ignore[union-attr]
    assert updated == pytest.approx(28 * GPT.num_params / 8, rel=1e-3)


def weight_products(rules: IssueRules, **layout: object) -> list[CompOp]:
    """The products that make weight gradients."""
    ops = built(rules, **layout).iteration.computations
    return [
        op for op in ops if isinstance(op.work, Gemm) and op.origin is not None and op.origin.phase is Phase.WEIGHT_GRAD
    ]


def sums(rules: IssueRules, **layout: object) -> list[CompOp]:
    """The kernels that add a weight gradient to those before."""
    return [op for op in built(rules, **layout).iteration.computations if op.name.endswith("_sum")]


def test_megatrons_products_add_to_an_fp32_buffer_themselves() -> None:
    products = weight_products(MEGATRON)
    assert products
    assert {op.work.result_bytes for op in products} == {8}  # type: ignore[union-attr]
    assert not sums(MEGATRON)


def test_of_two_micro_batches_the_later_product_adds_to_what_the_earlier_made() -> None:
    products = weight_products(MEGATRON, global_batch=16)
    firsts = {op.name.partition(".")[2]: op.name for op in products if op.name.startswith("mb0.")}
    later = [op for op in products if op.name.startswith("mb1.")]
    assert len(later) == len(firsts) > 0
    assert all(firsts[op.name.partition(".")[2]] in op.deps for op in later)


def test_deepspeed_adds_weight_gradients_by_a_kernel_of_their_own_format() -> None:
    found = sums(DEEPSPEED, zero_stage=2)
    assert found
    assert all(isinstance(op.work, MemoryBound) and op.work.num_launches == 1 for op in found)
    made = {op.name: op.work for op in weight_products(DEEPSPEED, zero_stage=2)}
    for op in found:
        product = made.get(op.name.removesuffix("_sum") + "_w")
        if isinstance(product, Gemm):
            assert product.result_bytes is None
            assert op.work.num_bytes == 3 * 2 * product.m * product.n * product.batch  # type: ignore[union-attr]


def test_fsdp2_adds_nothing_that_costs() -> None:
    assert not sums(FSDP2, zero_stage=3)
    assert {op.work.result_bytes for op in weight_products(FSDP2, zero_stage=3)} == {None}  # type: ignore[union-attr]


@pytest.mark.parametrize(("zero_stage", "gathers"), [(2, 1), (3, 2)])
def test_deepspeed_gathers_once_or_in_both_passes_and_reduces_in_every_micro_batch(
    zero_stage: int, gathers: int
) -> None:
    step = built(DEEPSPEED, zero_stage=zero_stage, global_batch=16)
    kinds = Counter((op.collective.kind, op.origin.layer) for op in step.iteration.comms if op.communicator == "fsdp")
    batches = 2 if zero_stage == 3 else 1
    for layer in range(GPT.num_layers):
        # The last layer stays gathered where backward begins; it is the tied table's neighbour here.
        assert kinds[CollectiveKind.ALL_GATHER, layer] in (gathers * batches, batches)
        assert kinds[CollectiveKind.REDUCE_SCATTER, layer] == 2
    streams = {op.collective.kind: op.stream for op in step.iteration.comms if op.communicator == "fsdp"}
    assert streams[CollectiveKind.ALL_GATHER] == ALL_GATHER
    assert streams[CollectiveKind.REDUCE_SCATTER] == REDUCE_SCATTER


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_unit_is_gathered_when_the_one_before_it_by_prefetch_begins(prefetch: int) -> None:
    step = built(DEEPSPEED, zero_stage=3, prefetch=prefetch)
    place = {op.name: number for number, op in enumerate(step.iteration.ops)}
    gather, layer = "mb0.layer2.gather", 2 - prefetch
    assert place[gather] < place[f"mb0.layer{layer}.norm"]
    assert layer == 0 or place[f"mb0.layer{layer - 1}.add2"] < place[gather]


def test_clipping_stands_between_the_reductions_and_the_optimizer() -> None:
    for rules, default in ((MEGATRON, True), (DDP, False)):
        for asked in (None, True, False):
            step = built(rules, clips=asked)
            names = [op.name for op in step.iteration.ops if op.origin.phase is Phase.OPTIMIZER]
            assert any(name.startswith("clip.") for name in names) is (default if asked is None else asked)
    updates = [op for op in built(DDP, clips=True).iteration.ops if op.name.endswith(".update")]
    assert all("clip.scale" in op.deps for op in updates)


def test_full_recomputation_repeats_the_forward_and_selective_only_the_core() -> None:
    def flops(recompute: Recompute, phase: Phase, *, flash: bool = False) -> float:
        step = built(MEGATRON, recompute=recompute, flash_attention=flash).iteration
        products = [op for op in step.computations if isinstance(op.work, Gemm) and op.origin.layer is not None]
        return sum(op.work.flops for op in products if op.origin.phase is phase)  # type: ignore[union-attr]

    whole = flops(Recompute.FULL, Phase.FORWARD)
    assert flops(Recompute.FULL, Phase.RECOMPUTE) == whole
    core = 3 * 4 * 256**2 * GPT.hidden
    assert flops(Recompute.SELECTIVE, Phase.RECOMPUTE) == core
    assert flops(Recompute.SELECTIVE, Phase.RECOMPUTE, flash=True) == 0


def test_four_bytes_of_everything_double_what_is_moved_and_read() -> None:
    single = Precision(DType.FP32, DType.FP32, DType.FP32)
    layout = ParallelLayout(data=8, tensor=2, zero_stage=3, global_batch=8)
    wide = build_step(GPT, layout, seq_len=256, rules=DEEPSPEED, precision=single).iteration
    half = build_step(GPT, layout, seq_len=256, rules=DEEPSPEED, precision=replace(single, parameter=DType.BF16))
    narrow = {op.name: op for op in half.iteration.comms}
    for op in wide.comms:
        if op.communicator == "tp" and "loss" not in op.name and "clip" not in op.name:
            assert op.collective.num_bytes == 2 * narrow[op.name].collective.num_bytes


def test_an_unknown_framework_names_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown framework 'fsdp'.*fsdp2"):
        load_rules("fsdp")


@pytest.mark.parametrize("name", ["torchtitan", "torchtitan_compiled"])
def test_torchtitans_context_parallelism_is_a_ring_whose_results_are_merged(name: str) -> None:
    # torch/distributed/tensor/experimental/_attention.py on keys and values that repeat_kv gave every head.
    rules, context, tokens = load_rules(name), 4, 256 // 4
    step = built(rules, data=2, context=context, global_batch=2, zero_stage=3)
    row = tokens * GPT.hidden
    calls = Counter((op.collective.kind, op.collective.num_bytes, op.origin.phase) for op in ring_of(step))
    assert calls == {
        (CollectiveKind.ALL_GATHER, 2 * context * row * 2, Phase.FORWARD): GPT.num_layers,
        (CollectiveKind.ALL_GATHER, 2 * context * row * 2, Phase.BACKWARD): GPT.num_layers,
        (CollectiveKind.SEND_RECV, 2 * row * 4, Phase.BACKWARD): GPT.num_layers * context,
    }
    merges = {op.name: op.work.num_bytes for op in step.iteration.computations if "merge" in op.name}  # type: ignore[union-attr]
    forward, backward = rules.ring.merge_bytes  # type: ignore[union-attr]
    assert merges["mb0.layer0.attention_merge"] == forward * (context - 1) * row
    assert merges["mb0.layer0.attention_d_merge"] == backward * (context - 1) * row
    # Traced collectives are waited for before the attention; eager ones run behind it.
    waits = step.waits.get("mb0.layer0.attention", ())
    assert ("mb0.layer0.attention_keys" in waits) is (name == "torchtitan_compiled")


def test_megatrons_context_parallelism_moves_its_own_heads_behind_one_attention() -> None:
    model = replace(GPT, num_kv_heads=2)
    layout = ParallelLayout(data=2, context=4, global_batch=2)
    step = build_step(model, layout, seq_len=256, rules=MEGATRON)
    assert {op.collective.num_bytes for op in ring_of(step)} == {2 * 2 * 64 * 256 * 2, 2 * 2 * 64 * 256 * 2 * 2}
    assert not any("merge" in op.name for op in step.iteration.ops)


def ring_of(step: IssuedStep) -> list[CommOp]:
    return [op for op in step.iteration.comms if op.communicator == "cp"]
