"""A layer's passes against the papers' counts of FLOPs and of communicated bytes."""

from dataclasses import replace

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import GroupKind, ParallelLayout, Pass, Recompute, layer_passes
from lagom_overlap.workload.parallel.layer import layer_params_per_gpu, reduced_layer_params
from lagom_overlap.workload.parallel.stage import head_passes

GPT = load_model("gpt-22b")
SEQ = 2048
PLAIN = ParallelLayout(micro_batch=4, global_batch=4, flash_attention=False)
TP = replace(PLAIN, tensor=8)
SP = replace(TP, sequence_parallel=True)


def moved(one: Pass, group: GroupKind) -> list[tuple[CollectiveKind, int]]:
    return [(comm.kind, comm.num_bytes) for comm in one.comms if comm.group is group]


def test_a_layers_flops_are_those_of_narayanan_et_al() -> None:
    # arXiv 2104.04473, appendix: forward 24 B s h^2 + 4 B s^2 h, backward twice that.
    b, s, h = 4, SEQ, GPT.hidden
    passes = layer_passes(GPT, PLAIN, SEQ)
    assert passes.forward.flops == 24 * b * s * h**2 + 4 * b * s**2 * h
    assert passes.backward.flops == 2 * passes.forward.flops


@pytest.mark.parametrize("layout", [TP, SP, replace(TP, async_tensor=True)])
def test_tensor_parallelism_shares_the_flops_evenly(layout: ParallelLayout) -> None:
    whole, cut = layer_passes(GPT, PLAIN, SEQ), layer_passes(GPT, layout, SEQ)
    assert cut.forward.flops * 8 == pytest.approx(whole.forward.flops)
    assert cut.backward.flops * 8 == pytest.approx(whole.backward.flops)


def test_tensor_parallelism_needs_two_all_reduces_each_way() -> None:
    # Shoeybi et al. (arXiv 1909.08053), section 3.
    num_bytes = 2 * 4 * SEQ * GPT.hidden
    for one in (layer_passes(GPT, TP, SEQ).forward, layer_passes(GPT, TP, SEQ).backward):
        assert moved(one, GroupKind.TENSOR) == [(CollectiveKind.ALL_REDUCE, num_bytes)] * 2
    assert moved(layer_passes(GPT, PLAIN, SEQ).forward, GroupKind.TENSOR) == []


def test_sequence_parallelism_splits_each_all_reduce_and_gathers_inputs_again() -> None:
    # Korthikanti et al. (arXiv 2205.05198), Fig. 5; the third pair in backward is the stored shard gathered again.
    passes = layer_passes(GPT, SP, SEQ)
    forward = [kind for kind, _ in moved(passes.forward, GroupKind.TENSOR)]
    assert sorted(forward) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    backward = [kind for kind, _ in moved(passes.backward, GroupKind.TENSOR)]
    assert sorted(backward) == ["all_gather"] * 4 + ["reduce_scatter"] * 2
    hidden = [comm for comm in passes.backward.comms if comm.hidden_by]
    assert [step.name for comm in hidden for step in comm.hidden_by] == ["up_d", "up_w", "qkv_d", "qkv_w"]


def test_asynchronous_all_reduces_run_beside_the_weight_gradients() -> None:
    passes = layer_passes(GPT, replace(TP, async_tensor=True), SEQ)
    assert [[step.name for step in comm.hidden_by] for comm in passes.backward.comms] == [["up_w"], ["qkv_w"]]
    blocking = layer_passes(GPT, TP, SEQ)
    assert sorted(s.name for s in passes.backward.kernels) == sorted(s.name for s in blocking.backward.kernels)


def test_full_recomputation_repeats_the_forward_and_selective_only_the_core() -> None:
    full = layer_passes(GPT, replace(TP, recompute=Recompute.FULL), SEQ)
    assert full.recompute == full.forward
    selective = layer_passes(GPT, replace(TP, recompute=Recompute.SELECTIVE), SEQ)
    assert selective.recompute.flops == 4 * 4 * SEQ**2 * GPT.hidden / 8
    assert not selective.recompute.comms
    flash = replace(TP, recompute=Recompute.SELECTIVE, flash_attention=True)
    assert layer_passes(GPT, flash, SEQ).recompute.steps == ()


@pytest.mark.parametrize(("micro_batch", "num_launches"), [(2, 1), (1, 5)])
def test_softmax_is_fused_where_heads_times_batch_is_a_multiple_of_four(micro_batch: int, num_launches: int) -> None:
    model = replace(GPT, num_heads=16, num_kv_heads=16, head_dim=GPT.hidden // 16)
    passes = layer_passes(model, replace(TP, micro_batch=micro_batch, global_batch=micro_batch), SEQ)
    (softmax,) = [step for step in passes.forward.kernels if step.name == "softmax"]
    assert softmax.num_launches == num_launches


def test_a_mixture_of_experts_computes_what_its_tokens_visit_and_exchanges_them_twice() -> None:
    model = load_model("olmoe-1b-7b")
    layout = ParallelLayout(data=8, expert=8, micro_batch=1, global_batch=8)
    passes = layer_passes(model, layout, 4096)
    experts = sum(s.work.flops for s in passes.forward.kernels if s.name in ("expert_up", "expert_down"))
    assert experts == 2 * 4096 * 8 * 3 * model.hidden * model.ffn
    sent = 2 * 4096 * 8 * model.hidden
    assert moved(passes.forward, GroupKind.EXPERT) == [(CollectiveKind.ALL_TO_ALL, sent)] * 2
    assert moved(passes.backward, GroupKind.EXPERT) == [(CollectiveKind.ALL_TO_ALL, sent)] * 2
    alone = replace(layout, data=1, expert=1, global_batch=1)
    assert layer_passes(model, alone, 4096).forward.flops == pytest.approx(passes.forward.flops)
    assert layer_params_per_gpu(model, layout) < layer_params_per_gpu(model, alone) / 4


def test_expert_backward_has_twice_the_forwards_products() -> None:
    model = load_model("deepseek-moe-16b")
    passes = layer_passes(model, ParallelLayout(flash_attention=False), 2048)
    routed = [step for step in passes.forward.kernels if step.name == "router"]
    # The router's backward is counted as one product: its weight's gradient is smaller than a launch.
    assert passes.backward.flops + routed[0].work.flops == pytest.approx(2 * passes.forward.flops)


def test_the_heads_products_are_two_per_logit_weight_each_way() -> None:
    def flops(model: TransformerModel) -> tuple[float, float]:
        forward, backward = head_passes(model, PLAIN, SEQ)
        return forward.flops, backward.flops

    by_hand = 2.0 * 4 * SEQ * GPT.vocab * GPT.hidden
    assert flops(GPT) == (by_hand, 2 * by_hand)


@pytest.mark.parametrize(("data", "expert"), [(8, 8), (16, 8), (16, 4), (8, 1)])
def test_what_is_gathered_of_a_layer_with_experts_sends_as_much_as_each_part_over_its_own_ranks(
    data: int, expert: int
) -> None:
    """A part P over g ranks sends (g - 1) / g P: dense parameters over all data ranks, experts over data / expert."""
    model = load_model("olmoe-1b-7b")
    layout = ParallelLayout(data=data, expert=expert, global_batch=data)
    experts, holders = model.expert_layer_params // expert, data // expert
    dense = model.layer_params - model.expert_layer_params
    sent = dense * (data - 1) / data + experts * (holders - 1) / holders
    assert reduced_layer_params(model, layout) * (data - 1) / data == pytest.approx(sent, rel=1e-6)
