"""A framework's file, `frameworks/NAME.toml`: all that is known of it, in a table for each who reads it.

extends        another framework, whose tables count where this file's say nothing (of all but `title`)
title          what people call it, where plans are made for its steps
[rules]        how it issues a step: `rules.IssueRules`
[constants]    what it adds to kernels: `cost.operators.FrameworkConstants`
[switches]     keys of `[parallel]` that it can have other than their default, and how one tells it: `switches`
[dispatchers]  ways in which it sends tokens, beside the plain one, and how one tells it
[[release]]    what single releases change: `releases.ReleaseChange`
[[environment]], [[not_modelled]], [[user_buffers]]    what advice for a launch needs: `planners.megatron`
"""

import tomllib
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from lagom_overlap.errors import UnknownNameError
from lagom_overlap.toml_tables import from_table

_Tables = dict[str, Any]  # any TOML value


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkFile:
    """The tables of a framework, those of the one that it extends merged in; whoever needs one decodes it."""

    rules: _Tables
    constants: _Tables
    title: str | None = None
    switches: dict[str, str] = field(default_factory=dict)
    dispatchers: dict[str, str] = field(default_factory=dict)
    release: list[_Tables] = field(default_factory=list)
    environment: list[_Tables] = field(default_factory=list)
    not_modelled: list[_Tables] = field(default_factory=list)
    user_buffers: list[_Tables] = field(default_factory=list)


def _folder() -> Traversable:
    return resources.files("lagom_overlap.frameworks")


@cache
def framework_names() -> tuple[str, ...]:
    """The names that `framework_file` knows, sorted."""
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name[-5:] == ".toml")
    )


@cache
def framework_file(name: str) -> FrameworkFile:
    """The file of the framework of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    return from_table(_merged(name), FrameworkFile, f"frameworks/{name}.toml")


def _merged(name: str) -> _Tables:
    if name not in framework_names():
        raise UnknownNameError.among("framework", name, list(framework_names()))
    own = tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8"))
    extended = own.pop("extends", None)
    if extended is None:
        return own
    base = _merged(extended)
    base.pop("title", None)
    return over(base, own)


def over(base: _Tables, own: _Tables) -> _Tables:
    """The tables of `base` with what `own` says in their place, table in table."""
    found = deepcopy(base)
    for key, value in own.items():
        is_inner = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = over(found[key], value) if is_inner else value
    return found
