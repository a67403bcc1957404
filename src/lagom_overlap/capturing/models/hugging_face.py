"""Hugging Face models from their published configurations: `transformers` builds the module, nothing is downloaded.

Each configuration repeats the numbers of the model's `config.json` that differ from the class's defaults; the sources
are next to them. Attention is PyTorch's (`sdpa`). With expert parallelism the experts are ours (`experts.py`), routed
evenly; without it `transformers`' own grouped products.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  torch's customary name
import transformers
from torch import nn

from lagom_overlap.capturing.fake_tensor import TrainingStep
from lagom_overlap.capturing.models.degrees import Degrees
from lagom_overlap.capturing.models.experts import RoutedExperts
from lagom_overlap.capturing.models.parallelize import (
    apply_data,
    data_mesh,
    default_dtype,
    optimizers_of,
    spread_experts,
)
from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.record import read_regular

PREFIX: Final = "hf:"
_MAX_BYTES: Final = 1 << 20
"""Chosen: a config.json has some KB; a larger file is none."""


@dataclass(frozen=True, slots=True)
class _Published:
    """A configuration class and its numbers; `layers` is where the list of layers is found."""

    config: str
    fields: Mapping[str, Any]
    layers: str = "model.layers"


_MODELS: Final[Mapping[str, _Published]] = {
    # microsoft/phi-2, config.json (Dec 2023): 2.78 B
    "phi-2": _Published(
        "PhiConfig",
        {
            "vocab_size": 51200,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.4,
        },
    ),
    # meta-llama/Meta-Llama-3-8B, config.json (Apr 2024): 8.03 B
    "llama-3-8b": _Published(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
    ),
    # mosaicml/mpt-7b, config.json (May 2023): 6.65 B
    "mpt-7b": _Published(
        "MptConfig",
        {"d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "vocab_size": 50432},
        layers="transformer.blocks",
    ),
    # allenai/OLMoE-1B-7B-0924, config.json (Sep 2024): 6.92 B
    "olmoe-1b-7b": _Published(
        "OlmoeConfig",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
        },
    ),
    # deepseek-ai/DeepSeek-V2-Lite, config.json (May 2024): 15.7 B, multi-head latent attention
    "deepseek-v2-lite": _Published(
        "DeepseekV2Config",
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
    ),
}


def _published(name: str) -> _Published:
    """A model by name, or by a `config.json` of one's own: a file or the folder that holds it.

    Raises:
        UnknownNameError: if there is neither.
        JobError: if the file is no configuration that transformers knows.
    """
    published = _MODELS.get(name)
    if published is not None:
        return published
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise UnknownNameError.among("model", PREFIX + name, [*hugging_face_names(), f"{PREFIX}PATH/config.json"])
    try:
        fields = json.loads(read_regular(path, _MAX_BYTES))
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise JobError(
            f"{path}: transformers {transformers.__version__} knows no such configuration: {error}"
        ) from error
    return _Published(type(config).__name__, config.to_diff_dict() | fields, layers="")


def _layers_of(model: nn.Module, published: _Published, num_layers: int) -> list[nn.Module]:
    """The blocks that are gathered one by one: the model's list of as many modules as it has layers."""
    if published.layers:
        return list(model.get_submodule(published.layers).children())
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    return list(lists[0]) if lists else []


def hugging_face_names() -> list[str]:
    """The names that can be captured, with the prefix that tells them from our own modules."""
    return sorted(f"{PREFIX}{name}" for name in _MODELS)


def _replace_experts(model: nn.Module, config: Any) -> None:
    ffn = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    num_experts = getattr(config, "n_routed_experts", None) or config.num_experts
    for module in model.modules():
        if type(module).__name__.endswith("Experts") or not hasattr(module, "experts"):
            continue
        module.experts = RoutedExperts(hidden=config.hidden_size, ffn=ffn, num_experts=num_experts)


def _check(name: str, published: _Published, degrees: Degrees) -> None:
    for key in ("tensor", "pipeline", "axial"):
        if getattr(degrees, key) > 1:
            raise JobError(f"parallel: {key} is not captured for {PREFIX}{name}; allowed: replicate, fsdp, expert")
    if degrees.expert > 1 and not {"num_experts", "n_routed_experts"} & set(published.fields):
        raise JobError(f"parallel: expert is {degrees.expert}, but model {PREFIX}{name} has no experts")


def hugging_face_step(
    name: str,
    degrees: Degrees,
    *,
    micro_batch: int,
    seq_len: int,
    num_micro_batches: int = 1,
    num_layers: int | None = None,
) -> Callable[[], TrainingStep]:
    """What builds the training step of a model by name; `num_layers` makes it shallower.

    Raises:
        UnknownNameError: if there is no such model.
        JobError: if it cannot be parallelised so.
    """
    published = _published(name.removeprefix(PREFIX))
    _check(name.removeprefix(PREFIX), published, degrees)
    fields = dict(published.fields)
    if num_layers is not None:
        fields["n_layers" if "n_layers" in fields else "num_hidden_layers"] = num_layers

    def build() -> TrainingStep:
        config = getattr(transformers, published.config)(**fields)
        config.use_cache = False
        options: dict[str, Any] = {} if published.config == "MptConfig" else {"attn_implementation": "sdpa"}
        data, _ = data_mesh(degrees)
        with default_dtype(torch.float32 if data is not None else torch.bfloat16):
            options["dtype"] = torch.get_default_dtype()
            from_config: Callable[..., nn.Module] = transformers.AutoModelForCausalLM.from_config
            model = from_config(config, **options)
            if degrees.expert > 1:
                _replace_experts(model, config)
        model.train()
        alone = spread_experts(model, degrees)
        apply_data(model, _layers_of(model, published, config.num_hidden_layers), data, degrees, alone)
        ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64)

        def loss(output: Any) -> torch.Tensor:
            return F.cross_entropy(output.logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())

        return TrainingStep(
            model=model,
            keyword_inputs={"input_ids": ids, "use_cache": False},
            loss=loss,
            optimizers=optimizers_of(model),
            num_micro_batches=num_micro_batches,
        )

    return build
