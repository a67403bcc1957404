"""A GPU's file, `gpus/NAME.toml` or a user's own: all that is known of it, in a table for each who reads it.

    names          beginnings of the names of GPUs that the file is about, in any case of letters
    [gpu]          the hardware: `Gpu`
    [operators]    how long operators take alone: `cost.operators`
    [contention]   what collectives take from computations: `cost.profile`
    [nccl]         what NCCL's graphs need, and measured links: `cost.nccl.machines`
    [cuda]         what an emulated device shows of itself: `lagom_emulate.launch`

A table that is in no file of the user's own is that of the package's file with the longest beginning that has it: an
H100-SXM5-95GB has the [nccl] of h100.toml. Last comes `any.toml`, whose beginning is empty.
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
    """Of a file's tables those that packages above decode, which are no longer among the others."""
    return {name: tables.pop(name) for name in READ_ELSEWHERE if name in tables}


def with_own(gpu: Gpu, tables: Mapping[str, Any], source: str) -> Gpu:
    """The GPU with those tables in place of its own ones."""
    if not tables:
        return gpu
    before = {} if gpu.own is None else gpu.own.tables
    return replace(gpu, own=GpuTables(source, {**before, **tables}))


def table_of(gpu: Gpu, name: str) -> tuple[Any, str] | None:
    """A table about the GPU and the file that has it, in words; None if no file does."""
    if gpu.own is not None and name in gpu.own.tables:
        return gpu.own.tables[name], gpu.own.source
    called = gpu.name.casefold()
    known = [
        (len(beginning), file)
        for file, tables in _package_files().items()
        for beginning in tables["names"]
        if name in tables and called.startswith(beginning.casefold())
    ]
    if not known:
        return None
    file = max(known)[1]
    return _package_files()[file][name], f"gpus/{file}.toml"
