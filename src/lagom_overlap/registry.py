"""Entry points: names become objects, loaded when first used, and the options that they take are checked."""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from types import NoneType
from typing import Any, Final, cast, get_args, get_type_hints

from lagom_overlap.errors import JobError, MissingDependencyError, UnknownNameError

TUNERS: Final = "lagom_overlap.tuners"
BACKENDS: Final = "lagom_overlap.backends"
PLANNERS: Final = "lagom_overlap.planners"
RESULTS: Final = "lagom_overlap.results"
"""What runs of other distributions' verbs are loaded as, by the kind in their run.json."""

_OPTIONAL: Final = frozenset({"torch", "ortools", "transformers"})
"""Packages that parts of ours need and a base install lacks; pip knows them by the names that Python imports."""
_NO_OPTIONS: Final = ("seed", "on_progress", "warm")
"""Keyword arguments of tuners and planners that a job file does not set."""


def entry_point_names(group: str) -> list[str]:
    """The names registered under an entry-point group, sorted."""
    return sorted({entry.name for entry in registered(group)})


def registered(group: str) -> tuple[metadata.EntryPoint, ...]:
    """What is registered under a group; looked up once, since Python opens a file of every installed distribution."""
    return _registered(group, tuple(sys.path))


@cache
def _registered(group: str, _path: tuple[str, ...]) -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=group))


def load(group: str, what: str, name: str) -> Callable[..., Any]:
    """The object registered under that name; `what` is the noun for error messages.

    Raises:
        UnknownNameError: if there is none.
        MissingDependencyError: if it needs a package that is not installed.
    """
    entries = [entry for entry in registered(group) if entry.name == name]
    if not entries:
        raise UnknownNameError.among(what, name, entry_point_names(group))
    try:
        return cast("Callable[..., Any]", entries[0].load())
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL:
            raise
        raise MissingDependencyError(
            f"{what} {name!r} needs the package {error.name!r}: pip install {error.name}"
        ) from None


def checked_options(
    factory: Callable[..., Any], name: str, options: Mapping[str, object], *, what: str = "tuner", table: str = "tune"
) -> Mapping[str, object]:
    """The options of a tuner or planner, checked against its keyword arguments.

    Raises:
        JobError: if it has no such option, or the value has the wrong type.
    """
    allowed = {
        parameter.name: parameter.default
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in _NO_OPTIONS
    }
    hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    for key, value in options.items():
        if key not in allowed:
            offered = f"allowed: {', '.join(sorted(allowed))}" if allowed else "it has none"
            raise JobError(f"{table}.options: {what} {name!r} has no option {key!r}; {offered}")
        # The type hint decides: a default of None (`int | None`) does not show the type, and a job file has no None.
        kinds = set(get_args(hints[key]) or (hints[key],)) - {NoneType}
        if float in kinds:
            kinds.add(int)
        if type(value) not in kinds:
            expected = " or ".join(sorted(kind.__name__ for kind in kinds))
            example = "" if allowed[key] is None else f", such as {allowed[key]!r}"
            raise JobError(f"{table}.options.{key} is {value!r}: {what} {name!r} expects {expected}{example}")
    return options
