"""Memory per GPU against the formulas of Korthikanti et al. (arXiv 2205.05198, section 4) and of ZeRO (1910.02054)."""

from dataclasses import replace

import pytest

from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute, RecomputeModule, plan_stages, stage_memory
from lagom_overlap.workload.parallel.memory import layer_activation_bytes
from lagom_overlap.workload.precision import MIXED, Precision, ProductFormat

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


def test_of_every_second_layer_that_is_kept_the_scores_are_kept_too() -> None:
    """Half of the layers, and the one that is being computed again: 5 a s^2 b bytes each, over t."""
    plain = replace(TP, recompute=Recompute.LAYERS)
    (with_scores,), (without,) = (
        [stage_memory(GPT, layout, stage, S).activation_bytes for stage in plan_stages(GPT, layout)]
        for layout in (plain, replace(plain, flash_attention=True))
    )
    assert with_scores - without == (GPT.num_layers // 2 + 1) * 5 * A * S * S * B // 8


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


def test_experts_are_sharded_over_the_ranks_that_share_them() -> None:
    model = load_model("olmoe-1b-7b")
    layout = ParallelLayout(data=16, expert=8, global_batch=16, zero_stage=1)
    (stage,) = plan_stages(model, layout)
    experts = model.num_layers * model.expert_layer_params
    assert stage.num_expert_params == experts // 8
    dense = stage.num_params - stage.num_expert_params
    assert stage.shard_params(layout) == pytest.approx(dense / 16 + experts / 16, rel=1e-6)


def kept(
    name: str,
    layer: int,
    precision: Precision = MIXED,
    *,
    again: tuple[RecomputeModule, ...] = (),
    weighs_inside: bool = False,
) -> int:
    """What a layer of a named model keeps of 4,096 tokens."""
    model = load_model(name)
    recompute = Recompute.SELECTIVE if again else Recompute.NONE
    layout = ParallelLayout(recompute=recompute, recompute_modules=again)
    kind = model.kind_of(layer)
    return layer_activation_bytes(
        model, layout, 4096, recompute, precision=precision, kind=kind, weighs_inside=weighs_inside
    )


def test_a_latent_layer_keeps_its_latents_and_what_is_made_of_them() -> None:
    # Inputs of two norms and their results; latents of 1536 and 512 with 64; of each head a query, both products of the
    # keys' latent, a key and a value; the result; an MLP's gate, up and activation.
    latents, made, result = 1536 + 512 + 64, 128 * (192 + 128 + 128 + 192 + 128), 128 * 128
    rest = 4 * 7168 + 3 * 18432
    assert kept("deepseek-v3", 0) == 2 * 4096 * (rest + latents + made + result)
    again = (RecomputeModule.MLA_UP_PROJ,)
    assert kept("deepseek-v3", 0, again=again) == 2 * 4096 * (rest + latents + result)


@pytest.mark.parametrize("products", [ProductFormat.FP8, ProductFormat.FP8_CURRENT, ProductFormat.MXFP8])
def test_fp8_keeps_operands_as_they_were_cast_and_megatron_no_combined_rows(products: ProductFormat) -> None:
    fp8 = Precision(products=products)
    routed = 8 * 7168
    plain, inside = (kept("deepseek-v3", 60, weighs_inside=flag) for flag in (False, True))
    assert plain - inside == 2 * 4096 * routed
    cast = kept("deepseek-v3", 60, fp8, weighs_inside=True)
    assert inside - cast == 4096 * (2 * 7168 + routed + 9 * 2048)  # normed inputs, dispatched rows, activations


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        (RecomputeModule.MOE_ACT, 8 * 2048),
        (RecomputeModule.MOE, 2 * 8 * 7168 + 3 * 9 * 2048),
        (RecomputeModule.LAYERNORM, 2 * 7168),
        (RecomputeModule.MLP, 0),
    ],
)
def test_named_recomputation_spares_what_it_makes_again(module: RecomputeModule, spared: int) -> None:
    assert kept("deepseek-v3", 60) - kept("deepseek-v3", 60, again=(module,)) == 2 * 4096 * spared


def test_a_mamba_layer_keeps_projection_convolution_results_and_states() -> None:
    # z, x, B, C and steps; x, B, C convolved; result and normed result; an FP32 state of 128 per column for 128 tokens.
    wide, convolved, inner = 2 * 8192 + 2048 + 128, 8192 + 2048, 8192
    assert kept("nemotron-h-8b", 0) == 2 * 4096 * (2 * 4096 + wide + convolved + 2 * inner + 2 * inner)


def test_a_window_keeps_what_whole_attention_does() -> None:
    assert kept("gpt-oss-20b", 0) == kept("gpt-oss-20b", 1)


@pytest.mark.parametrize(
    ("recompute", "num_layers"),
    [
        (Recompute.FULL, 1), (Recompute.FULL, 4), (Recompute.PRODUCTS, 1), (Recompute.PRODUCTS, 2),
        (Recompute.LAYERS, 2), (Recompute.LAYERS, 4),
    ],
)  # fmt: skip
def test_recomputation_never_needs_more_than_none(recompute: Recompute, num_layers: int) -> None:
    """Of one layer nothing is saved: it is made again from an input that is counted once."""
    model = replace(load_model("llama-2-7b"), num_layers=num_layers)
    held = {}
    for each in (Recompute.NONE, recompute):
        layout = ParallelLayout(recompute=each)
        (stage,) = plan_stages(model, layout)
        held[each] = stage_memory(model, layout, stage, S).activation_bytes
    assert held[recompute] <= held[Recompute.NONE]
    if recompute is Recompute.FULL:  # one layer whole, of the others their input: 2 s b h each
        one = layer_activation_bytes(model, ParallelLayout(), S, Recompute.NONE)
        logits = held[Recompute.NONE] - num_layers * one
        assert held[recompute] == logits + one + (num_layers - 1) * 2 * S * model.hidden


@pytest.mark.parametrize("flash", [True, False])
def test_the_attentions_core_made_again_needs_the_same_however_it_is_spelled(*, flash: bool) -> None:
    """By itself or as a named module: the scores of one layer come back, and flash attention has none."""
    held = []
    for keys in (
        {"recompute": Recompute.NONE},
        {"recompute": Recompute.SELECTIVE},
        {"recompute": Recompute.SELECTIVE, "recompute_modules": (RecomputeModule.CORE_ATTN,)},
    ):
        layout = replace(TP, flash_attention=flash, **keys)
        (stage,) = plan_stages(GPT, layout)
        held.append(stage_memory(GPT, layout, stage, S).activation_bytes)
    scores = 0 if flash else 5 * A * S * S * B // 8
    assert held[1] == held[2]
    assert held[0] - held[1] == (GPT.num_layers - 1) * scores
