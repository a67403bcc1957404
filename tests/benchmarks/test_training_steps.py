"""Published steps of other frameworks: bad rows named, the rest predicted. The figures are invented."""

from pathlib import Path

import pytest

from iteration_time import evaluate, main
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import Dispatcher
from lagom_overlap.workload.precision import ProductFormat
from measured_gpus import preset_of
from measured_rows import BadRowError, NotModelledError, Row
from training_steps.jobs import case_of, model_of, nemo_flops_per_token
from training_steps.titan_pipelines import split_of

HEADER = (
    "framework,model,gpu_type,gpus,fsdp,dp_replicate,tp,pp,cp,ep,vp,micro_batch,global_batch,seq,ac,compile,precision,"
    "async_tp,task,tokens_per_s_per_gpu,tflops_per_gpu,step_time_s,class,note"
)
TITAN = "torchtitan,Llama3-8B,A100-80GB,8,8,,1,1,1,,,1,8,2048,selective op,no,bf16,,pretrain,3000,,,full,"
OSS = {
    "framework": "Megatron-Bridge", "version": "26.04 NeMo", "model": "GPT OSS 120B", "gpu_type": "GB200", "gpus": "64",
    "tp": "1", "pp": "1", "ep": "64", "micro_batch": "4", "global_batch": "1280", "seq": "4096", "precision": "BF16",
    "tokens_per_s_per_gpu": "15000",
}  # fmt: skip
DENSE = "NeMo/Megatron,LLAMA2-7B,H100,8,,,1,1,1,,1,1,8,2048,,,FP8,,pretrain,16000,,,full,"


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "steps.csv"
    path.write_text("\n".join((HEADER, *lines)) + "\n", encoding="utf-8")
    return path


def test_rows_of_two_frameworks_are_predicted_and_gathered_by_group_and_family(tmp_path: Path) -> None:
    found = evaluate(table(tmp_path, TITAN, DENSE))
    rows = found["rows"]
    assert [row["row"] for row in rows] == [2, 3]  # type: ignore[attr-defined]
    assert rows[0]["measured_s"] == pytest.approx(2048 / 3000)  # type: ignore[index]
    assert [row["fitted"] for row in rows] == [False, True]  # type: ignore[attr-defined]
    assert set(found["groups"]) == {"torchtitan", "dense Megatron"}  # type: ignore[call-overload]
    assert found["torchtitan_without_compile"]["num_rows"] == 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TITAN, TITAN.replace(",1,1,1,,,1,8,", ",1,1,1,n/a,N/A,1,8,")),
        (TITAN.replace("selective op", "none"), TITAN.replace("selective op", "no")),
        (TITAN, TITAN.replace("selective op", "selective (toml default)")),
    ],
)
def test_what_tables_write_for_the_same_job_is_the_same_job(tmp_path: Path, first: str, second: str) -> None:
    """A dense model's experts as n/a, recomputation in the words of torchtitan's own default."""
    assert first != second
    one, other = evaluate(table(tmp_path, first, second))["rows"]  # type: ignore[misc]
    assert one["predicted_s"] == other["predicted_s"]


def test_rows_that_a_constant_was_fitted_on_are_marked_dense_ones_and_the_mixture(tmp_path: Path) -> None:
    qwen = DENSE.replace("LLAMA2-7B", "Qwen3_30B_a3B").replace(",1,1,1,,1,1,8,2048,", ",1,1,1,8,1,1,8,2048,")
    found = evaluate(table(tmp_path, TITAN, DENSE, qwen))
    assert [row["fitted"] for row in found["rows"]] == [False, True, True]  # type: ignore[attr-defined]
    assert found["num_fitted"] == 2
    unseen = abs(found["rows"][0]["error_pct"])  # type: ignore[index]
    assert found["mean_abs_error_not_fitted_pct"] == pytest.approx(unseen)


def test_a_job_measured_twice_has_a_floor_and_another_format_is_another_job(tmp_path: Path) -> None:
    """Times of 10 and 20 s have the median 15: 50 and 25 % off."""
    twice = DENSE.replace("16000", "8000")
    assert evaluate(table(tmp_path, DENSE, twice))["release_floor_pct"] == pytest.approx(37.5)
    assert evaluate(table(tmp_path, DENSE, twice.replace("FP8", "BF16")))["release_floor_pct"] is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (TITAN.replace("A100-80GB", "TPUv4"), "unknown GPU 'TPUv4'"),
        (TITAN.replace("A100-80GB", ""), "unknown GPU ''"),
        (TITAN.replace("A100-80GB", "A100-40GB"), "no preset for A100 40GB"),
        (TITAN.replace("A100-80GB", "H100 NVL"), "no preset for H100 NVL"),
        (TITAN.replace("A100-80GB", "V100"), "no preset for V100"),
        (TITAN.replace(",8,8,,1,1,1,", ",,8,,1,1,1,"), "gpus is not printed"),
        (TITAN.replace(",8,8,,1,1,1,", ",8,8,,3,1,1,"), "must divide gpus = 8"),
        (TITAN.replace("3000", "nan"), "tokens_per_s_per_gpu is nan"),
        (TITAN.replace("3000", ""), "nothing measured"),
        (TITAN.replace("bf16", "nvfp4"), "precision is 'nvfp4'"),
        (TITAN.replace("Llama3-8B", "Qwen3-Next-80B"), "linear attention is not modelled"),
        (DENSE.replace("LLAMA2-7B", "GLM5"), "sparse attention is not modelled"),
        (DENSE.replace("LLAMA2-7B", "DeepSeekV4 Flash"), "its attention is not modelled"),
        (DENSE.replace("NeMo/Megatron", "Keras"), "framework is 'Keras'"),
        (TITAN.replace("3000", "1e300"), "beyond what any machine has"),
        (TITAN.replace("3000", "1e18"), "tokens_per_s_per_gpu is 1e18, beyond what any machine has"),
        (TITAN.replace("3000", "9e7"), "impossible: a step of llama-3-8b"),
        (TITAN.replace("3000", "1e-2"), "must be at most 86400 s"),
        (TITAN.replace("3000", "3_000"), "tokens_per_s_per_gpu is '3_000', must be a number"),
        (TITAN.replace(",1,8,2048", ",1,9,2048"), "global_batch is 9"),
        ("torchtitan,Llama3-8B", "2 cells, the header has 24"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_reason_and_the_rest_is_judged(
    tmp_path: Path, line: str, words: str
) -> None:
    found = evaluate(table(tmp_path, line, TITAN))
    assert [row["row"] for row in found["rows"]] == [3]  # type: ignore[attr-defined]
    (refused,) = found["not_simulated"]  # type: ignore[misc]
    assert refused["why"].startswith("steps.csv:2: ")  # type: ignore[has-type]
    assert words in refused["why"]  # type: ignore[has-type]
    assert found["num_rows"] == 2


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LLAMA3.1-405B", "llama-3-405b"),
        ("Llama3.1-8B (FSDP)", "llama-3-8b"),
        ("Qwen3_235B_a22B", "qwen3-235b-a22b"),
        ("mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release: L32 H4096", "mixtral-8x7b"),
    ],
)
def test_names_of_models_are_known_in_every_spelling(text: str, name: str) -> None:
    assert model_of(Row(2, {"model": text})).name == name


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("DGX-GB200", "gb200"),
        ("NVIDIA H100-SXM5-80GB", "h100_dgx"),
        ("H100-SXM 95GB HBM2e 500W (Grand Teton)", "h100_hbm2e"),
        ("A100-SXM4-80GB (Modal)", "a100_dgx"),
        ("B300 NV18", "b300"),
    ],
)
def test_names_of_gpus_are_known_with_the_words_that_mean_nothing_else(text: str, preset: str) -> None:
    assert preset_of(text) == preset


def test_a_recipe_of_a_late_release_overlaps_experts_and_an_uneven_pipeline_is_cut_as_megatron_does() -> None:
    qwen = {
        "framework": "Megatron-Bridge", "version": "26.06", "model": "Qwen3_30B_a3B", "gpu_type": "GB200",
        "gpus": "8", "tp": "1", "pp": "1", "ep": "8", "micro_batch": "4", "global_batch": "512", "seq": "4096",
        "precision": "MXFP8", "tokens_per_s_per_gpu": "40000",
    }  # fmt: skip
    late, early = (case_of(Row(2, qwen | {"version": version})) for version in ("26.06 NeMo", "26.04.01 NeMo"))
    assert (late.layout.overlap_experts, late.graphed) == (True, True)
    assert (early.layout.overlap_experts, early.graphed) == (False, False)
    big = qwen | {"model": "Qwen3_235B_a22B", "gpus": "256", "pp": "8", "vp": "4", "ep": "32", "global_batch": "2048"}
    assert case_of(Row(2, big)).layout.tables_as_layers  # 94 layers and two tables on 32 chunks
    assert not late.layout.tables_as_layers


@pytest.mark.parametrize(
    ("version", "gpu", "merged"),
    [("26.02", "GB200", False), ("26.04", "GB200", True), ("26.04.01", "GB200", False), ("26.04.01", "B300", True)],
)
def test_gpt_oss_sends_tokens_as_its_releases_recipe_says(version: str, gpu: str, merged: bool) -> None:
    case = case_of(Row(2, OSS | {"version": f"{version} NeMo", "gpu_type": gpu}))
    assert (case.layout.dispatcher is Dispatcher.MERGED) is merged


@pytest.mark.parametrize(
    ("model", "gpu", "version", "attention", "head"),
    [
        ("GPT OSS 120B", "GB300", "26.06", True, True),
        ("GPT OSS 120B", "B300", "26.06", False, False),
        ("DeepSeekV3", "GB300", "26.06", True, True),
        ("DeepSeekV3", "GB200", "26.06", False, True),
        ("DeepSeekV3", "GB300", "26.04", False, False),
        ("Qwen3_30B_a3B", "GB200", "26.08", True, False),
    ],
)
def test_recipes_of_whole_iterations_multiply_attention_and_heads_in_mxfp8(
    model: str, gpu: str, version: str, attention: bool, head: bool
) -> None:
    row = OSS | {"model": model, "gpu_type": gpu, "version": f"{version} NeMo", "precision": "MXFP8"}
    precision = case_of(Row(2, row)).precision
    assert (precision.attention is ProductFormat.MXFP8) is attention
    assert (precision.format_of("logits") is ProductFormat.MXFP8) is head
    assert precision.format_of("router") is ProductFormat.PARAMETER


def test_a_column_that_is_missing_reads_as_empty_and_what_must_be_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(column: str) -> str:
        place = HEADER.split(",").index(column)
        lines = [line.split(",") for line in (HEADER, TITAN, DENSE)]
        return "\n".join(",".join(cells[:place] + cells[place + 1 :]) for cells in lines)

    path = tmp_path / "steps.csv"
    path.write_text(without("cp"), encoding="utf-8-sig")
    assert len(evaluate(path)["rows"]) == 2  # type: ignore[arg-type]
    path.write_text(without("tp"), encoding="utf-8")
    assert [row["why"] for row in evaluate(path)["not_simulated"]] == [  # type: ignore[attr-defined]
        "steps.csv:2: tp is not printed",
        "steps.csv:3: tp is not printed",
    ]
    path.write_text(without("seq"), encoding="utf-8")
    assert main([str(path)]) == 2
    assert "lacks the columns seq" in capsys.readouterr().err


def test_nemos_printed_throughput_and_tflops_agree_by_its_own_formula() -> None:
    # NVIDIA's summary of NeMo 24.07 prints 16,847 tokens/s and 776 TFLOP/s per GPU for Llama-2-7B at 4096 tokens.
    assert 16_847 * nemo_flops_per_token(load_model("llama-2-7b"), 4096) == pytest.approx(776e12, rel=0.005)
    assert 12_036 * nemo_flops_per_token(load_model("llama-3-8b"), 8192) == pytest.approx(697e12, rel=0.005)
    assert 22_521 * nemo_flops_per_token(load_model("gpt-5b"), 2048) == pytest.approx(736e12, rel=0.005)
    assert 5_851 * nemo_flops_per_token(load_model("gpt-20b"), 2048) == pytest.approx(750e12, rel=0.005)


def test_the_command_prints_groups_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(table(tmp_path, TITAN))]) == 0
    assert "torchtitan: 1 rows" in capsys.readouterr().out


def bridge(model: str, gpu: str, version: str, degrees: str, **cells: str) -> Row:
    """A row of Megatron-Bridge; `degrees` are gpus, tp, pp, ep, vp and micro-batch."""
    gpus, tp, pp, ep, vp, micro = degrees.split()
    row = {
        "framework": "Megatron-Bridge", "version": version, "model": model, "gpu_type": gpu, "gpus": gpus, "tp": tp,
        "pp": pp, "ep": ep, "vp": vp, "micro_batch": micro, "global_batch": "4096", "seq": "4096", "precision": "MXFP8",
        "task": "pretrain", "tokens_per_s_per_gpu": "1000",
    }  # fmt: skip
    return Row(2, row | cells)


@pytest.mark.parametrize(
    ("release", "gpu", "degrees", "layout", "switches"),
    [
        # Megatron-Bridge's recipes at v0.3.1, v0.4.0, v0.4.2, v0.5.0 and v0.1.0rc4: see `training_steps/recipes.py`.
        ("26.02.01", "GB300", "256 1 2 32 8 2", "Et*4|(t*4|)*14tmL", "mla_up_proj"),
        ("26.04", "GB200", "256 1 4 64 4 1", "Et*4|(t*4|)*14tmL", "mlp"),
        ("26.04.01", "B200", "256 1 8 32 2 1", "Et*4|(t*4|)*14tmL", "mla_up_proj mlp overlaps"),
        ("26.06", "GB300", "256 1 2 32 8 1", "Et*4|(t*4|)*14tmL", "overlaps graphed"),
        ("26.06", "B300", "256 1 8 8 n/a 2", "Et*8|(t*8|)*6t*5mL", "mla_up_proj"),
        ("25.09", "H100", "1024 2 8 64 4 1", "Et|(tt|)*30mL", "mla_up_proj mlp overlaps"),
    ],
)
def test_deepseek_v3_runs_as_its_releases_recipe_says(
    release: str, gpu: str, degrees: str, layout: str, switches: str
) -> None:
    case = case_of(bridge("DeepSeekV3", gpu, f"{release} NeMo Container", degrees))
    assert case.layout.pipeline_layout == layout
    found = [*case.layout.recompute_modules, *["overlaps"] * case.layout.overlap_experts, *["graphed"] * case.graphed]
    assert " ".join(found) == switches
    assert case.precision.reduction == "bf16"
    assert case.layout.whole_experts


def test_a_row_says_whether_multi_token_prediction_was_trained() -> None:
    without = case_of(bridge("DeepSeekV3 (w/o MTP)", "GB200", "25.11 NeMo Container", "256 1 8 32 4 1"))
    assert (without.model.mtp_layers, without.layout.pipeline_layout) == (0, "Et|(tt|)*30L")
    assert model_of(bridge("DeepSeekV3 (w/ MTP)", "B200", "25.11", "256 1 16 8 1 1")).mtp_layers == 1


@pytest.mark.parametrize(
    ("model", "job", "layout", "switches"),
    [
        ("Kimi_K2", "GB300 26.02.01 256 1 4 64 4 2", "Et*4|(t*4|)*14tL", "mla_up_proj"),
        ("Kimi_K2", "H100 26.04 1024 8 16 64 2 1", "Et|(tt|)*30L", "mla_up_proj mlp"),
        ("GPT_OSS_120B", "GB200 26.02 64 1 1 64 1 4", "", "layernorm moe_act"),
        ("GPT_OSS_120B", "GB200 26.04 64 1 1 64 1 4", "", "layernorm moe_act overlaps"),
        ("GPT_OSS_120B", "GB300 26.06 64 1 1 16 1 4", "", "overlaps graphed"),
        ("Nemotron_3_Nano", "H100 26.04 16 1 1 8 1 1", "", "moe layernorm core_attn moe_act"),
        ("Nemotron_3_Super", "B200 26.04 64 1 1 64 1 1", "", "moe_act layernorm"),
        ("Qwen3_235B_A22B", "B300 26.02 64 1 8 8 4 1", "", "overlaps"),
        ("Qwen3_235B_A22B", "B300 26.02.01 64 1 8 8 4 1", "", "overlaps"),
    ],
)
def test_other_models_run_as_their_releases_recipes_say(model: str, job: str, layout: str, switches: str) -> None:
    gpu, release, degrees = job.split(maxsplit=2)
    case = case_of(bridge(model, gpu, f"{release} NeMo Container", degrees))
    found = [*case.layout.recompute_modules, *["overlaps"] * case.layout.overlap_experts, *["graphed"] * case.graphed]
    assert (case.layout.pipeline_layout, " ".join(found)) == (layout, switches)


TITAN_PIPELINE = {
    "framework": "torchtitan", "version": "9dec370 (2024-12-26)", "model": "Llama3.1-405B", "gpu_type": "H100",
    "gpus": "512", "tp": "8", "pp": "8", "cp": "1", "global_batch": "256", "seq": "8192", "ac": "full",
    "compile": "yes", "precision": "float8", "tokens_per_s_per_gpu": "100", "schedule": "1F1B",
}  # fmt: skip


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "before_2025", "sizes"),
    [
        (126, 8, True, (15, 16, 16, 16, 16, 16, 16, 15)),
        (126, 16, True, (7, *(8,) * 14, 7)),
        (7, 4, True, (1, 2, 2, 2)),
        (126, 8, False, (15, *(16,) * 6, 15)),
        (32, 4, False, (8, 9, 8, 7)),
    ],
)
def test_layers_are_dealt_as_torchtitan_deals_them(
    num_layers: int, num_stages: int, before_2025: bool, sizes: tuple[int, ...]
) -> None:
    """By hand after its `generate_split_points`: until 2025 the middle stages, then the first ones, have one more."""
    assert split_of(num_layers, num_stages, before_2025=before_2025) == sizes


def test_a_pipeline_of_torchtitans_has_the_micro_batches_and_stages_of_its_release() -> None:
    def layout(**cells: str) -> tuple[int, int, int, int]:
        case = case_of(Row(2, TITAN_PIPELINE | cells))
        chosen = case.layout
        return chosen.micro_batch, chosen.num_micro_batches, chosen.chunks, chosen.zero_stage

    assert layout() == (4, 8, 1, 2)
    assert layout(micro_batch="32") == (4, 8, 1, 2)  # torchtitan's name for a rank's whole batch
    assert layout(micro_batch="2") == (2, 16, 1, 2)
    assert layout(schedule="Interleaved 1F1B") == (4, 8, 2, 2)
    assert layout(version="820504e (2025-06-13)") == (1, 32, 1, 2)
    for cells, words in (
        ({"schedule": "ZBVZeroBubble"}, "schedule is 'ZBVZeroBubble'; modelled: 1F1B"),
        ({"global_batch": "24"}, "a rank's batch is 3, must be a multiple of pp = 8"),
    ):
        with pytest.raises(BadRowError, match=words):
            layout(**cells)


def row_of(line: str, **cells: str) -> Row:
    return Row(2, dict(zip(HEADER.split(","), line.split(","), strict=True)) | cells)


def test_lora_freezes_weights_and_fine_tuning_attends_within_its_packed_questions() -> None:
    case = case_of(row_of(DENSE.replace("pretrain", "lora")))
    assert (case.group, case.layout.frozen, case.layout.zero_stage) == ("fine-tuning", True, 0)
    assert (case.seq_len, case.layout.micro_batch, case.layout.global_batch) == (256, 8, 64)
    assert not case_of(row_of(DENSE.replace("pretrain", "sft"))).layout.frozen


def test_a_table_without_interleaving_has_its_recipes() -> None:
    tuned = case_of(row_of(DENSE.replace("pretrain", "sft"), pp="4", vp="", gpus="16", global_batch="128"))
    assert tuned.layout.chunks == 8  # 32 layers on 4 stages, one a chunk
    row = row_of(DENSE, framework="Megatron-Bridge", version="26.02.01 NeMo Container", model="LLAMA3_70B")
    cells = dict(row.cells) | {
        "gpus": "64",
        "pp": "4",
        "vp": "n/a",
        "global_batch": "256",
        "tokens_per_s_per_gpu": "1500",
    }
    assert case_of(Row(2, cells)).layout.chunks == 5


def test_embedding_and_head_may_be_a_chunk_each() -> None:
    cells = {"model": "LLAMA3.1_405B", "gpus": "256", "tp": "4", "pp": "16", "vp": "8", "global_batch": "1536"}
    case = case_of(row_of(DENSE, **cells, tokens_per_s_per_gpu="300"))
    assert case.layout.pipeline_layout.startswith("E|t|t|")
    assert case.layout.num_chunks == 128


def test_fully_sharded_rows_of_megatron_gather_parameters() -> None:
    assert case_of(row_of(DENSE, fsdp="8")).layout.zero_stage == 3
    assert case_of(row_of(DENSE, fsdp="0")).layout.zero_stage == 1


def test_a_test_of_megatrons_is_built_by_its_arguments_and_a_cut_down_model_is_refused() -> None:
    note = "num-attention-heads=32; group-query-attention; num-query-groups=8; use-distributed-optimizer"
    cells = {"framework": "Megatron-LM CI", "model": "gpt/gpt3_7b: L32 H4096", "class": "ci_large", "note": note}
    case = case_of(row_of(DENSE, **cells, precision="bf16", pp="4", vp="1", tokens_per_s_per_gpu="900"))
    assert (case.model.num_layers, case.model.ffn, case.model.num_kv_heads) == (32, 16384, 8)
    assert (case.layout.chunks, case.layout.zero_stage, case.layout.overlap_gradients) == (8, 1, False)
    for text, why in (
        ("", "no num-attention-heads"),
        ("num-attention-heads=32; num-query-groups=x", "is 'x', must be a n"),
    ):
        with pytest.raises(BadRowError, match=why):
            model_of(row_of(DENSE, **cells | {"note": text}))
    with pytest.raises(NotModelledError, match="a cut-down deepseek-v3"):
        model_of(row_of(DENSE, **cells | {"model": "mixtral/deepseekv3_proxy: L14 H7168"}))
