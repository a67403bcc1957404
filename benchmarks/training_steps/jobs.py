"""What each row ran: model, layout, cluster and framework, by the row's columns and its framework's stated defaults.

torchtitan (`train_configs`, `parallelize_llama.py`, Dec 2024): parameters are sharded over data x context ranks;
"selective" is operator mode; with tensor parallelism sequence parallelism is on; FP8 leaves out the output matrix;
multi-token prediction is not trained; in a pipeline parameters stay whole between forward and backward
(`titan_pipelines` has its stages and micro-batches).
Megatron-Bridge and NeMo: distributed optimizer with overlapped reductions (`fsdp` of 0 or empty) or FSDP, sequence
parallelism with tensor parallelism, user buffers hide it, nothing recomputed, interleaving by `vp`. Not in the tables:
recomputation, CUDA graphs, layouts (`recipes`: by release), fused kernels. Racks of GB200 and GB300 are one NVLink
domain.
"""

import re
from typing import Final

from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.units import TFLOPS
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import Dispatcher, ParallelLayout, PipelineSchedule, Recompute
from lagom_overlap.workload.parallel.layout_check import check_layout
from lagom_overlap.workload.precision import Precision, ProductFormat
from measured_gpus import preset_of
from measured_limits import check_forwards, check_step
from measured_rows import BadRowError, NotModelledError, Row
from training_steps.case import StepCase
from training_steps.megatron_models import check_sizes, has_argument, model_by_arguments, readme_model
from training_steps.nemo_recipes import PACKED_TOKENS, nemo_model, nemo_recipe_of
from training_steps.recipes import Recipe, Release, layout_of, precision_of, recipe_of
from training_steps.titan_pipelines import layout_text, micro_batch_of, schedule_of, split_of

_RACKS: Final = ("gb200", "gb300")
_RACK_GPUS: Final = 64
"""Of 72 those that a power of two uses."""
_MODELS: Final = {
    "llama38b": "llama-3-8b", "llama318b": "llama-3-8b", "llama370b": "llama-3-70b", "llama3170b": "llama-3-70b",
    "llama3405b": "llama-3-405b", "llama31405b": "llama-3-405b", "llama27b": "llama-2-7b", "llama213b": "llama-2-13b",
    "llama270b": "llama-2-70b", "gpt35b": "gpt-5b", "gpt320b": "gpt-20b", "gpt3175b": "gpt-175b",
    "nemotron8b": "nemotron-3-8b", "nemotron38b": "nemotron-3-8b", "nemotron15b": "nemotron-4-15b",
    "nemotron415b": "nemotron-4-15b", "nemotron340b": "nemotron-4-340b", "nemotron4340b": "nemotron-4-340b",
    "qwen330ba3b": "qwen3-30b-a3b", "qwen3235ba22b": "qwen3-235b-a22b", "mixtral8x7b": "mixtral-8x7b",
    "mixtral8x22b": "mixtral-8x22b", "grok1": "grok-1", "deepseekv3": "deepseek-v3", "kimik2": "kimi-k2",
    "nemotron3nano": "nemotron-3-nano-30b-a3b", "nemotron3super": "nemotron-3-super-120b-a12b",
    "nemotron3ultra": "nemotron-3-ultra-550b-a55b", "nemotron22b": "nemotron-22b", "nemotron322b": "nemotron-22b",
    "qwen34b": "qwen3-4b", "qwen38b": "qwen3-8b", "qwen314b": "qwen3-14b", "qwen332b": "qwen3-32b",
    "llama321b": "llama-3.2-1b", "llama323b": "llama-3.2-3b", "mistral7b": "mistral-7b", "deepseekv2": "deepseek-v2",
    "olmoe": "olmoe-1b-7b", "deepseekmoe16b": "deepseek-moe-16b", "phi2": "phi-2", "gpt322b": "gpt-22b",
    "gpt5b": "gpt-5b", "gpt20b": "gpt-20b", "gpt22b": "gpt-22b", "gpt175b": "gpt-175b", "gpt530b": "gpt-530b",
    "nemotron5h56b": "nemotron-h-56b", "nemotron5h8b": "nemotron-h-8b", "gpt315b8t": "nemotron-4-15b",
    "gpt3530b": "gpt-530b", "mtnlg530b": "gpt-530b", "llama3370b": "llama-3-70b",
    "nemotron35lightning": "nemotron-3.5-lightning-30b-a3b", "nemotronh8b": "nemotron-h-8b",
    "nemotronh56b": "nemotron-h-56b", "gptoss20b": "gpt-oss-20b", "gptoss120b": "gpt-oss-120b",
    "llama4scout": "llama-4-scout",
    "llama4e16": "llama-4-scout", "llama4maverick": "llama-4-maverick", "llama4e128": "llama-4-maverick",
    "deepseekv2lite": "deepseek-v2-lite", "moonlight16b": "moonlight-16b-a3b", "moonlight16ba3b": "moonlight-16b-a3b",
}  # fmt: skip
"""By the name's letters and digits; what a table says behind them is a variant."""
_NOT_MODELLED: Final = (
    ("deepseekv4", "its attention is not modelled"),
    ("deepseekv32", "sparse attention is not modelled"),
    ("glm5", "sparse attention is not modelled"),
    ("qwen3next", "linear attention is not modelled"),
    ("qwen35", "linear attention is not modelled"),
    ("qwen3vl", "a vision tower is not modelled"),
    ("mimo", "a vision tower and packed sequences of unknown lengths are not modelled"),
)
_MEGATRONS: Final = ("Megatron-Bridge", "NeMo/Megatron", "Megatron-LM", "Megatron-LM CI")
_MAKERS: Final = ("meta", "nvidia", "openai", "mistralai", "moonshotai", "xai")
"""Whose names may stand before a model's."""
_RELEASE: Final = re.compile(r"(?:NeMo\s*)?(\d\d)\.(\d\d)(?:\.(\d\d))?")
_LLAMA_70B_CHUNKS: Final = 5
"""Llama 3 70B in pipelines, in every release of Megatron-Bridge."""
_TWO_BYTE: Final = ("bf16", "bf16?")
_RECOMPUTE: Final = {
    "": Recompute.NONE, "none": Recompute.NONE, "no": Recompute.NONE, "full": Recompute.FULL,
    "selective": Recompute.PRODUCTS, "selective op": Recompute.PRODUCTS, "selective layer": Recompute.LAYERS,
    "selective (toml default)": Recompute.PRODUCTS,
}  # fmt: skip


def case_of(row: Row) -> StepCase:
    """The job of a row.

    Raises:
        BadRowError: if it cannot be told.
        NotModelledError: if the models have no such job.
        LagomError: if its layout cannot be built.
    """
    if "superseded" in row.text("note"):
        raise NotModelledError("its authors corrected it: superseded")
    if "known low" in row.text("note"):
        raise NotModelledError(f"its authors call the result too low: {row.text('note')[-60:]}")
    framework = row.text("framework")
    if framework.startswith("torchtitan"):
        case = _torchtitan(row)
    elif framework in _MEGATRONS:
        case = _megatron(row)
    else:
        raise BadRowError(f"framework is {framework[:40]!r}; known: torchtitan, {', '.join(_MEGATRONS)}")
    check_layout(case.model, case.layout, case.cluster, case.seq_len)
    check_forwards(case.layout)
    check_step(
        case.measured_s,
        case.model,
        num_tokens=case.layout.global_batch * case.seq_len,
        num_gpus=case.cluster.num_gpus,
        gpu=case.cluster.gpu,
        precision=case.precision,
    )
    return case


def _letters(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


def model_of(row: Row) -> TransformerModel:
    """The model that a row names.

    Raises:
        BadRowError: if its sizes are not known.
        NotModelledError: if it has parts that the models lack.
    """
    text = row.text("model")
    whole = _letters(text)
    for word, why in _NOT_MODELLED:
        if word in whole:
            raise NotModelledError(f"model is {text[:60]!r}: {why}")
    plain = _letters(text.partition("(")[0].rpartition("/")[2])
    for maker in _MAKERS:
        plain = plain.removeprefix(maker)
    known = [name for name in _MODELS if plain.startswith(name)]
    if known:
        model = load_model(_MODELS[max(known, key=len)])
        check_sizes(row, model)
        return model.with_mtp(0) if "womtp" in whole else model
    if row.text("framework") == "Megatron-LM CI" and (stated := model_by_arguments(row)) is not None:
        return stated
    if (
        row.text("framework") == "Megatron-LM"
        and (of_table := readme_model(plain, row.needed_count("seq"))) is not None
    ):
        return of_table
    raise BadRowError(f"model is {text[:60]!r}, whose sizes are not known here")


def _cluster(row: Row, num_gpus: int) -> Cluster:
    preset = preset_of(row.text("gpu_type"))
    cluster = load_preset(preset)
    per_node = min(_RACK_GPUS if preset in _RACKS else cluster.gpus_per_node, num_gpus)
    if num_gpus % per_node:
        raise BadRowError(f"gpus is {num_gpus}, must be a multiple of a node's {per_node}")
    return load_preset(preset, num_gpus // per_node, per_node)


def _products(row: Row) -> ProductFormat:
    text = row.text("precision").lower()
    if text in _TWO_BYTE:
        return ProductFormat.PARAMETER
    blackwell = preset_of(row.text("gpu_type")) in ("b200", "b300", *_RACKS)
    if text.startswith(("mxfp8", "fp8-mx")) or (text.startswith("fp8 other") and blackwell):  # 32 x 32 of 25.09
        return ProductFormat.MXFP8
    if row.text("framework") == "Megatron-Bridge" and text.startswith("nvfp4"):
        if not load_preset(preset_of(row.text("gpu_type"))).gpu.nvfp4:
            raise BadRowError(f"precision is {text!r}, which {row.text('gpu_type')[:20]} does not multiply")
        return ProductFormat.NVFP4
    if row.text("framework") == "Megatron-Bridge" and text.startswith("fp8"):
        return ProductFormat.FP8_CURRENT
    if row.text("framework").startswith("torchtitan") and "rowwise" in text:
        return ProductFormat.FP8_ROWWISE
    if text.startswith(("fp8", "float8")):
        return ProductFormat.FP8
    raise BadRowError(
        f"precision is {row.text('precision')[:40]!r}; modelled: bf16, FP8 in every scaling, NVFP4 of Megatron-Bridge"
    )


def _recompute(row: Row) -> Recompute:
    text = row.text("ac").lower()
    if text not in _RECOMPUTE:
        raise BadRowError(f"ac is {text[:40]!r}; known: {', '.join(repr(word) for word in _RECOMPUTE)}")
    return _RECOMPUTE[text]


def _data(row: Row, num_gpus: int) -> int:
    """Data-parallel ranks: what the other degrees leave."""
    others = row.needed_count("tp") * row.needed_count("pp") * row.needed_count("cp", 1)
    if num_gpus % others:
        raise BadRowError(f"tp x pp x cp = {others} must divide gpus = {num_gpus}")
    return num_gpus // others


def _measured_s(row: Row, model: TransformerModel, num_gpus: int) -> float:
    """Seconds of an iteration, by the throughput that the row prints."""
    tokens = row.needed_count("global_batch") * row.needed_count("seq")
    step_s, rate, tflops = row.number("step_time_s"), row.number("tokens_per_s_per_gpu"), row.number("tflops_per_gpu")
    if step_s is not None:
        return step_s
    if rate is not None:
        return tokens / num_gpus / rate
    if tflops is None:
        raise BadRowError("nothing measured: tokens_per_s_per_gpu, tflops_per_gpu and step_time_s are empty")
    return tokens * nemo_flops_per_token(model, row.needed_count("seq")) / (num_gpus * tflops * TFLOPS)


def nemo_flops_per_token(model: TransformerModel, seq_len: int) -> float:
    """NeMo's own count behind its printed TFLOP/s: attention in full, not causal (`flops_formulas.py`, 24.07)."""
    matrices = model.num_layers * model.active_layer_params
    return 6.0 * (matrices + model.vocab * model.hidden) + 12.0 * model.num_layers * seq_len * model.attention_columns


def _torchtitan(row: Row) -> StepCase:
    num_gpus, tensor = row.needed_count("gpus"), row.needed_count("tp")
    model, compiled = model_of(row).with_mtp(0), not row.text("compile").lower().startswith("no")
    pipeline, replicas = row.needed_count("pp"), row.needed_count("dp_replicate", 1)
    data, context = _data(row, num_gpus), row.needed_count("cp", 1)
    if data * context % replicas:
        raise BadRowError(f"dp_replicate is {replicas}, must divide the {data * context} ranks that hold the same")
    before_2025 = _is_before_2025(row)
    schedule, chunks, laid_out = PipelineSchedule.ONE_F_ONE_B, 1, ""
    micro_batch = row.needed_count("micro_batch", 1)
    if pipeline > 1:
        schedule, chunks = schedule_of(row)
        micro_batch = micro_batch_of(row, data, pipeline, before_2025=before_2025)
        laid_out = layout_text(split_of(model.num_layers, pipeline * chunks, before_2025=before_2025))
    layout = ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        expert=row.needed_count("ep", 1),
        whole_experts=model.num_experts > 0,
        micro_batch=micro_batch,
        global_batch=row.needed_count("global_batch"),
        schedule=schedule,
        chunks=chunks,
        pipeline_layout=laid_out,
        overlap_p2p=chunks > 1 and _exchanges_in_steps(row),
        recompute=_recompute(row),
        sequence_parallel=tensor > 1,
        overlap_tensor=tensor > 1 and row.text("async_tp").lower() == "yes",
        zero_stage=3 if pipeline == 1 else 2,
        replicate=replicas,
    )
    cluster = _cluster(row, num_gpus)
    return StepCase(
        line=row.line,
        group="torchtitan",
        family=f"{cluster.gpu.name.split('-')[0]} {_cut(layout)}",
        what=_words(row),
        model=model,
        layout=layout,
        seq_len=row.needed_count("seq"),
        cluster=cluster,
        framework=("torchtitan_blocks" if before_2025 else "torchtitan_compiled") if compiled else "torchtitan",
        precision=Precision(products=_products(row)),
        measured_s=_measured_s(row, model, num_gpus),
    )


def _cut(layout: ParallelLayout) -> str:
    """What a rank's part of the model is cut by, the strongest first."""
    degrees = {"pp": layout.pipeline, "tp": layout.tensor, "cp": layout.context}
    return next((name for name, degree in degrees.items() if degree > 1), "hsdp" if layout.replicate > 1 else "fsdp")


def _month(row: Row) -> tuple[int, int] | None:
    """Year and month of a row's release, where it says them."""
    found = re.search(r"\((20\d\d)-(\d\d)", row.text("version"))
    return None if found is None else (int(found[1]), int(found[2]))


def _is_before_2025(row: Row) -> bool:
    """Whether torchtitan compiled its blocks but not the loss."""
    month = _month(row)
    return month is not None and month < (2025, 1)


def _exchanges_in_steps(row: Row) -> bool:
    """Whether PyTorch's interleaved schedule was still the one before its runtime, whose transfers queue up."""
    month = _month(row)
    return month is not None and month < (2025, 9)


def _megatron(row: Row) -> StepCase:
    if row.text("class") in ("ci_small", "ci_copy"):
        raise NotModelledError(f"class is {row.text('class')}: host-bound toys and copies are not judged")
    model, tensor, pipeline = _model_as_trained(row), row.needed_count("tp"), row.needed_count("pp")
    expert, context = row.needed_count("ep", 1), row.needed_count("cp", 1)
    num_gpus = row.needed_count("gpus")
    data, chunks, ci = _data(row, num_gpus), _chunks(row, model, pipeline), row.text("framework") == "Megatron-LM CI"
    recipe, products = _recipe(row, model), _products(row)
    parts, tables = pipeline * chunks, model.num_layers + 2
    laid_out = layout_of(model, parts) if pipeline > 1 else ""
    uneven = pipeline > 1 and model.num_layers % parts != 0 and not laid_out
    if uneven and tables == parts:  # embedding and head are a chunk each
        laid_out, uneven = f"E|{'t|' * model.num_layers}L", False
    per_turn = row.needed_count("micro_batch", 1) * data
    packed = _packed(row)
    is_frozen = row.text("task").lower() == "lora"
    zero_stage = 0 if is_frozen or (ci and not has_argument(row, "use-distributed-optimizer")) else 1
    if zero_stage and (row.count_or_zero("fsdp") or 1) > 1 and pipeline == 1:
        zero_stage = 3
    layout = ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        expert=expert,
        micro_batch=row.needed_count("micro_batch", 1) * packed,
        global_batch=row.needed_count("global_batch") * packed,
        schedule=PipelineSchedule.INTERLEAVED if chunks > 1 else PipelineSchedule.ONE_F_ONE_B,
        chunks=chunks,
        recompute=Recompute.SELECTIVE if recipe.again else _recompute(row),
        recompute_modules=recipe.again,
        graph_modules=recipe.graphs,
        fused_loss=recipe.fused_loss,
        attention_kernel=recipe.attention,
        pipeline_layout=laid_out,
        whole_experts=model.num_experts > 0,
        sequence_parallel=tensor > 1 and (not ci or has_argument(row, "sequence-parallel")),
        overlap_tensor=tensor > 1 and not ci and recipe.overlaps_tensor and products is not ProductFormat.NVFP4,
        zero_stage=zero_stage,
        overlap_gradients=has_argument(row, "overlap-grad-reduce") if ci else recipe.overlaps_gradients,
        overlap_parameters=zero_stage == 1
        and (has_argument(row, "overlap-param-gather") if ci else recipe.overlaps_parameters),
        frozen=is_frozen,
        overlap_p2p=chunks > 1,
        tables_as_layers=uneven and tables % parts == 0,
        overlap_experts=expert > 1 and recipe.overlaps_experts and row.needed_count("global_batch") > per_turn,
        dispatcher=recipe.dispatcher if expert > 1 else Dispatcher.ALL_TO_ALL,
        fused_experts=recipe.fused_experts and model.num_experts > 0,
    )
    return StepCase(
        line=row.line,
        group="CI" if ci else "fine-tuning" if _is_tuned(row) else _group(model),
        family=model.name,
        what=_words(row),
        model=model,
        layout=layout,
        seq_len=row.needed_count("seq") // packed,
        cluster=_cluster(row, num_gpus),
        framework="megatron",
        graphed=recipe.graphed,
        precision=precision_of(model, products, recipe),
        measured_s=_measured_s(row, model, num_gpus),
    )


def _model_as_trained(row: Row) -> TransformerModel:
    model = model_of(row)
    return nemo_model(model, _release(row)) if row.text("framework") == "NeMo/Megatron" else model


def _recipe(row: Row, model: TransformerModel) -> Recipe:
    """What the framework's release switches on for the row."""
    gpu = preset_of(row.text("gpu_type")).removesuffix("_dgx")
    if row.text("framework") == "NeMo/Megatron":
        return nemo_recipe_of(model, _release(row), gpu, tunes=_is_tuned(row))
    return recipe_of(model, _release(row), gpu, row.text("precision").lower(), drops=_drops(row))


def _chunks(row: Row, model: TransformerModel, pipeline: int) -> int:
    """Model chunks of a stage: the row's, or where it prints none those of its recipe."""
    if pipeline == 1:
        return 1
    if row.text("vp").lower() not in ("", "n/a"):
        stated = row.needed_count("vp")
        if row.text("framework") != "Megatron-LM CI":
            return stated
        return max(1, model.num_layers // (pipeline * stated))  # layers of a chunk there
    if row.text("framework") == "Megatron-Bridge" and model.name == "llama-3-70b":
        return _LLAMA_70B_CHUNKS
    return model.num_layers // pipeline if _is_tuned(row) and model.num_layers % pipeline == 0 else 1


def _is_tuned(row: Row) -> bool:
    return row.text("task").lower() in ("sft", "lora")


def _packed(row: Row) -> int:
    """How many sequences that attend to themselves alone are packed into one of the row's."""
    seq = row.needed_count("seq")
    return seq // PACKED_TOKENS if _is_tuned(row) and seq % PACKED_TOKENS == 0 else 1


def _drops(row: Row) -> bool:
    """Whether tokens beyond an expert's capacity are dropped."""
    return "tokendrop" in _letters(row.text("model"))


def _group(model: TransformerModel) -> str:
    """Constants were fitted on dense transformers alone: hybrids are no part of them."""
    if model.num_experts:
        return "MoE"
    return "dense Megatron" if model.mamba is None else "dense hybrids"


def _release(row: Row) -> Release | None:
    found = _RELEASE.match(row.text("version"))
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def _words(row: Row) -> str:
    degrees = " ".join(
        f"{name}{row.text(name)}" for name in ("tp", "pp", "cp", "ep", "vp") if row.text(name) not in ("", "1")
    )
    return " ".join(f"{row.text('model')[:24]} {row.text('gpu_type')[:6]} x{row.text('gpus')} {degrees}".split())
