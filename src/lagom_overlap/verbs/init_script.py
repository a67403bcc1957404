"""What a training script says of its job, read as text and never run: wrappers, mesh, sizes, with the line of each.

Only what stands there as a literal is believed: a number, a default of a command-line flag, a constant of the file.
What is computed, or comes from a configuration elsewhere, is left to the reader.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.record import read_regular

_MAX_BYTES: Final = 4 << 20
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
        "seq_len": "seq_len", "seq_length": "seq_len", "sequence_length": "seq_len", "max_seq_len": "seq_len",
        "max_seq_length": "seq_len", "block_size": "seq_len", "context_length": "seq_len",
        "micro_batch": "micro_batch", "micro_batch_size": "micro_batch", "batch_size": "micro_batch",
        "per_device_train_batch_size": "micro_batch", "local_batch_size": "micro_batch",
        "gradient_accumulation_steps": "num_micro_batches", "grad_accum_steps": "num_micro_batches",
        "gradient_accumulation": "num_micro_batches",
    }
)  # fmt: skip
"""Usual names of sizes -> what a job file calls them."""


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
    unread: list[str] = field(default_factory=list)
    """What was seen and could not be told, in words."""


def read_script(path: Path) -> ScriptFacts:
    """The facts of a script.

    Raises:
        JobError: if it cannot be read, or is no Python.
    """
    try:
        tree = ast.parse(read_regular(path, _MAX_BYTES))
    except OSError as error:
        raise JobError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        at = f", line {line}" if line else ""
        raise JobError(f"{str(path)!r} is no Python script{at}: {str(error).partition(' (')[0]}") from None
    facts, constants = ScriptFacts(), dict(_constants(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            _import(node, facts)
        elif isinstance(node, ast.Call):
            _call(node, facts, constants)
    if {"fsdp", "data"} <= facts.degrees.keys():  # hybrid sharding, for which a job file has a word of its own
        facts.degrees["replicate"] = facts.degrees.pop("data")
    for name, told in constants.items():
        if (key := _SIZES.get(name.lower())) is not None and isinstance(told.value, int) and told.value > 0:
            facts.sizes.setdefault(key, told)
    return facts


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
            told = None if literal is None else Told(literal, f"line {node.lineno}")
            seen[target.id] = None if target.id in seen else told
    yield from ((name, told) for name, told in seen.items() if told is not None)


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


def _call(node: ast.Call, facts: ScriptFacts, constants: Mapping[str, Told]) -> None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    where = f"line {node.lineno}: {name}(...)"
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}

    def value(expression: ast.expr | None) -> str | int | None:
        if isinstance(expression, ast.Name) and expression.id in constants:
            return constants[expression.id].value
        return _literal(expression)

    if name in _WRAPPERS and (facts.framework is None or "imported" not in facts.framework.where):
        facts.framework = facts.framework or Told(_WRAPPERS[name], where)
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
            flags = [_literal(argument) for argument in node.args]
            default = value(keywords.get("default"))
            for flag in flags:
                key = _SIZES.get(str(flag).lstrip("-").replace("-", "_").lower())
                if key is not None and isinstance(default, int) and default > 0:
                    facts.sizes.setdefault(key, Told(default, f"line {node.lineno}: {flag} is {default} by default"))
        case _:
            for keyword, expression in keywords.items():
                number, key = value(expression), _SIZES.get(keyword.lower())
                if key is not None and isinstance(number, int) and number > 0:
                    facts.sizes.setdefault(key, Told(number, f"line {node.lineno}: {name}({keyword}={number})"))


def _mesh(
    node: ast.Call,
    keywords: Mapping[str, ast.expr],
    facts: ScriptFacts,
    value: Callable[[ast.expr | None], str | int | None],
) -> None:
    shape = keywords.get("mesh_shape", node.args[1] if len(node.args) > 1 else None)
    names = keywords.get("mesh_dim_names")
    if not isinstance(shape, ast.Tuple | ast.List) or not isinstance(names, ast.Tuple | ast.List):
        facts.unread.append(f"line {node.lineno}: a device mesh whose shape or names are not written out")
        return
    for dimension, degree in zip(names.elts, shape.elts, strict=False):
        name, number = value(dimension), value(degree)
        key = _DEGREES.get(str(name).lower())
        if key is not None and isinstance(number, int) and number > 0:
            facts.degrees.setdefault(key, Told(number, f"line {node.lineno}: mesh dimension {name!r}"))
        else:
            facts.unread.append(f"line {node.lineno}: mesh dimension {name!r}, whose size or meaning is not told")
