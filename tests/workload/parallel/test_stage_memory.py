"""Memory per GPU against the formulas of Korthikanti et al. (arXiv 2205.05198, section 4) and of ZeRO (1910.02054)."""

from dataclasses import replace

import pytest

from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute, plan_stages, stage_memory
from lagom_overlap.workload.parallel.memory import layer_activation_bytes

GPT = load_model("gpt-175b")
S, B, H, A = 2048, 1, GPT.hidden, GPT.num_heads
TP = ParallelLayout(tensor=8, flash_attention=False)


def test_activations_of_a_layer_follow_the_papers_table_2() -> None:
    t, sbh, scores = 8, S * B * H, 5 * A * S / H
    plain = replace(TP, tensor=1)
    cut = replace(TP, sequence_parallel=True)
    none, selective, full = Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL
    assert layer_activation_bytes(GPT, plain, S, none) == pytest.approx(sbh * (34 + scores))
    assert layer_activation_bytes(GPT, TP, S, none) == pytest.approx(sbh * (10 + 24 / t + scores / t))
    assert layer_activation_bytes(GPT, cut, S, none) == pytest.approx(sbh / t * (34 + scores))
    assert layer_activation_bytes(GPT, cut, S, selective) == pytest.approx(sbh / t * 34)
    assert layer_activation_bytes(GPT, TP, S, full) == 2 * sbh


def test_flash_attention_keeps_no_scores() -> None:
    flash = replace(TP, flash_attention=True)
    selective = layer_activation_bytes(GPT, TP, S, Recompute.SELECTIVE)
    assert layer_activation_bytes(GPT, flash, S, Recompute.NONE) == selective


@pytest.mark.parametrize(("zero_stage", "per_param"), [(0, 18.0), (1, 6 + 12 / 8), (2, 2 + 16 / 8)])
def test_zero_shards_optimizer_then_gradients(zero_stage: int, per_param: float) -> None:
    model = load_model("llama-2-7b")
    layout = ParallelLayout(data=8, global_batch=8, zero_stage=zero_stage)
    (stage,) = plan_stages(model, layout)
    memory = stage_memory(model, layout, stage, 2048)
    held = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
    assert held == pytest.approx(per_param * model.num_params, rel=1e-3)


def test_zero_3_shards_the_parameters_and_holds_the_layers_in_flight() -> None:
    model = load_model("llama-2-7b")
    layout = ParallelLayout(data=8, global_batch=8, zero_stage=3, prefetch=2)
    (stage,) = plan_stages(model, layout)
    memory = stage_memory(model, layout, stage, 2048)
    assert memory.parameter_bytes == pytest.approx(2 * (model.num_params / 8 + 3 * model.layer_params), rel=1e-3)


def test_hybrid_sharding_shares_out_what_a_group_holds() -> None:
    model = load_model("llama-2-7b")
    held = {}
    for replicate in (1, 2):
        layout = ParallelLayout(data=8, global_batch=8, zero_stage=3, replicate=replicate)
        (stage,) = plan_stages(model, layout)
        memory = stage_memory(model, layout, stage, 2048)
        held[replicate] = memory.gradient_bytes + memory.optimizer_bytes
    assert held[2] == pytest.approx(16 * model.num_params / 4, rel=1e-6)
    assert held[1] == pytest.approx(held[2] / 2, rel=1e-6)


def test_no_more_layers_are_gathered_than_there_are() -> None:
    model = load_model("llama-2-7b")
    layout = ParallelLayout(data=8, global_batch=8, zero_stage=3, prefetch=10_000)
    (stage,) = plan_stages(model, layout)
    layers = model.num_layers * model.layer_params
    gathered = stage_memory(model, layout, stage, 2048).parameter_bytes
    assert gathered == pytest.approx(2 * (model.num_params / 8 + layers), rel=1e-3)


def test_parameters_of_all_stages_and_ranks_are_the_models() -> None:
    layout = ParallelLayout(tensor=8, pipeline=12, flash_attention=False)
    stages = plan_stages(GPT, layout)
    # Norms, biases and positions (0.02 %) are counted on every rank, a tied table on both ends.
    held = 8 * sum(stage.num_params for stage in stages)
    assert held == pytest.approx(GPT.num_params + GPT.vocab * GPT.hidden, rel=2e-3)
    assert [stage.tied_params > 0 for stage in stages] == [True, *[False] * 10, True]


def test_experts_are_sharded_over_the_ranks_that_share_them() -> None:
    model = load_model("olmoe-1b-7b")
    layout = ParallelLayout(data=16, expert=8, global_batch=16, zero_stage=1)
    (stage,) = plan_stages(model, layout)
    experts = model.num_layers * model.expert_layer_params
    assert stage.num_expert_params == experts // 8
    dense = stage.num_params - stage.num_expert_params
    assert stage.shard_params(layout) == pytest.approx(dense / 16 + experts / 16, rel=1e-6)
