"""The model of a job file that `lagom init` writes: one by name, a model file, or a Hugging Face `config.json`.

Of a `config.json` the shapes are taken that decide what a step costs; what is not known here is refused, never guessed.
Keys and their meaning: transformers' configuration classes of the model types below.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import tomli_w

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.reading import MAX_JOB_BYTES
from lagom_overlap.record import read_regular
from lagom_overlap.toml_tables import from_table
from lagom_overlap.workload.models import TransformerModel, load_model

_GATED: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_MIXTURES: Final = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
"""Model types whose layers are all mixtures, and their key of how many experts there are."""


def read_model(source: str) -> tuple[TransformerModel, bytes]:
    """The model, and the model file that holds it where there is none yet.

    Raises:
        LagomError: if there is no such model, or the file describes none.
    """
    if not source.endswith(".json"):
        return load_model(source), b""
    path = Path(source)
    try:
        config = msgspec.json.decode(read_regular(path, MAX_JOB_BYTES))
    except FileNotFoundError:
        raise JobError(f"{source!r} does not exist") from None
    except OSError as error:
        raise JobError(f"{source!r} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobError(f"{source!r} is no JSON: {error}") from None
    return model_file(config, source, path.name)


def model_file(config: Any, where: str, file: str) -> tuple[TransformerModel, bytes]:  # any JSON value
    """The model that a `config.json` describes, and the model file that holds it; `file` is what it was read from.

    Raises:
        JobError: as `model_table`.
    """
    table = model_table(config, where)
    model = from_table(table, TransformerModel, repr(where))
    head = f"# Written by lagom init from {safe_name(file)}, model_type {config['model_type']}.\n"
    return model, (head + tomli_w.dumps(table)).encode()


_DEFAULTS: Final = {"llama": frozenset({"num_key_value_heads", "head_dim"}), "qwen2": frozenset({"head_dim"}),
                    "mistral": frozenset({"head_dim"}), "mixtral": frozenset({"head_dim"}),
                    "qwen3_moe": frozenset({"head_dim"})}  # fmt: skip
"""Keys whose default in transformers' class is what `model_table` takes where they are missing (5.23)."""


def unwritten(config: Mapping[str, object]) -> tuple[str, ...]:
    """Keys that a call of a configuration class leaves to its defaults, and that `model_table` would miss."""
    kind = str(config["model_type"])
    needed = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ]
    needed.append("moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size")
    if kind in _MIXTURES:
        needed += [_MIXTURES[kind], "num_experts_per_tok"]
    return tuple(key for key in needed if key not in config and key not in _DEFAULTS.get(kind, ()))


def model_table(config: Any, where: str) -> dict[str, Any]:  # any JSON value
    """The table of a model file from a Hugging Face `config.json`.

    Raises:
        JobError: if it is of another kind of model than those known here, or lacks a key.
    """
    if not isinstance(config, dict) or "model_type" not in config:
        raise JobError(f"{where!r} is no config.json of a model: it has no 'model_type'")
    kind = config["model_type"]
    if not isinstance(kind, str) or (kind not in _GATED and kind not in _MIXTURES):
        known = ", ".join(sorted((*_GATED, *_MIXTURES)))
        raise JobError(
            f"{where!r}: model_type is {str(kind)[:40]!r}, known here are {known}; write a model file "
            "(lagom docs formats), or lagom capture the model's code"
        )
    for key in ("use_sliding_window", "mlp_only_layers"):
        if config.get(key):
            raise JobError(
                f"{where!r}: {key} is {str(config[key])[:40]}, which lagom init does not know; write a model file"
            )
    if config.get("decoder_sparse_step", 1) != 1:
        raise JobError(
            f"{where!r}: decoder_sparse_step is {config['decoder_sparse_step']!r}, must be 1: every layer a mixture"
        )

    def number(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            shown = "missing" if value is None else repr(value)[:40]
            raise JobError(f"{where!r}: {key} is {shown}, must be a whole number")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    if heads < 1:
        raise JobError(f"{where!r}: num_attention_heads is {heads}, must be at least 1")
    is_mixture = kind in _MIXTURES
    width = "moe_intermediate_size" if is_mixture and "moe_intermediate_size" in config else "intermediate_size"
    folder = Path(where).resolve().parent.name
    table: dict[str, Any] = {
        "name": safe_name(str(config.get("_name_or_path") or folder).rstrip("/").rpartition("/")[2]) or kind,
        "num_layers": number("num_hidden_layers"),
        "hidden": hidden,
        "ffn": number(width),
        "num_heads": heads,
        "num_kv_heads": number("num_key_value_heads") if config.get("num_key_value_heads") is not None else heads,
        "head_dim": number("head_dim") if config.get("head_dim") is not None else hidden // heads,
        "vocab": number("vocab_size"),
        "gated": True,
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    if is_mixture:
        table |= {"num_experts": number(_MIXTURES[kind]), "experts_per_token": number("num_experts_per_tok")}
    return table


def safe_name(text: str) -> str:
    """A name that a file may have, and that ends no comment."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:80]
