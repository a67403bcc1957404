"""A layer's operators against the papers' counts of FLOPs and of communicated bytes."""

from dataclasses import replace
from fractions import Fraction

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload import Attention, CompOp, Gemm, MemoryBound, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.rewrite.pieces import piece
from lagom_overlap.workload.step import build_step, load_rules

MEGATRON = load_rules("megatron")

GPT = replace(load_model("gpt-22b"), num_layers=1)
SEQ = 2048
PLAIN = ParallelLayout(micro_batch=4, global_batch=4, flash_attention=False)
TP = replace(PLAIN, tensor=8)
SP = replace(TP, sequence_parallel=True)
FORWARD, BACKWARD = (Phase.FORWARD,), (Phase.BACKWARD, Phase.WEIGHT_GRAD)


def step(model: TransformerModel, layout: ParallelLayout, seq_len: int = SEQ) -> IssuedStep:
    return build_step(model, layout, seq_len=seq_len, rules=MEGATRON)


def of_layer(built: IssuedStep, phases: tuple[Phase, ...]) -> list[CompOp]:
    return [op for op in built.iteration.computations if op.origin.layer is not None and op.origin.phase in phases]


def flops(built: IssuedStep, phases: tuple[Phase, ...]) -> float:
    works = [op.work for op in of_layer(built, phases)]
    return sum(work.flops for work in works if isinstance(work, Gemm | Attention))


def moved(built: IssuedStep, phases: tuple[Phase, ...], group: str = "tp") -> list[tuple[CollectiveKind, int]]:
    comms = [op for op in built.iteration.comms if op.origin.layer is not None and op.origin.phase in phases]
    return [(op.collective.kind, op.collective.num_bytes) for op in comms if op.communicator == group]


def test_a_layers_flops_are_those_of_narayanan_et_al() -> None:
    # arXiv 2104.04473, appendix: forward 24 B s h^2 + 4 B s^2 h, backward twice that.
    b, s, h = 4, SEQ, GPT.hidden
    built = step(GPT, PLAIN)
    assert flops(built, FORWARD) == 24 * b * s * h**2 + 4 * b * s**2 * h
    assert flops(built, BACKWARD) == 2 * flops(built, FORWARD)


@pytest.mark.parametrize("layout", [TP, SP, replace(TP, async_tensor=True)])
def test_tensor_parallelism_shares_the_flops_evenly(layout: ParallelLayout) -> None:
    whole, cut = step(GPT, PLAIN), step(GPT, layout)
    for phases in (FORWARD, BACKWARD):
        assert flops(cut, phases) * 8 == pytest.approx(flops(whole, phases))


def test_tensor_parallelism_needs_two_all_reduces_each_way() -> None:
    # Shoeybi et al. (arXiv 1909.08053), section 3.
    num_bytes = 2 * 4 * SEQ * GPT.hidden
    for phases in (FORWARD, BACKWARD):
        assert moved(step(GPT, TP), phases) == [(CollectiveKind.ALL_REDUCE, num_bytes)] * 2
    assert moved(step(GPT, PLAIN), FORWARD) == []


def test_sequence_parallelism_splits_each_all_reduce_and_gathers_inputs_again() -> None:
    # Korthikanti et al. (arXiv 2205.05198), Fig. 5; the third pair in backward is the stored shard gathered again.
    built = step(GPT, SP)
    assert sorted(kind for kind, _ in moved(built, FORWARD)) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert sorted(kind for kind, _ in moved(built, BACKWARD)) == ["all_gather"] * 4 + ["reduce_scatter"] * 2


@pytest.mark.parametrize(("layout", "hidden"), [(TP, False), (replace(TP, async_tensor=True), True), (SP, True)])
def test_the_weights_gradient_runs_beside_the_reduction_of_the_inputs(layout: ParallelLayout, hidden: bool) -> None:
    built = step(GPT, layout)
    reduction = "mb0.layer0.up_reduce_d"
    assert (reduction in built.waits.get("mb0.layer0.up_w", ())) is not hidden
    assert reduction not in next(op for op in built.iteration.ops if op.name == "mb0.layer0.up_w").deps


@pytest.mark.parametrize(("micro_batch", "num_launches"), [(2, 1), (1, 5)])
def test_softmax_is_fused_where_heads_times_batch_is_a_multiple_of_four(micro_batch: int, num_launches: int) -> None:
    model = replace(GPT, num_heads=16, num_kv_heads=16, head_dim=GPT.hidden // 16)
    built = step(model, replace(TP, micro_batch=micro_batch, global_batch=micro_batch))
    (softmax,) = [op.work for op in built.iteration.computations if op.name.endswith(".softmax")]
    assert isinstance(softmax, MemoryBound)
    assert softmax.num_launches == num_launches


def test_a_mixture_of_experts_computes_what_its_tokens_visit_and_exchanges_them_twice() -> None:
    model = replace(load_model("olmoe-1b-7b"), num_layers=1)
    layout = ParallelLayout(data=8, expert=8, micro_batch=1, global_batch=8)
    built = step(model, layout, 4096)
    names = ("expert_up", "expert_down")
    experts = [op.work for op in of_layer(built, FORWARD) if op.name.rpartition(".")[2] in names]
    products = sum(work.flops for work in experts if isinstance(work, Gemm))
    assert products == 2 * 4096 * 8 * 3 * model.hidden * model.ffn
    sent = 2 * 4096 * 8 * model.hidden
    for phases in (FORWARD, BACKWARD):
        assert moved(built, phases, "ep") == [(CollectiveKind.ALL_TO_ALL, sent)] * 2
    alone = step(model, replace(layout, data=1, expert=1, global_batch=1), 4096)
    assert flops(alone, FORWARD) == pytest.approx(flops(built, FORWARD))


def test_the_heads_products_are_two_per_logit_weight_each_way() -> None:
    works = {op.name: op.work for op in step(GPT, PLAIN).iteration.computations}
    by_hand = 2.0 * 4 * SEQ * GPT.vocab * GPT.hidden
    products = [works[f"mb0.head.logits{tail}"] for tail in ("", "_d", "_w")]
    assert [work.flops for work in products if isinstance(work, Gemm)] == [by_hand] * 3


@pytest.mark.parametrize(("data", "expert"), [(8, 8), (16, 8), (16, 4), (8, 1)])
def test_what_is_gathered_of_a_layer_with_experts_goes_over_each_parts_own_ranks(data: int, expert: int) -> None:
    """Dense parameters over all data ranks, experts over data / expert; alone, an expert is not gathered."""
    model = replace(load_model("olmoe-1b-7b"), num_layers=1)
    layout = ParallelLayout(data=data, expert=expert, global_batch=data, zero_stage=3)
    built = build_step(model, layout, seq_len=512, rules=MEGATRON)
    experts, holders = model.expert_layer_params // expert, data // expert
    gathers = [op for op in built.iteration.comms if op.name.startswith("mb0.layer0") and op.name.endswith("gather")]
    found = {op.collective.num_ranks: op.collective.num_bytes for op in gathers}
    dense = model.layer_params - model.expert_layer_params
    if expert == 1:
        assert sorted(op.collective.num_bytes for op in gathers) == sorted([2 * dense, 2 * experts])
        return
    assert found[data] == 2 * dense
    assert found.get(holders) == (2 * experts if holders > 1 else None)


@pytest.mark.parametrize("model", ["phi-2", "llama-3-8b", "gpt-22b"])
@pytest.mark.parametrize("layout", [PLAIN, TP, SP])
def test_half_of_a_product_along_an_axis_is_half_of_the_axis_in_the_product(model: str, layout: ParallelLayout) -> None:
    """m, n or k of a piece is the axis's size over the number of pieces, so a cut that divides the axis is possible."""
    built = step(replace(load_model(model), num_layers=1), layout)
    for op in built.iteration.computations:
        if not isinstance(op.work, Gemm) or op.shards is None:
            continue
        for axis, size in enumerate(op.shards.sizes):
            half = piece(op, axis, (Fraction(0), Fraction(1, 2))).work
            assert isinstance(half, Gemm), op.name
            dims = {name: (getattr(op.work, name), getattr(half, name)) for name in ("m", "n", "k")}
            assert [whole for whole, part in dims.values() if whole != part] == [size], (op.name, axis, dims)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_a_ring_of_context_parallelism_sees_the_keys_of_its_steps(context: int) -> None:
    """Brute force over ranks that hold two of 2 x context parts of a sequence, the n-th from both ends.

    A rank meets one other's keys in a step. Where those came earlier half of them count for all its queries, where they
    came later all of them for half its queries; its own are causal. `reach` is twice the keys of a query in a call.
    """
    layout = ParallelLayout(data=1, context=context, global_batch=1)
    built = step(GPT, layout)
    for part, passes in (("attention", 1.0), ("attention_d", 2.5)):
        work = next(op.work for op in built.iteration.computations if op.name == f"mb0.layer0.{part}")
        assert isinstance(work, Attention)
        assert work.backward == (part == "attention_d")
        size, pairs, least = SEQ // (2 * context), 0.0, float("inf")
        for other in range(context):
            mine = [*range(size), *range(SEQ - size, SEQ)]  # rank 0
            theirs = [*range(other * size, (other + 1) * size), *range(SEQ - (other + 1) * size, SEQ - other * size)]
            seen = [sum(key <= query for key in theirs) for query in mine]
            rows = sum(count > 0 for count in seen)
            pairs += sum(seen)
            least = min(least, 2 * sum(seen) / rows)
        assert work.flops == pytest.approx(4 * work.num_heads * work.head_dim * pairs * passes, rel=2e-3)
        assert work.reach == pytest.approx(least, rel=2e-3)
