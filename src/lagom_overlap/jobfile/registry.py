"""Names become planners and backends."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from lagom_overlap.backends.base import Backend, BackendRequest
from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Planner
from lagom_overlap.registry import BACKENDS, PLANNERS, checked_options, entry_point_names, load


def backend_factory(name: str) -> Callable[[BackendRequest], Backend]:
    """What opens the backend of that name.

    Raises:
        UnknownNameError: if there is none.
        MissingDependencyError: if it needs a package that is not installed.
    """
    return load(BACKENDS, "backend", name)


def planner_names() -> list[str]:
    """The planners that are registered, sorted."""
    return entry_point_names(PLANNERS)


def check_planner_name(name: str) -> None:
    """Refuses a planner that does not exist, before anything is started.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    load(PLANNERS, "planner", name)


def make_planner(
    name: str, options: Mapping[str, object], *, on_progress: Callable[[Any], None] | None = None
) -> Planner:
    """The planner of that name; it reports progress if it can.

    Raises:
        UnknownNameError: if there is none.
        MissingDependencyError: if it needs a package that is not installed.
        JobError: if it has no such option, or the option's value is of another type or not allowed.
    """
    factory = load(PLANNERS, "planner", name)
    given = dict(checked_options(factory, name, options, what="planner", table="plan"))
    if on_progress is not None and "on_progress" in inspect.signature(factory).parameters:
        given["on_progress"] = on_progress
    try:
        return cast("Planner", factory(**given))
    except ValueError as error:
        raise JobError(f"plan.options of planner {name!r}: {error}") from None
