"""A GPU's file, `gpus/NAME.toml` or a user's own: one table for each package that reads it.

    names          prefixes of the names of the GPUs that the file describes, case-insensitive
    [gpu]          the hardware: `Gpu`
    [operators]    how long operators take alone: `cost.operators`
    [contention]   what collectives take from computations: `cost.profile`
    [nccl]         what NCCL's graphs need, and measured links: `cost.nccl.machines`
    [cuda]         what an emulated device shows of itself: `lagom_emulate.launch`

A table that the user's own file lacks comes from the package's file with the longest matching prefix that has it: an
H100-SXM5-95GB gets the [nccl] of h100.toml. Last comes `any.toml`, whose prefix is empty.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.hardware.gpu import Gpu, GpuTables
from lagom_overlap.record import read_regular
from lagom_overlap.toml_tables import from_table, parse_toml

MAX_PRESET_BYTES: Final = 1 << 20
"""Chosen, not measured: presets have a few KB; a larger file is a mistake and is refused before it is parsed."""
READ_ELSEWHERE: Final = ("operators", "contention", "nccl", "cuda")
"""Tables that packages above this one decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GpuFile:
    gpu: Gpu
    names: tuple[str, ...] = ()


def read_preset_file(path: Path, what: str) -> dict[str, Any]:  # any TOML value
    """The tables of a user's file.

    Raises:
        JobError: if it cannot be read, is oversized or no TOML.
    """
    try:
        return parse_toml(read_regular(path, MAX_PRESET_BYTES))
    except OSError as error:
        raise JobError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no TOML, no UTF-8, tables in tables
        raise JobError(f"{what} {str(path)!r} is not TOML: {error}") from None


@cache
def _package_files() -> Mapping[str, dict[str, Any]]:
    folder = resources.files("lagom_overlap.gpus")
    return {
        entry.name.removesuffix(".toml"): tomllib.loads(entry.read_text(encoding="utf-8"))
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def gpu_names() -> list[str]:
    """The names that `load_gpu` knows, sorted."""
    return sorted(name for name, tables in _package_files().items() if "gpu" in tables)


def load_gpu(name: str) -> Gpu:
    """The GPU of that name, or of that file where the name ends in `.toml`.

    Raises:
        UnknownNameError: if there is no such GPU.
        JobError: if the file cannot be read or describes no GPU.
    """
    if name.endswith(".toml"):
        source = f"gpu file {name!r}"
        tables = read_preset_file(Path(name), "gpu file")
        own = taken_out(tables)
        return with_own(from_table(tables, _GpuFile, source).gpu, own, source)
    if name not in gpu_names():
        raise UnknownNameError.among("gpu", name, gpu_names())
    return _package_gpu(name)


@cache
def _package_gpu(name: str) -> Gpu:
    return from_table(_package_files()[name]["gpu"], Gpu, f"gpus/{name}.toml", "gpu.")


def names_with(table: str) -> list[str]:
    """The GPUs whose file has that table, sorted."""
    return sorted(name for name, tables in _package_files().items() if table in tables)


def taken_out(tables: dict[str, Any]) -> dict[str, Any]:
    """Removes the tables that packages above this one decode from a file's tables, and returns them."""
    return {name: tables.pop(name) for name in READ_ELSEWHERE if name in tables}


def with_own(gpu: Gpu, tables: Mapping[str, Any], source: str) -> Gpu:
    """The GPU with these tables replacing its own tables of the same names."""
    if not tables:
        return gpu
    before = {} if gpu.own is None else gpu.own.tables
    return replace(gpu, own=GpuTables(source, {**before, **tables}))


def table_of(gpu: Gpu, name: str) -> tuple[Any, str] | None:
    """A table about the GPU, and the name of the file that it is from for messages; None if no file has it."""
    if gpu.own is not None and name in gpu.own.tables:
        return gpu.own.tables[name], gpu.own.source
    gpu_name = gpu.name.casefold()
    matches = [
        (len(beginning), file)
        for file, tables in _package_files().items()
        for beginning in tables["names"]
        if name in tables and gpu_name.startswith(beginning.casefold())
    ]
    if not matches:
        return None
    file = max(matches)[1]
    return _package_files()[file][name], f"gpus/{file}.toml"
