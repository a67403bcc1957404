"""What a training script says of its job, read as text and never run: wrappers, mesh, sizes, with the line of each.

Only what stands there as a literal is believed: a number, a default of a command-line flag, a constant of the file.
What is computed, or comes from a configuration elsewhere, is named and left to the reader.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from lagom_overlap.errors import JobError
from lagom_overlap.record import read_regular

_MAX_BYTES: Final = 4 << 20
"""Chosen: no script that people write is larger."""
_WRAPPERS: Final = MappingProxyType(
    {
        "fully_shard": "fsdp2",
        "FullyShardedDataParallel": "fsdp1",
        "FSDP": "fsdp1",
        "DistributedDataParallel": "ddp",
        "DDP": "ddp",
    }
)
"""Calls that wrap a model -> the framework of `[parallel]`."""
_PACKAGES: Final = MappingProxyType({"deepspeed": "deepspeed", "torchtitan": "torchtitan", "megatron": "megatron"})
"""Packages that bring their own wrapper -> the framework."""
_RANKS: Final = frozenset({"init_process_group", "init_device_mesh", "TrainingArguments", "Accelerator"})
"""Calls that a launcher's ranks make."""
_DEGREES: Final = MappingProxyType(
    {
        "fsdp": "fsdp", "dp_shard": "fsdp", "shard": "fsdp", "dp": "data", "dp_replicate": "data", "data": "data",
        "replicate": "data", "ddp": "data", "tp": "tensor", "tensor": "tensor", "model": "tensor", "cp": "context",
        "context": "context", "pp": "pipeline", "pipeline": "pipeline", "ep": "expert", "expert": "expert",
    }
)  # fmt: skip
"""Usual names of a mesh's dimensions -> the key of `[parallel]`."""
_SIZES: Final = MappingProxyType(
    {
        "seq_len": "seq_len", "seqlen": "seq_len", "seq_length": "seq_len", "sequence_length": "seq_len",
        "max_seq_len": "seq_len", "max_seq_length": "seq_len", "max_sequence_length": "seq_len",
        "block_size": "seq_len", "context_length": "seq_len",
        "micro_batch": "micro_batch", "micro_batch_size": "micro_batch", "batch_size": "micro_batch",
        "per_device_train_batch_size": "micro_batch", "local_batch_size": "micro_batch",
        "per_gpu_batch_size": "micro_batch", "train_micro_batch_size_per_gpu": "micro_batch",
        "gradient_accumulation_steps": "num_micro_batches", "grad_accum_steps": "num_micro_batches",
        "gradient_accumulation": "num_micro_batches", "accumulate_grad_batches": "num_micro_batches",
    }
)  # fmt: skip
"""Usual names of sizes -> what a job file calls them."""
_SHORT: Final = MappingProxyType(
    {"seq": "seq_len", "max_length": "seq_len", "batch": "micro_batch", "bs": "micro_batch", "mbs": "micro_batch"}
)
"""Names that are sizes where a number is bound to them, and anything otherwise."""
_POSITIONAL: Final = MappingProxyType({"DataLoader": (1, "batch_size")})
"""Calls that take a size by position: torch.utils.data's loader."""
_CONFIGS: Final = MappingProxyType(
    {
        "LlamaConfig": "llama", "MistralConfig": "mistral", "Qwen2Config": "qwen2", "Qwen3Config": "qwen3",
        "MixtralConfig": "mixtral", "Qwen3MoeConfig": "qwen3_moe",
    }
)  # fmt: skip
"""transformers' configuration classes -> their `model_type`."""
_SHAPES: Final = frozenset(
    {
        "hidden_size", "n_embd", "d_model", "dim", "embed_dim", "n_layer", "n_layers", "num_layers",
        "num_hidden_layers", "n_head", "n_heads", "nhead", "num_heads", "num_attention_heads",
    }
)  # fmt: skip
"""Keywords of which two make a call one that describes a model."""
_Value: TypeAlias = Callable[[ast.expr | None], str | int | None]


@dataclass(frozen=True, slots=True)
class Told:
    """A value and where the script says it."""

    value: str | int
    where: str


@dataclass(slots=True)
class ScriptFacts:
    """What a script says: its framework, degrees and sizes by the job file's key, its models' names, its backend."""

    framework: Told | None = None
    backend: Told | None = None
    degrees: dict[str, Told] = field(default_factory=dict)
    sizes: dict[str, Told] = field(default_factory=dict)
    models: list[Told] = field(default_factory=list)
    configs: list[tuple[dict[str, object], str]] = field(default_factory=list)
    """What `LlamaConfig(...)` and its like are given, as `config.json` has it, and where; computed: the expression."""
    has_ranks: bool = False
    """Whether it is started by a launcher of ranks."""
    is_whole_mesh: bool = True
    """Whether all dimensions of its mesh are told."""
    unread: list[str] = field(default_factory=list)
    """What was seen and could not be told, in words."""

    @property
    def num_ranks(self) -> int | None:
        """GPUs of the mesh as far as it is told; None: there is none."""
        degrees = [int(told.value) for key, told in self.degrees.items() if key != "expert"]  # experts share data's
        num = 1
        for degree in degrees:
            num *= degree
        return num if degrees else None


def read_script(path: Path) -> ScriptFacts:
    """The facts of a script.

    Raises:
        JobError: if it cannot be read, or is no Python.
    """
    try:
        return _facts(ast.parse(read_regular(path, _MAX_BYTES)))
    except OSError as error:
        raise JobError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (RecursionError, MemoryError):
        raise JobError(f"{str(path)!r} is nested too deeply to be read: give a model's name or a job file") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        at = f", line {line}" if line else ""
        raise JobError(f"{str(path)!r} is no Python script{at}: {getattr(error, 'msg', error)}") from None


def _facts(tree: ast.Module) -> ScriptFacts:
    facts, constants, computed = ScriptFacts(), dict(_constants(tree)), dict[str, str]()
    sizes = _Sizes(facts, computed)

    def value(expression: ast.expr | None) -> str | int | None:
        if isinstance(expression, ast.Name) and expression.id in constants:
            return constants[expression.id].value
        return _literal(expression)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            _import(node, facts)
        elif isinstance(node, ast.Call):
            _call(node, facts, sizes, value)
        elif isinstance(node, ast.FunctionDef):
            for argument, default in _defaults(node.args):
                sizes.see(argument, value(default), f"line {node.lineno}: {node.name}({argument}=...)")
    bound: dict[str, dict[str | int | None, int]] = {}
    for name, expression, line in _bindings(tree):
        bound.setdefault(name, {}).setdefault(value(expression), line)
    for name, values in bound.items():  # one that has several values in turn has none that could be told
        lines = ", ".join(map(str, values.values()))
        sizes.see(name, next(iter(values)) if len(values) == 1 else None, f"line {lines}: {name}")
    if {"fsdp", "data"} <= facts.degrees.keys():  # hybrid sharding, for which a job file has a word of its own
        facts.degrees["replicate"] = facts.degrees.pop("data")
    elif "data" in facts.degrees and facts.framework is not None and str(facts.framework.value).startswith("fsdp"):
        facts.degrees["fsdp"] = facts.degrees.pop("data")
    facts.unread += [where for key, where in computed.items() if key not in facts.sizes]
    return facts


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Takes what a script binds to the usual names of sizes: the first number counts, and others are named."""

    facts: ScriptFacts
    computed: dict[str, str]

    def see(self, name: str, value: str | int | None, where: str) -> None:
        key = _SIZES.get(name.lower(), _SHORT.get(name.lower()))
        if key is None:
            return
        if not isinstance(value, int) or value < 1:
            if name.lower() in _SIZES:
                self.computed.setdefault(key, f"{where} is no number that stands there")
            return
        first = self.facts.sizes.setdefault(key, Told(value, where))
        if first.value != value:
            self.facts.unread.append(f"{where} is {value}; {first.value} is taken ({first.where})")


def _bindings(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    """Names, attributes and keys of dictionaries, what is bound to each, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        elif isinstance(node, ast.Dict):
            for key, held in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, held, held.lineno
            continue
        else:
            continue
        if isinstance(target, ast.Name | ast.Attribute):
            yield (target.id if isinstance(target, ast.Name) else target.attr), value, node.lineno


def _constants(tree: ast.Module) -> Iterator[tuple[str, Told]]:
    """Names that the file binds once and to a literal; one that is bound again is no constant."""
    seen: dict[str, Told | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if isinstance(target, ast.Name):
            literal = _literal(value)
            constant = None if literal is None else Told(literal, f"line {node.lineno}")
            seen[target.id] = None if target.id in seen else constant
    yield from ((name, constant) for name, constant in seen.items() if constant is not None)


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Parameters of a function that have a default, and it."""
    positional = [*arguments.posonlyargs, *arguments.args]
    if arguments.defaults:
        last = positional[-len(arguments.defaults) :]
        yield from ((name.arg, default) for name, default in zip(last, arguments.defaults, strict=True))
    for name, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if keyword_default is not None:
            yield name.arg, keyword_default


def _literal(node: ast.expr | None) -> str | int | None:
    """A whole number or a text that stands there, also 2 * 1024."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(left, int) and isinstance(right, int):
            return left * right
    return None


def _import(node: ast.Import | ast.ImportFrom, facts: ScriptFacts) -> None:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        framework = _PACKAGES.get(name.partition(".")[0])
        if framework is not None and facts.framework is None:
            facts.framework = Told(framework, f"line {node.lineno}: {name} is imported")


def _call(node: ast.Call, facts: ScriptFacts, sizes: _Sizes, value: _Value) -> None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    where = f"line {node.lineno}: {name}(...)"
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}

    if name in _WRAPPERS and (facts.framework is None or "imported" not in facts.framework.where):
        facts.framework = facts.framework or Told(_WRAPPERS[name], where)
    facts.has_ranks |= name in _RANKS or name in _WRAPPERS
    match name:
        case "init_process_group":
            backend = value(keywords.get("backend", node.args[0] if node.args else None))
            if isinstance(backend, str):
                facts.backend = Told(backend, where)
        case "init_device_mesh":
            _mesh(node, keywords, facts, value)
        case "from_pretrained":
            model = value(keywords.get("pretrained_model_name_or_path", node.args[0] if node.args else None))
            if isinstance(model, str):
                facts.models.append(Told(model, where))
        case "add_argument":
            default = value(keywords.get("default"))
            for flag in map(_literal, node.args):
                default_words = f"{flag} is {default} by default" if isinstance(default, int) else f"{flag}"
                sizes.see(str(flag).lstrip("-").replace("-", "_"), default, f"line {node.lineno}: {default_words}")
        case _ if name in _CONFIGS:
            facts.configs.append(({"model_type": _CONFIGS[name]} | _shapes(keywords, value), where))
        case _:
            if len(_SHAPES & keywords.keys()) > 1:
                facts.unread.append(f"{where}, a model that is not known here")
            at, size = _POSITIONAL.get(name, (len(node.args), ""))
            for keyword, expression in [*keywords.items(), *((size, argument) for argument in node.args[at : at + 1])]:
                number = value(expression)
                sizes.see(keyword, number, f"line {node.lineno}: {name}({keyword}={number if number else '...'})")


def _shapes(keywords: Mapping[str, ast.expr], value: _Value) -> dict[str, object]:
    """Keywords of a configuration class; what is computed stays a text, which is no number."""
    return {
        key: expression.value
        if isinstance(expression, ast.Constant)
        else told
        if (told := value(expression)) is not None
        else ast.unparse(expression)
        for key, expression in keywords.items()
    }


def _mesh(node: ast.Call, keywords: Mapping[str, ast.expr], facts: ScriptFacts, value: _Value) -> None:
    shape = keywords.get("mesh_shape", node.args[1] if len(node.args) > 1 else None)
    names = keywords.get("mesh_dim_names")
    if facts.degrees:
        first = next(iter(facts.degrees.values())).where.partition(":")[0]
        facts.unread.append(f"line {node.lineno}: another device mesh; that of {first} is taken")
        return
    if not isinstance(shape, ast.Tuple | ast.List):
        facts.is_whole_mesh = False
        facts.unread.append(f"line {node.lineno}: a device mesh whose shape is not written out")
        return
    where = "mesh dimension {!r}"
    if isinstance(names, ast.Tuple | ast.List):
        dimensions = list(map(value, names.elts))
    elif len(shape.elts) == 1:  # all ranks share the data, whatever it would be called
        dimensions, where = ["data"], "a mesh of one dimension"
    else:
        facts.is_whole_mesh = False
        facts.unread.append(f"line {node.lineno}: a device mesh whose dimensions have no names")
        return
    for dimension, degree in zip(dimensions, shape.elts, strict=False):
        number, key = value(degree), _DEGREES.get(str(dimension).lower())
        if key is not None and isinstance(number, int) and number > 0:
            facts.degrees.setdefault(key, Told(number, f"line {node.lineno}: {where.format(dimension)}"))
        else:
            facts.is_whole_mesh = False
            facts.unread.append(f"line {node.lineno}: mesh dimension {dimension!r}, whose size or meaning is not told")
