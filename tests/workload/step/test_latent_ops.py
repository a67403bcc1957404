"""Latent attention, dense first layers and multi-token prediction: counts by hand, from the papers' equations."""

from collections import Counter
from dataclasses import replace

import pytest

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Attention, CommOp, Gemm, MemoryBound, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule, Recompute, RecomputeModule, plan_stages
from lagom_overlap.workload.parallel.memory import layer_activation_bytes, stage_memory
from lagom_overlap.workload.parallel.pipeline_layout import parse_pipeline_layout
from lagom_overlap.workload.parallel.stage import chunk_layers, layer_params_per_gpu
from lagom_overlap.workload.precision import Precision, ProductFormat
from lagom_overlap.workload.step import build_step, load_rules

FSDP2 = load_rules("fsdp2")
MEGATRON = load_rules("megatron")

SEQ = 4096
V3 = load_model("deepseek-v3")
DENSE = replace(V3.with_mtp(0), num_layers=2, num_experts=0, experts_per_token=0, shared_ffn=0, pattern="latent+mlp")
SMALL = replace(V3, num_layers=5, pattern="3*latent+mlp 2*latent+experts")
ALONE = ParallelLayout()


def step(model: TransformerModel, layout: ParallelLayout = ALONE, **options: object) -> IssuedStep:
    return build_step(model, layout, seq_len=SEQ, rules=MEGATRON, **options)  # type: ignore[arg-type]


def gemms(built: IssuedStep, *phases: Phase) -> float:
    works = [op.work for op in built.iteration.computations if op.origin.phase in phases]
    return sum(work.flops for work in works if isinstance(work, Gemm))


def work_of(built: IssuedStep, name: str) -> object:
    return next(op.work for op in built.iteration.computations if op.name == name)


def test_a_latent_layers_products_are_those_of_its_seven_matrices() -> None:
    # DeepSeek-V2, Eqs 9 to 16 and section 4.2 of DeepSeek-V3: 7168 -> 1536 -> 128 x 192, 7168 -> 576, 512 -> 128 x 256,
    # 128 x 128 -> 7168, and a gated MLP of 18432.
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    layers, head = 2 * (attention + 3 * 7168 * 18432), 129280 * 7168
    built = step(DENSE)
    assert gemms(built, Phase.FORWARD) == 2 * SEQ * (layers + head)
    assert gemms(built, Phase.BACKWARD, Phase.WEIGHT_GRAD) == 2 * gemms(built, Phase.FORWARD)


def test_queries_without_a_latent_have_one_matrix() -> None:
    model = replace(load_model("deepseek-v2-lite"), num_layers=1)
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert gemms(step(model), Phase.FORWARD) == 2 * SEQ * (attention + 3 * 2048 * 10944 + 102400 * 2048)


def test_attention_multiplies_queries_of_192_columns_and_values_of_128() -> None:
    built = step(DENSE)
    forward, backward = work_of(built, "mb0.layer0.attention"), work_of(built, "mb0.layer0.attention_d")
    assert isinstance(forward, Attention)
    assert isinstance(backward, Attention)
    # Causal: s^2 / 2 pairs; Q K^T and P V. Backward: Q K^T again, dP of 128, dV of 128, dQ and dK of 192.
    assert forward.flops == pytest.approx(128 * SEQ**2 * (192 + 128))
    assert backward.flops == pytest.approx(128 * SEQ**2 * (3 * 192 + 2 * 128))


@pytest.mark.parametrize("layout", [ParallelLayout(tensor=8), ParallelLayout(tensor=8, sequence_parallel=True)])
def test_tensor_parallelism_cuts_heads_and_leaves_the_projections_down_whole(layout: ParallelLayout) -> None:
    whole, cut = step(DENSE), step(DENSE, layout)
    down = 2 * 2 * SEQ * 7168 * (1536 + 576)  # two layers
    rows = 8 if layout.sequence_parallel else 1  # own rows, or all of them on every rank
    assert gemms(cut, Phase.FORWARD) == pytest.approx((gemms(whole, Phase.FORWARD) - down) / 8 + down / rows)


def test_sequence_parallelism_gathers_latents_and_not_the_hidden_state() -> None:
    built = step(DENSE, ParallelLayout(tensor=8, sequence_parallel=True))
    comms = [op for op in built.iteration.comms if op.origin.layer == 0 and op.origin.phase is Phase.FORWARD]
    gathered = sorted(
        op.collective.num_bytes // (2 * SEQ) for op in comms if op.collective.kind is CollectiveKind.ALL_GATHER
    )
    assert gathered == [64, 512, 1536, 7168]  # positions, both latents, the MLP's input


def test_a_layers_matrices_on_a_gpu_are_its_parameters_but_norms() -> None:
    layout = ParallelLayout(tensor=4, data=8, expert=8, global_batch=8, sequence_parallel=True)
    built = step(SMALL.with_mtp(0), layout)
    for layer, kind in enumerate(SMALL.layer_kinds):
        small = SMALL.params_of(kind).small
        works = [
            op.work
            for op in built.iteration.computations
            if op.origin.layer == layer and op.origin.phase is Phase.WEIGHT_GRAD and isinstance(op.work, Gemm)
        ]
        held = sum(work.m * work.n * work.batch for work in works)
        routers = 7168 * 256 * 3 // 4 if kind.mlp == "experts" else 0  # whole here, a quarter in the count
        assert held == layer_params_per_gpu(SMALL, layout, kind) - small + routers


def test_eager_frameworks_turn_then_copy_queries_keys_and_values() -> None:
    layout = ParallelLayout(data=2, zero_stage=3, global_batch=2)
    for rules in (FSDP2, load_rules("torchtitan")):
        built = build_step(DENSE, layout, seq_len=SEQ, rules=rules)
        join = work_of(built, "mb0.layer0.latent_join")
        assert join == MemoryBound(4 * SEQ * 128 * (2 * 192 + 128), num_launches=3)
    join = work_of(step(DENSE), "mb0.layer0.latent_join")
    assert join == MemoryBound(2 * SEQ * (128 * 256 + 64 + 128 * 320))


@pytest.mark.parametrize(
    ("modules", "products"),
    [
        (["mla_up_proj"], 5 * (1536 * 128 * 192 + 512 * 128 * 256)),
        (["mlp"], 3 * 3 * 7168 * 18432),
        (["moe"], 2 * (9 * 3 * 7168 * 2048 + 7168 * 256)),
        (["moe_act", "layernorm", "core_attn"], 0),
    ],
)
def test_selective_recomputation_computes_the_named_parts_again(modules: list[str], products: int) -> None:
    layout = ParallelLayout(
        recompute=Recompute.SELECTIVE, recompute_modules=tuple(RecomputeModule(name) for name in modules)
    )
    plain, again = step(SMALL.with_mtp(0)), step(SMALL.with_mtp(0), layout)
    assert gemms(again, Phase.RECOMPUTE) == 2 * SEQ * products
    assert gemms(again, Phase.FORWARD, Phase.BACKWARD) == gemms(plain, Phase.FORWARD, Phase.BACKWARD)
    assert any(op.origin.phase is Phase.RECOMPUTE for op in again.iteration.computations)


def test_a_prediction_adds_a_projection_a_layer_and_the_head() -> None:
    plain, predicting = step(SMALL.with_mtp(0)), step(SMALL)
    one = SMALL.params_of(SMALL.layer_kinds[-1]).active
    added = 2 * SEQ * (2 * 7168 * 7168 + one + 129280 * 7168)
    assert gemms(predicting, Phase.FORWARD) - gemms(plain, Phase.FORWARD) == added
    backward = (Phase.BACKWARD, Phase.WEIGHT_GRAD)
    assert gemms(predicting, *backward) - gemms(plain, *backward) == 2 * added


def test_gradients_of_a_hidden_state_that_two_read_are_summed() -> None:
    """Each prediction's input is also read by its own head: one sum a prediction, of two gradients into a third."""
    built = step(SMALL.with_mtp(2))
    sums = {op.name: op for op in built.iteration.ops if ".mtp" in op.name and op.name.endswith("_sum_d")}
    assert {name: op.deps for name, op in sums.items()} == {
        "mb0.mtp0.output_sum_d": ("mb0.mtp1.hidden_norm_d", "mb0.mtp0.norm_d"),
        "mb0.mtp0.input_sum_d": ("mb0.mtp0.hidden_norm_d", "mb0.head.norm_d"),
    }
    assert {op.work for op in sums.values()} == {MemoryBound(3 * 2 * SEQ * 7168)}
    readers = {
        op.name: {reader.name for reader in built.iteration.ops if op.name in reader.deps} for op in sums.values()
    }
    layers = {"mb0.mtp0.output_sum_d": "mb0.layer5.", "mb0.mtp0.input_sum_d": "mb0.layer4."}
    for name, layer in layers.items():
        assert any(reader.startswith(layer) for reader in readers[name]), readers[name]


def test_tables_that_a_prediction_shares_are_reduced_and_updated_once() -> None:
    layout = ParallelLayout(data=8, expert=8, global_batch=16, zero_stage=1, overlap_gradients=True)
    built = step(SMALL, layout)
    updated = sum(op.name in ("embed.update", "head.update") for op in built.iteration.ops)
    assert updated == 2
    reduced = sum(op.collective.num_bytes for op in built.iteration.comms if op.name.endswith(".scatter"))
    params = SMALL.num_params + SMALL.mtp_params
    experts = 3 * SMALL.params_of(SMALL.layer_kinds[-1]).experts  # of three layers, on eight ranks alone: none travels
    assert reduced == 4 * (params - experts)


def test_the_last_stage_holds_a_second_embedding_for_its_prediction() -> None:
    layout = ParallelLayout(
        pipeline=2,
        data=8,
        expert=8,
        global_batch=16,
        zero_stage=1,
        pipeline_layout="Et*3|ttmL",
    )
    for rank in (0, 1):
        built = step(SMALL, layout, rank=rank)
        assert any(op.name == "embed.tied_reduce" for op in built.iteration.comms)
    stages = plan_stages(SMALL, layout)
    held = sum(stage.num_params - stage.num_expert_params for stage in stages)
    dense = [SMALL.params_of(kind) for kind in (*SMALL.layer_kinds, *SMALL.mtp_kinds)]
    around = 2 * 7168 * 7168 + 3 * 7168
    assert held == sum(each.total - each.experts for each in dense) + around + 3 * 129280 * 7168


TURNS = ParallelLayout(
    pipeline=3,
    chunks=2,
    schedule=PipelineSchedule.INTERLEAVED,
    data=2,
    expert=2,
    zero_stage=1,
    global_batch=6,
    overlap_p2p=True,
)
APART, TOGETHER = replace(TURNS, pipeline_layout="Et|t|t|tt|m|L"), replace(TURNS, pipeline_layout="Et|t|t|t|t|mL")


def stages_of(layout: ParallelLayout, model: TransformerModel = SMALL) -> list[IssuedStep]:
    return [step(model, layout, rank=rank) for rank in range(layout.pipeline)]


def works_of(built: list[IssuedStep]) -> Counter[object]:
    """Computations of all stages by name, but for the optimizer's, which are one per stage."""
    ops = [op for each in built for op in each.iteration.computations]
    return Counter((op.name, op.work) for op in ops if op.origin.phase is not Phase.OPTIMIZER)


@pytest.mark.parametrize("model", [SMALL, SMALL.with_mtp(0)])
def test_stages_compute_the_same_wherever_predictions_and_head_are(model: TransformerModel) -> None:
    apart, together = APART.pipeline_layout, TOGETHER.pipeline_layout
    if not model.mtp_layers:
        apart, together = apart.replace("|m|", "|").replace("tt", "t|t"), together.replace("m", "")
    layouts = [replace(TURNS, pipeline_layout=text) for text in (apart, together)]
    first, second = (works_of(stages_of(layout, model)) for layout in layouts)
    assert first == second
    assert sum(stage.num_params for stage in plan_stages(model, layouts[0])) == sum(
        stage.num_params for stage in plan_stages(model, layouts[1])
    )


def test_predictions_before_the_heads_chunk_send_it_both_hidden_states() -> None:
    """NVIDIA/Megatron-LM: the last chunk makes the losses, of hidden states that are joined along the sequence."""
    first, predicting, last = stages_of(APART)
    hidden = SEQ * 7168 * 2

    def sent(built: IssuedStep) -> dict[str, int]:
        comms = [op for op in built.iteration.comms if op.communicator == "pp" and op.origin.microbatch == 0]
        return {op.name.partition(".")[2]: op.collective.num_bytes for op in comms}

    assert sent(predicting) == {
        "chunk1.send": hidden,
        "chunk4.send": 2 * hidden,
        "chunk4.send_d": hidden,
        "chunk1.send_d": hidden,
    }
    assert sent(last) == {"chunk2.send": hidden, "chunk5.send_d": 2 * hidden, "chunk2.send_d": hidden}
    logits = [op.name for op in last.iteration.computations if op.name.endswith(".logits")]
    assert logits == [f"mb{batch}.{who}.logits" for batch in range(3) for who in ("mtp0", "head")]
    assert [op.name for op in predicting.iteration.computations if "logits" in op.name] == []
    assert [any(op.name == "embed.tied_reduce" for op in built.iteration.comms) for built in stages_of(APART)] == [
        True,
        True,
        False,
    ]
    assert first.groups["embd"] == (0, 2)  # of stages of two ranks


def test_the_head_and_its_memory_are_where_its_letter_is() -> None:
    _, predicting, last = plan_stages(SMALL, APART)
    table, kind = 129280 * 7168, SMALL.layer_kinds[-1]
    one_layer = layer_params_per_gpu(SMALL, APART, kind)
    dense = layer_params_per_gpu(SMALL, APART, SMALL.layer_kinds[0])
    assert last.num_params == dense + table
    assert predicting.num_params == dense + one_layer + 2 * 7168**2 + 3 * 7168 + table
    assert (predicting.num_predictions, last.num_predictions, last.has_head) == (1, 0, True)


def test_a_prediction_keeps_what_its_norms_and_products_read() -> None:
    """By hand, per token of 7168 columns in BF16, alone and with what a layer keeps beside it."""
    token = SEQ * 7168 * 2
    (alone,), (without,) = plan_stages(SMALL, ALONE), plan_stages(SMALL.with_mtp(0), ALONE)
    kind = SMALL.layer_kinds[-1]
    layer = layer_activation_bytes(SMALL, ALONE, SEQ, Recompute.NONE, kind=kind)
    more = [
        stage_memory(model, ALONE, stage, SEQ).activation_bytes
        for model, stage in ((SMALL, alone), (SMALL.with_mtp(0), without))
    ]
    # Embedding, hidden state, both of them joined, the layer's result; what the two heads read; logits.
    assert more[0] - more[1] == layer + (1 + 1 + 2 + 1) * token + 2 * token + 6 * SEQ * 129280
    full = replace(ALONE, recompute=Recompute.FULL)
    again = [
        stage_memory(model, full, stage, SEQ).activation_bytes
        for model, stage in ((SMALL, alone), (SMALL.with_mtp(0), without))
    ]
    assert again[0] - again[1] == 2 * token + 2 * token + 6 * SEQ * 129280


def test_uneven_chunks_run_as_they_are_laid_out() -> None:
    layout = ParallelLayout(
        pipeline=2,
        chunks=2,
        schedule=PipelineSchedule.INTERLEAVED,
        global_batch=2,
        pipeline_layout="Et|t*3|t|mL",
    )
    layers = [
        sorted({op.origin.layer for op in step(SMALL, layout, rank=rank).iteration.ops if op.origin.layer is not None})
        for rank in (0, 1)
    ]
    assert layers == [[0, 4], [1, 2, 3, 5]]


def test_fp8_products_cast_each_matrix_but_router_and_head() -> None:
    built = build_step(SMALL, ALONE, seq_len=SEQ, rules=MEGATRON, precision=Precision(products=ProductFormat.FP8))
    cast = {op.name.rpartition(".")[2] for op in built.iteration.computations if op.name.endswith("_cast")}
    assert cast == {
        f"{name}_cast"
        for name in ("q_down", "q_up", "kv_down", "kv_up", "out", "up", "down", "expert_up", "expert_down", "mtp_proj")
    }


def test_whole_experts_share_tensor_ranks_out() -> None:
    layout = ParallelLayout(
        tensor=2, data=4, expert=8, global_batch=4, sequence_parallel=True, whole_experts=True, zero_stage=1
    )
    model = replace(V3.with_mtp(0), num_layers=1, pattern="latent+experts")
    built = step(model, layout)
    up = work_of(built, "mb0.layer0.expert_up")
    # 4096 x 8 rows of each of four replicas, on eight ranks with 32 whole experts each
    assert isinstance(up, Gemm)
    assert (up.batch, up.n, up.m) == (32, 2 * 2048, SEQ * 8 // 2 // 32)
    (sent,) = [op for op in built.iteration.ops if isinstance(op, CommOp) and op.name == "mb0.layer0.dispatch"]
    assert built.groups["ep"] == tuple(range(8))
    assert sent.collective.num_bytes == 2 * SEQ * 8 // 2 * 7168
    assert "edp" not in built.groups


def test_frameworks_without_multi_token_prediction_refuse_it_by_one_line() -> None:
    with pytest.raises(JobError, match=r"multi-token prediction, .* not for fsdp2 with 3: set model.mtp_layers = 0$"):
        build_step(SMALL, ParallelLayout(data=2, zero_stage=3, global_batch=2), seq_len=SEQ, rules=FSDP2)


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [
        ("Et*4|t*2", "must have one L, at its end"),
        ("t*4|t*2L", "must have one E, at its start"),
        ("Et*4|xL", "allowed are E, t, m"),
        ("Et*4|mtL", "layers t come before predictions m"),
        ("Et||t*4mL", "chunk 1 has no t and no m"),
        ("Et*4|mt|L", "layers t come before predictions m"),
        ("Et|m|mL", "predictions m must stand in one chunk"),
        ("Et*4|tmL|L", "must have one L"),
        ("E(t|)*999999tL", "more than 100000 places"),
        ("Et*999999|tL", "more than 100000 places"),
    ],
)
def test_a_layout_that_is_none_is_refused_by_one_line(layout: str, wrong: str) -> None:
    with pytest.raises(JobError, match=rf"parallel.pipeline_layout is .*{wrong}") as error:
        ParallelLayout(pipeline=2, pipeline_layout=layout)
    assert "\n" not in str(error.value)


def test_a_layout_must_hold_the_models_layers() -> None:
    layout = ParallelLayout(pipeline=2, pipeline_layout="Et*4|tL")
    with pytest.raises(JobError, match=r"has 5 layers t and 0 predictions m, must have .* 5 and 1"):
        step(SMALL, layout)
    with pytest.raises(JobError, match="has 3 chunks, must have pipeline x chunks = 2 x 1 = 2"):
        ParallelLayout(pipeline=2, pipeline_layout="Et|t|tL")


def test_nvidias_layout_of_deepseek_has_the_chunks_that_megatron_prints() -> None:
    """The example of `pretty_repr` in Megatron-LM's pipeline_parallel_layer_layout.py, with three layers at first."""
    for text in ("Et*3|(tt|)*29m|L", "Ettt|(tt|)*29,m|L"):
        sizes = parse_pipeline_layout(text)
        assert (sizes.layers, sizes.num_mtp, sizes.mtp_chunk) == ((3, *(2,) * 29, 0, 0), 1, 30)
    layout = replace(
        TURNS, pipeline=16, data=1, expert=1, global_batch=16, zero_stage=0, pipeline_layout="Et*3|(tt|)*29m|L"
    )
    chunks = chunk_layers(V3, layout)
    assert [len(chunk) for chunk in chunks] == [3, *(2,) * 29, 1, 0]
    assert chunks[30] == range(61, 62)
    with pytest.raises(JobError, match=r"predictions m in chunk 1 of stage 0, must have them in the last chunk"):
        replace(TURNS, pipeline=2, global_batch=8, pipeline_layout="Et*3|tt|m|L")
