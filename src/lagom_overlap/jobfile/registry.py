"""Names become tuners, planners and backends: entry points, each loaded when it is named, and the options it takes."""

import inspect
from collections.abc import Callable, Mapping
from importlib import metadata
from types import NoneType
from typing import Any, Final, cast, get_args, get_type_hints

from lagom_overlap.backends.base import Backend, BackendRequest
from lagom_overlap.errors import JobError, MissingDependencyError, UnknownNameError
from lagom_overlap.planners.base import Planner
from lagom_overlap.tuners.base import Problems, Tuner
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.warm_start import WarmStart

TUNERS: Final = "lagom_overlap.tuners"
BACKENDS: Final = "lagom_overlap.backends"
PLANNERS: Final = "lagom_overlap.planners"

DEFAULT_MEASUREMENTS: Final = 40
"""Of a search whose job and tuner say nothing."""
_EXTRA_OF: Final = {"torch": "torch", "ortools": "plan", "transformers": "models"}
"""Package -> our extra that brings it."""
_NO_OPTIONS: Final = ("seed", "on_progress", "warm")
"""Keyword arguments of tuners and planners that a job file does not set."""


def entry_point_names(group: str) -> list[str]:
    """The names registered under an entry-point group, sorted."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def _load(group: str, what: str, name: str) -> Callable[..., Any]:
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


def backend_factory(name: str) -> Callable[[BackendRequest], Backend]:
    """What opens the backend of that name.

    Raises:
        UnknownNameError: if there is none.
        MissingDependencyError: if it needs a package that is not installed.
    """
    return _load(BACKENDS, "backend", name)


def check_tuner_name(name: str) -> None:
    """Refuses a tuner that does not exist, before anything is started.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    _load(TUNERS, "tuner", name)


def searches_launches(name: str) -> bool:
    """Whether a tuner searches the computation's side too.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return bool(getattr(_load(TUNERS, "tuner", name), "searches_launches", False))


def _checked_options(
    factory: Callable[..., Any], name: str, options: Mapping[str, object], *, what: str = "tuner", table: str = "tune"
) -> Mapping[str, object]:
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


def planner_names() -> list[str]:
    """The planners that are registered, sorted."""
    return entry_point_names(PLANNERS)


def check_planner_name(name: str) -> None:
    """Refuses a planner that does not exist, before anything is started.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    _load(PLANNERS, "planner", name)


def make_planner(
    name: str, options: Mapping[str, object], *, on_progress: Callable[[Any], None] | None = None
) -> Planner:
    """The planner of that name; it reports progress if it can.

    Raises:
        UnknownNameError: if there is none.
        MissingDependencyError: if it needs a package that is not installed.
        JobError: if it has no such option, or the option's value is of another type or not allowed.
    """
    factory = _load(PLANNERS, "planner", name)
    given = dict(_checked_options(factory, name, options, what="planner", table="plan"))
    if on_progress is not None and "on_progress" in inspect.signature(factory).parameters:
        given["on_progress"] = on_progress
    try:
        return cast("Planner", factory(**given))
    except ValueError as error:
        raise JobError(f"plan.options of planner {name!r}: {error}") from None


def search_measurements(given: int | None, name: str) -> int:
    """The most measurements of a search: what a job gives, else the tuner's own budget, else 40.

    Raises:
        UnknownNameError: if there is no tuner of that name.
    """
    return (
        int(getattr(_load(TUNERS, "tuner", name), "own_measurements", DEFAULT_MEASUREMENTS)) if given is None else given
    )


def takes_warm_start(name: str) -> bool:
    """Whether a tuner can begin with what other runs say.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return "warm" in inspect.signature(_load(TUNERS, "tuner", name)).parameters


def check_takes_warm_start(name: str) -> None:
    """Refuses a tuner that cannot begin with what other runs say.

    Raises:
        UnknownNameError: if there is none of that name.
        JobError: if it takes no warm start.
    """
    if not takes_warm_start(name):
        raise JobError(f"tuner {name!r} takes no warm start; allowed with: model_based")


def make_tuner(
    name: str,
    problems: Problems,
    *,
    seed: int,
    options: Mapping[str, object],
    guarded: bool,
    warm: WarmStart | None = None,
) -> Tuner:
    """The tuner of that name over these problems, under the guard if asked; `warm` if it takes one.

    Raises:
        UnknownNameError: if there is none.
        JobError: if it has no such option, or the option's value is of another type or not allowed.
    """
    factory = _load(TUNERS, "tuner", name)
    checked = _checked_options(factory, name, options)
    try:
        begin = {} if warm is None else {"warm": warm}
        tuner = cast("Tuner", factory(problems, seed=seed, **checked, **begin))
    except ValueError as error:
        raise JobError(f"tune.options of tuner {name!r}: {error}") from None
    guards_itself = getattr(factory, "guards_itself", False)  # the default was raced already: not a second time
    return Guarded(tuner, problems) if guarded and not guards_itself else tuner
