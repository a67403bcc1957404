"""Presets: one TOML file per cluster, each number with its source and date in a comment beside it."""

import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.hardware.cluster import Cluster

MAX_PRESET_BYTES: Final = 1 << 20


def preset_names() -> list[str]:
    """The names that `load_preset` knows, sorted."""
    folder = resources.files(__package__) / "data"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str, num_nodes: int | None = None) -> Cluster:
    """The cluster of that name, or of that file where the name ends in `.toml`; with `num_nodes` nodes if given.

    A file has the keys of a preset; an `[operators]` table beside them is for the cost model.

    Raises:
        UnknownNameError: if there is no such preset.
        JobError: if the file cannot be read or describes no cluster.
    """
    if name.endswith(".toml"):
        tables = read_preset_file(Path(name))
        tables.pop("operators", None)
        try:
            cluster = msgspec.convert(tables, Cluster)
        except msgspec.ValidationError as error:
            raise JobError(f"cluster file {name!r}: {error}") from None
        unknown = sorted(set(tables) - set(Cluster.__slots__))
        if unknown:
            raise JobError(
                f"cluster file {name!r}: unknown key {unknown[0]!r}; allowed: {', '.join(Cluster.__slots__)}"
            )
    else:
        if name not in preset_names():
            raise UnknownNameError.among("cluster preset", name, preset_names())
        text = (resources.files(__package__) / "data" / f"{name}.toml").read_text(encoding="utf-8")
        cluster = msgspec.convert(tomllib.loads(text), Cluster)
    return cluster if num_nodes is None else replace(cluster, num_nodes=num_nodes)


def read_preset_file(path: Path) -> dict[str, Any]:  # any TOML value
    """The tables of a cluster file.

    Raises:
        JobError: if it cannot be read, is oversized or no TOML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PRESET_BYTES + 1)
        if len(content) > MAX_PRESET_BYTES:
            raise JobError(
                f"cluster file {str(path)!r} has more than {MAX_PRESET_BYTES} bytes, the most that is allowed"
            )
        return tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise JobError(f"cluster file {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise JobError(f"cluster file {str(path)!r} is not TOML: {error}") from None
