"""Names become objects: entry points, each loaded when it is named, and the options that it takes."""

import inspect
from collections.abc import Callable, Mapping
from importlib import metadata
from types import NoneType
from typing import Any, Final, cast, get_args, get_type_hints

from lagom_overlap.errors import JobError, MissingDependencyError, UnknownNameError

TUNERS: Final = "lagom_overlap.tuners"
BACKENDS: Final = "lagom_overlap.backends"
PLANNERS: Final = "lagom_overlap.planners"

_EXTRA_OF: Final = {"torch": "torch", "ortools": "plan", "transformers": "models"}
"""Package -> our extra that brings it."""
_NO_OPTIONS: Final = ("seed", "on_progress", "warm")
"""Keyword arguments of tuners and planners that a job file does not set."""


def entry_point_names(group: str) -> list[str]:
    """The names registered under an entry-point group, sorted."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def load(group: str, what: str, name: str) -> Callable[..., Any]:
    """What is registered under that name; `what` calls it in an error.

    Raises:
        UnknownNameError: if nothing is.
        MissingDependencyError: if it needs a package that is not installed.
    """
    found = [entry for entry in metadata.entry_points(group=group) if entry.name == name]
    if not found:
        raise UnknownNameError.among(what, name, entry_point_names(group))
    try:
        return cast("Callable[..., Any]", found[0].load())
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get(error.name or "")
        if extra is None:
            raise
        raise MissingDependencyError(
            f"{what} {name!r} needs the package {error.name!r}: pip install 'lagom-overlap[{extra}]'"
        ) from None


def checked_options(
    factory: Callable[..., Any], name: str, options: Mapping[str, object], *, what: str = "tuner", table: str = "tune"
) -> Mapping[str, object]:
    """The options of a tuner or planner, each known to it and of its type.

    Raises:
        JobError: if one is not.
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
        # A default of None (`int | None`) says nothing of the type, and a job file has no None: the hint tells.
        kinds = set(get_args(hints[key]) or (hints[key],)) - {NoneType}
        if float in kinds:
            kinds.add(int)
        if type(value) not in kinds:
            wanted = " or ".join(sorted(kind.__name__ for kind in kinds))
            example = "" if allowed[key] is None else f", such as {allowed[key]!r}"
            raise JobError(f"{table}.options.{key} is {value!r}: {what} {name!r} expects {wanted}{example}")
    return options
