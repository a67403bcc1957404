"""What releases of Megatron-Bridge switch on that their tables of results do not print, by model, release and GPU.

Read in NVIDIA-NeMo/Megatron-Bridge, tag by tag: v0.1.0rc4 (25.09), v0.2.0 (25.11, commit 7af9601c), v0.3.0 and
v0.3.1 (26.02, 21b02e0c; 26.02.01, 9c9dd848), v0.4.0 and v0.4.2 (26.04, 0fbfe7d3; 26.04.01, c8101293), v0.5.0 and v0.5.1
(26.06, fcbb6031; 26.06.01, 5cb3444c), v0.6.0 (26.08, 51885cf1); `scripts/performance/configs`, before 25.11
`scripts/performance/run_script.py`, in v0.6.0 `src/megatron/bridge/perf_recipes`. Where a table's degrees were a
recipe's of a later commit (26.04.01: B200 5acef930, B300 7e29b8be), its switches are that commit's.

Experts are whole (`expert_tensor_parallel_size` 1) in all of them. User buffers (`tp_comm_overlap`) are off for
DeepSeek-V3, Kimi K2 and Nemotron 3 Super, and with NVFP4. All of them reduce gradients in BF16 (`grad_reduce_in_fp32`
False) and gather parameters behind the first forward (`overlap_param_gather`), but for Llama and DeepSeek in MXFP8 of
25.11 (v0.2.0: NaN in the gradients' norm) and Llama 3.1 405B in NVFP4 on GB200 from 26.06 on
(`disable_param_gather_overlap`); DeepSeek-V3 and Kimi K2 on H100 reduce nothing during backward
(`overlap_grad_reduce` False). Where a table prints no interleaving for Llama 3 70B in a pipeline (26.02.01, GB300), it
is the 5 chunks that its recipe has in every release.

DeepSeek-V3's layers are laid out over model chunks by `set_deepseek_v3_pipeline_model_parallel_layout`, Kimi K2's by
`_get_kimi_k2_pipeline_layout`; 8 chunks of a table without multi-token prediction have no entry there and are assumed
to be those of the entry with it.

The loss is Transformer Engine's cross entropy in all of them (`cross_entropy_fusion_impl` "te"; before 25.11 in the
models' files of `scripts/performance/configs`).

How tokens travel is `moe_flex_dispatcher_backend` (`flex_dispatcher_backend.py`: from 26.02 HybridEP is for every GPU
from Ampere on): see `_dispatcher_of`. Where tokens are dropped (25.09, `apply_moe_token_drop`), experts have a
capacity; Qwen3-30B's whole layers are then CUDA graphs on Blackwell (`cuda_graphs` of
`qwen3_30b_a3b_llm_pretrain.yaml`). Qwen3-30B on H100 overlaps its all-to-alls up to 26.02.01. Parts that are CUDA
graphs (`cuda_graph_scope`): see `_graphs_of`. Where whole iterations are, experts are fused, too
(`cutedsl_fused_grouped_mlp`), attention multiplies in MXFP8 (`fp8_dot_product_attention`; DeepSeek-V3's on GB200 does
not), and so does the head of DeepSeek-V3 and gpt-oss (`fp8_output_proj`). gpt-oss on B200 and GB200 has HybridEP in
26.04 alone (taken out by 1513a102 and 14b537ea).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import AttentionKernel, Dispatcher, GraphModule, RecomputeModule
from lagom_overlap.workload.precision import DType, Precision, ProductFormat

Release = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a release's recipe switches on that the table does not print."""

    overlaps_experts: bool = False
    graphed: bool = False
    fused_experts: bool = False
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    again: tuple[RecomputeModule, ...] = ()
    overlaps_tensor: bool = True
    reduction: DType = DType.FP32
    overlaps_parameters: bool = True
    overlaps_gradients: bool = True
    fused_loss: bool = False
    attention: AttentionKernel | None = None
    graphs: tuple[GraphModule, ...] = ()
    narrow_attention: bool = False
    narrow_head: bool = False


_ATTN, _MAMBA = GraphModule.ATTN, GraphModule.MAMBA
_ROUTER = (GraphModule.MOE_ROUTER, GraphModule.MOE_PREPROCESS)
_UP, _MLP = RecomputeModule.MLA_UP_PROJ, RecomputeModule.MLP
_NORM, _MOE, _ACT = RecomputeModule.LAYERNORM, RecomputeModule.MOE, RecomputeModule.MOE_ACT
_FULL_ITERATION = Recipe(overlaps_experts=True, graphed=True, fused_experts=True, narrow_attention=True)
"""Whole iterations as CUDA graphs, in MXFP8."""
_DEEPSEEK: tuple[tuple[Release, tuple[str, ...], Recipe], ...] = (
    ((25, 9, 0), ("gb200", "b200"), Recipe(again=(_UP,))),
    ((25, 9, 0), ("h100",), Recipe(again=(_UP, _MLP), overlaps_experts=True)),
    ((25, 11, 0), ("gb300",), Recipe(again=(_ACT,))),
    ((25, 11, 0), ("gb200", "b200"), Recipe(again=(_UP,))),
    ((26, 2, 0), ("gb300", "gb200", "b300", "b200"), Recipe(again=(_UP,))),
    ((26, 4, 0), ("gb200",), Recipe(again=(_MLP,))),
    ((26, 4, 1), ("b200",), Recipe(again=(_UP, _MLP), overlaps_experts=True)),
    ((26, 6, 0), ("gb300",), replace(_FULL_ITERATION, narrow_head=True)),
    ((26, 6, 0), ("gb200",), replace(_FULL_ITERATION, again=(_UP,), narrow_attention=False, narrow_head=True)),
)
"""From a release on, until a later line of the same GPU."""
_NEMOTRON_NANO = {"h100": Recipe(again=(_MOE, _NORM, RecomputeModule.CORE_ATTN, _ACT))}
_NEMOTRON_SUPER = {"b200": Recipe(again=(_ACT, _NORM))}
"""Nemotron 3 in MXFP8, and in FP8 with a scale per tensor on H100: the same from 26.02.01 to 26.08."""
_NEMOTRON_ULTRA = Recipe(again=(_ACT,), fused_experts=True, overlaps_tensor=False)
"""26.08: its loss is Megatron-Core's, its parameters are sharded within each rack (Megatron-FSDP): not modelled with
multi-token prediction, parameters stay whole here."""
_KIMI: tuple[tuple[Release, tuple[str, ...], Recipe], ...] = (
    ((26, 2, 0), ("gb300", "gb200", "b300", "b200"), Recipe(again=(_UP,))),
    ((26, 2, 0), ("h100",), Recipe(again=(_UP, _MLP))),
)
_GPT_OSS: tuple[tuple[Release, tuple[str, ...], Recipe], ...] = (
    ((25, 11, 0), ("gb200", "b200", "h100"), Recipe(again=(_NORM, _ACT))),
    ((26, 4, 0), ("gb200",), Recipe(again=(_NORM, _ACT), overlaps_experts=True)),
)
_QWEN_235B: tuple[tuple[Release, tuple[str, ...], Recipe], ...] = (
    ((25, 11, 0), ("h100", "b200"), Recipe(overlaps_experts=True)),
    ((26, 2, 0), ("b200",), Recipe()),
    ((26, 2, 0), ("b300",), Recipe(overlaps_experts=True)),  # also of 26.02.01, whose table has its degrees
    ((26, 4, 0), ("b300",), Recipe()),
)
_SUPER_WIDE = 14
_SUPER_OTHERS = (
    ("qkv", ProductFormat.PARAMETER), ("out", ProductFormat.PARAMETER), ("expert_enter", ProductFormat.PARAMETER),
    ("expert_leave", ProductFormat.PARAMETER), ("mamba_out", ProductFormat.MXFP8),
)  # fmt: skip
"""Nemotron 3 Super in NVFP4 (`te_quant.cfg`, `num_layers_at_end_in_bf16`, v0.4.0); multi-token prediction is BF16."""
_CHUNKS = {8: ("Et*8|(t*8|)*6t*5", "L"), 16: ("Et*4|(t*4|)*14t", "L"), 32: ("Et|(tt|)*30", "L")}
_LAID_OUT = ("deepseek-v3", "kimi-k2")
_QWEN_LATE: Release = (26, 6, 0)
_MERGED_EVERYWHERE: Release = (26, 2, 1)
_MX = ("mxfp8", "fp8-mx")
_BRIDGE: Release = (25, 11, 0)
"""The first release whose recipes are files of presets."""


def recipe_of(model: TransformerModel, release: Release | None, gpu: str, precision: str, *, drops: bool) -> Recipe:
    """The recipe of a row; without a release, nothing but defaults. `drops`: experts have a capacity."""
    if release is None:
        return Recipe()
    if not model.num_experts:
        return _switches(model, release, gpu, precision)
    if drops:
        found = replace(_switches(model, release, gpu, precision), dispatcher=Dispatcher.CAPACITY)
        return replace(found, graphed=model.name == "qwen3-30b-a3b" and gpu != "h100")
    found = replace(_switches(model, release, gpu, precision), dispatcher=_dispatcher_of(model.name, release, gpu))
    return found if found.graphed else replace(found, graphs=_graphs_of(model.name, release, gpu, precision))


def _graphs_of(model: str, release: Release, gpu: str, precision: str) -> tuple[GraphModule, ...]:
    """The parts of layers that are CUDA graphs, from 25.11 on."""
    is_rack, is_bf16 = gpu.startswith("gb"), precision == "bf16"
    with_attention = (_ATTN, *_ROUTER)
    if release < _BRIDGE:
        return ()
    if model == "qwen3-30b-a3b":
        if gpu == "h100":
            return _ROUTER if is_bf16 else ()
        has = (gpu == "b200" and release >= _MERGED_EVERYWHERE) or (gpu == "gb200" and precision not in _MX)
        return with_attention if has else _ROUTER
    if model == "qwen3-235b-a22b":
        late = gpu == "gb200" or release >= (26, 2, 0)
        return (with_attention if late else _ROUTER) if is_rack else ()
    if model == "deepseek-v3":
        if release < (26, 2, 0):
            return {"gb300": with_attention, "gb200": _ROUTER}.get(gpu, ())
        has = gpu == "gb200" or (gpu == "gb300" and is_bf16) or (gpu in ("b200", "b300") and release >= (26, 4, 1))
        return with_attention if has else ()
    if model == "kimi-k2":
        return _ROUTER if gpu == "gb200" else ()
    if model == "gpt-oss-120b":
        return with_attention if gpu in ("gb300", "b300") else ()
    if model.startswith("nemotron-3"):
        if gpu == "h100":
            return (_ATTN, _MAMBA) if is_bf16 else (_MAMBA,)
        if "ultra" in model:
            return ()
        return () if gpu == "b200" and "super" in model else (_ATTN, _MAMBA, *_ROUTER)
    return ()


def _dispatcher_of(model: str, release: Release, gpu: str) -> Dispatcher:
    """DeepEP and HybridEP are one here; racks have them from 25.11 on."""
    merged = (
        (model.startswith("qwen3-30b") and (gpu == "b300" or release >= _MERGED_EVERYWHERE))
        or (model == "deepseek-v3" and (gpu == "h100" or release >= (26, 2, 0)))
        or model.startswith("nemotron-3")
        or (model.startswith("gpt-oss") and gpu == "b300" and release >= (26, 4, 0))
        or (model.startswith("gpt-oss") and gpu in ("b200", "gb200") and release == (26, 4, 0))
        or (model.startswith("qwen3-235b") and gpu == "b300" and release >= (26, 4, 1))
        or (gpu.startswith("gb") and not model.startswith("gpt-oss"))
    )
    return Dispatcher.MERGED if merged else Dispatcher.ALL_TO_ALL


def _switches(model: TransformerModel, release: Release, gpu: str, precision: str) -> Recipe:
    """What is switched on, how tokens travel left out."""
    llama_or_deepseek = model.name.startswith(("llama-3", "deepseek"))
    exposed = (release < (26, 2, 0) and release >= _BRIDGE and precision in _MX and llama_or_deepseek) or (
        model.name == "llama-3-405b" and gpu == "gb200" and precision == "nvfp4" and release >= (26, 6, 0)
    )
    late = model.name in _LAID_OUT and gpu == "h100"  # Megatron-Core overlaps parameters' gathers with both or neither
    return replace(
        _of_model(model, release, gpu, precision),
        reduction=DType.BF16,
        fused_loss="ultra" not in model.name,
        overlaps_parameters=not (exposed or late),
        overlaps_gradients=not late,
    )


def _of_model(model: TransformerModel, release: Release, gpu: str, precision: str) -> Recipe:
    if model.name.startswith("qwen3") and release >= _QWEN_LATE and precision in ("mxfp8", "fp8-mx"):
        return _FULL_ITERATION  # commit 55443cb3, June 2026
    if model.name == "qwen3-30b-a3b":
        overlaps = gpu == "h100" and _BRIDGE <= release <= _MERGED_EVERYWHERE
        return Recipe(overlaps_experts=overlaps)
    if model.name in _LAID_OUT:
        found = _last(_DEEPSEEK if model.name == "deepseek-v3" else _KIMI, release, gpu)
        return replace(found, overlaps_tensor=False)
    if model.name == "gpt-oss-120b":
        late = release >= _QWEN_LATE and precision in ("mxfp8", "fp8-mx") and gpu in ("gb200", "gb300")
        return replace(_FULL_ITERATION, narrow_head=True) if late else _last(_GPT_OSS, release, gpu)
    if model.name == "qwen3-235b-a22b":
        return _last(_QWEN_235B, release, gpu)
    if "ultra" in model.name:
        return _NEMOTRON_ULTRA
    if model.name.startswith("nemotron-3"):
        known = _NEMOTRON_SUPER if "super" in model.name else _NEMOTRON_NANO
        return replace(known.get(gpu, Recipe()), overlaps_tensor="super" not in model.name)
    return Recipe()


def _last(lines: Sequence[tuple[Release, tuple[str, ...], Recipe]], release: Release, gpu: str) -> Recipe:
    found = [recipe for since, gpus, recipe in lines if release >= since and gpu in gpus]
    return found[-1] if found else Recipe()


def precision_of(model: TransformerModel, products: ProductFormat, recipe: Recipe) -> Precision:
    """The number formats of a row: in NVFP4 some of Nemotron 3 Super's matrices multiply in others."""
    plain = Precision(DType.BF16, DType.BF16, recipe.reduction, products)
    if products is ProductFormat.MXFP8:
        attention = products if recipe.narrow_attention else ProductFormat.PARAMETER
        return replace(plain, attention=attention, others=(("logits", products),) if recipe.narrow_head else ())
    if products is not ProductFormat.NVFP4 or "super" not in model.name:
        return plain
    return replace(plain, others=_SUPER_OTHERS, wide_layers=_SUPER_WIDE)


def layout_of(model: TransformerModel, num_chunks: int) -> str:
    """The pipeline layout of DeepSeek-V3 and Kimi K2; "" where the recipes have none, and for other models."""
    if model.name not in _LAID_OUT or num_chunks not in _CHUNKS:
        return ""
    before, after = _CHUNKS[num_chunks]
    return before + "m" * model.mtp_layers + after
