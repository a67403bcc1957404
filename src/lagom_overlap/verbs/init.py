"""`lagom init SOURCE`: a commented job file, from a model's name, a Hugging Face `config.json`, or a model file.

Of a `config.json` the shapes are taken that decide what a step costs; what is not known here is refused, never guessed.
Keys and their meaning: transformers' configuration classes of the model types below.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import tomli_w

from lagom_overlap.errors import JobError, LagomError, OutputError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.spec import MAX_JOB_BYTES, ClusterTable, parse_job
from lagom_overlap.jobfile.step import JobStep, job_step, stated_cluster
from lagom_overlap.record import read_regular, write_private
from lagom_overlap.toml_tables import from_table
from lagom_overlap.units import format_memory, format_seconds
from lagom_overlap.workload.models import TransformerModel, load_model

SEQ_LEN: Final = 4096
_GATED: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_MIXTURES: Final = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
"""Model types whose layers are all mixtures, and their key of how many experts there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRequest:
    """What to write a job of: a model's name, a `*.toml` of one or a `config.json`; on so many GPUs of a cluster."""

    source: str
    cluster: str
    num_gpus: int
    seq_len: int = SEQ_LEN
    out: Path = Path("job.toml")
    only_checks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InitResult:
    """The files that were written, the job file first (none by a check), and what is to be known of it."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


def run_init(request: InitRequest) -> InitResult:
    """Writes the job file, and a model file next to it where a `config.json` was read; a check writes neither.

    Raises:
        LagomError: if the source is no model, the GPUs fill no nodes, or a file is there already.
    """
    model, model_text = _model(request.source)
    cluster = _cluster(request)
    files = {request.out: b""}
    name = request.source
    if model_text:
        model_path = request.out.with_name(f"{model.name}.model.toml")
        files[model_path], name = model_text, str(model_path)
    for path in files:
        if path.exists():
            raise OutputError(f"{str(path)!r} is there already, must not exist: give another --out")
        if not path.absolute().parent.is_dir():
            raise OutputError(f"folder {str(path.absolute().parent)!r} does not exist")
    with TemporaryDirectory() as folder:
        own = Path(folder) / "model.toml"
        own.write_bytes(model_text)
        parallel, step = _first_that_fits(request, str(own) if model_text else name)
    notes = _notes(step, parallel)
    if request.only_checks:
        return InitResult(files=(), notes=notes)
    files[request.out] = _job_text(request, name, model, cluster, parallel).encode()
    for path, content in reversed(files.items()):  # the job file last: it names the other
        write_private(path, content)
    return InitResult(files=tuple(files), notes=notes)


def _cluster(request: InitRequest) -> Cluster:
    cluster = stated_cluster(ClusterTable(preset=request.cluster))
    each = cluster.gpus_per_node
    if request.num_gpus > each and request.num_gpus % each:
        raise JobError(
            f"--gpus {request.num_gpus}: must be at most a node's {each} GPUs ({cluster.name}), or a multiple"
        )
    return cluster


def _model(source: str) -> tuple[TransformerModel, bytes]:
    """The model, and the model file that holds it where there is none yet."""
    if not source.endswith(".json"):
        return load_model(source), b""
    path = Path(source)
    try:
        config = msgspec.json.decode(read_regular(path, MAX_JOB_BYTES))
    except FileNotFoundError:
        raise JobError(f"{source!r} does not exist") from None
    except OSError as error:
        raise JobError(f"{source!r} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise JobError(f"{source!r} is no JSON: {error}") from None
    table = model_table(config, source)
    model = from_table(table, TransformerModel, repr(source))
    head = f"# Written by lagom init from {path.name}, model_type {config['model_type']}.\n"
    return model, (head + tomli_w.dumps(table)).encode()


def model_table(config: Any, where: str) -> dict[str, Any]:  # any JSON value
    """The table of a model file from a Hugging Face `config.json`.

    Raises:
        JobError: if it is of another kind of model than those known here, or lacks a key.
    """
    if not isinstance(config, dict) or "model_type" not in config:
        raise JobError(f"{where!r} is no config.json of a model: it has no 'model_type'")
    kind = config["model_type"]
    if kind not in _GATED and kind not in _MIXTURES:
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
            raise JobError(f"{where!r}: {key} is {str(value)[:40]}, must be a whole number")
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    if heads < 1:
        raise JobError(f"{where!r}: num_attention_heads is {heads}, must be at least 1")
    is_mixture = kind in _MIXTURES
    width = "moe_intermediate_size" if is_mixture and "moe_intermediate_size" in config else "intermediate_size"
    folder = Path(where).resolve().parent.name
    table: dict[str, Any] = {
        "name": _safe(str(config.get("_name_or_path") or folder).rstrip("/").rpartition("/")[2]) or kind,
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


def _first_that_fits(request: InitRequest, model: str) -> tuple[Mapping[str, Any], JobStep]:
    """FSDP over all GPUs, and with every layer recomputed where that does not fit; one GPU without it.

    A start, not advice: which layout is the fastest is `lagom simulate --model`'s question.
    """
    plain: dict[str, Any] = {"fsdp": request.num_gpus} if request.num_gpus > 1 else {"framework": "ddp"}
    found: tuple[Mapping[str, Any], JobStep] | None = None
    for parallel in (plain, {**plain, "recompute": "full"}):
        tables = {
            "job": {"name": "init"},
            "model": {"name": model, "seq_len": request.seq_len},
            "cluster": {"preset": request.cluster},
            "parallel": parallel,
        }
        step = job_step(parse_job(tables, "lagom init"))
        assert step is not None, model
        found = parallel, step
        if step.fits:
            break
    assert found is not None
    return found


def _job_text(
    request: InitRequest, name: str, model: TransformerModel, cluster: Cluster, parallel: Mapping[str, Any]
) -> str:
    nodes = -(-request.num_gpus // cluster.gpus_per_node)
    each = min(cluster.gpus_per_node, request.num_gpus)
    quoted = {key: tomli_w.dumps({key: value}).strip() for key, value in parallel.items()}
    said = {
        "fsdp": "fully sharded data parallelism over so many GPUs; or data, tensor, pipeline, context, expert",
        "framework": "fsdp2, ddp, torchtitan, megatron, ... (lagom list frameworks)",
        "recompute": "none, selective, full: without it this does not fit",
    }
    file, gpus = _safe(request.out.name), f"{request.num_gpus} GPUs of {_safe(cluster.name)}"
    lines = [
        f"# Written by lagom init: {_safe(model.name)} on {gpus}. All keys: lagom docs formats",
        "#",
        f"#   lagom simulate {file}    # what a step takes, what it holds, whether a change would pay",
        f"#   lagom plan {file}        # settings of the framework",
        f"#   lagom tune {file}        # settings of each collective",
        "",
        "[job]",
        tomli_w.dumps({"name": f"{model.name}-{request.num_gpus}"}).strip(),
        "",
        "[model]",
        tomli_w.dumps({"name": name}).strip() + "    # lagom list models; or a model file",
        f"seq_len = {request.seq_len}",
        "",
        "[cluster]",
        tomli_w.dumps({"preset": request.cluster}).strip() + "    # lagom list clusters; or a file of your own",
        f"nodes = {nodes}",
        *((f"gpus_per_node = {each}",) if each != cluster.gpus_per_node else ()),
        "",
        "[parallel]",
        *(f"{text}    # {said[key]}" for key, text in quoted.items()),
        "micro_batch = 1    # sequences per GPU",
    ]
    return "\n".join(lines) + "\n"


def _safe(text: str) -> str:
    """A name that a file may have, and that ends no comment."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:80]


def _notes(step: JobStep, parallel: Mapping[str, Any]) -> tuple[str, ...]:
    """Whether it fits, and what a step is predicted to take."""
    try:
        check_memory(step)
    except LagomError as error:
        return (f"It does not fit as it stands: {error}",)
    need, has = format_memory(step.most_bytes), format_memory(step.cluster.gpu.memory_bytes)
    again = " with every layer recomputed" if "recompute" in parallel else ""
    seconds = step.times.iteration_s
    rate = step.layout.global_batch * step.seq_len / seconds
    return (
        f"It fits{again}: {need} of {has} per GPU.",
        f"A step is predicted to take {format_seconds(seconds)}, {rate:,.0f} tokens/s.",
    )


def next_lines(request: InitRequest) -> Sequence[str]:
    """What to type next."""
    model = request.source
    lines = [f"Next: lagom simulate {request.out}"]
    if not model.endswith(".json"):
        ranks = f"--model {model} --cluster {request.cluster} --gpus {request.num_gpus} --seq-len {request.seq_len}"
        lines.append(f"Which layout is the fastest: lagom simulate {ranks}")
    return lines
