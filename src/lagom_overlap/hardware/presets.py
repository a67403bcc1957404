"""Presets: one TOML file per cluster, each number with its source and date in a comment beside it."""

import tomllib
from dataclasses import replace
from importlib import resources

import msgspec

from lagom_overlap.errors import UnknownNameError
from lagom_overlap.hardware.cluster import Cluster


def preset_names() -> list[str]:
    """The names that `load_preset` knows, sorted."""
    folder = resources.files(__package__) / "data"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str, num_nodes: int | None = None) -> Cluster:
    """The cluster of that name, with `num_nodes` nodes if given.

    Raises:
        UnknownNameError: if there is no such preset.
    """
    if name not in preset_names():
        raise UnknownNameError.among("cluster preset", name, preset_names())
    text = (resources.files(__package__) / "data" / f"{name}.toml").read_text(encoding="utf-8")
    cluster = msgspec.convert(tomllib.loads(text), Cluster)
    return cluster if num_nodes is None else replace(cluster, num_nodes=num_nodes)
