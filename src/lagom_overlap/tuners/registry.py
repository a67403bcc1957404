"""Looks up tuners by name before one is made; `guard.make_tuner` makes it."""

import inspect
from collections.abc import Callable
from typing import Any, Final

from lagom_overlap.errors import JobError
from lagom_overlap.registry import TUNERS, entry_point_names, load

OURS: Final = "ours"
"""The default tuner of `tune`, online, `compare`, `both_sides`, traces and warm starts: `tuners/ours.py`."""
DEFAULT: Final = "default"
"""The tuner that only measures the untouched job; an arm of each verdict has its name."""
DEFAULT_MEASUREMENTS: Final = 40
"""The budget of a search if neither job nor tuner names one. Chosen, not measured."""


def tuner_factory(name: str) -> Callable[..., Any]:
    """The factory of the tuner of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    return load(TUNERS, "tuner", name)


def check_tuner_name(name: str) -> None:
    """Refuses a tuner that does not exist, before anything is started.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    tuner_factory(name)


def searches_launches(name: str) -> bool:
    """Whether a tuner searches the computation's side too.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return bool(getattr(tuner_factory(name), "searches_launches", False))


def search_measurements(budget: int | None, name: str) -> int:
    """The most measurements of a search: the job's `budget`, else the tuner's own, else `DEFAULT_MEASUREMENTS`.

    Raises:
        UnknownNameError: if there is no tuner of that name.
    """
    return int(getattr(tuner_factory(name), "own_measurements", DEFAULT_MEASUREMENTS)) if budget is None else budget


def takes_warm_start(name: str) -> bool:
    """Whether a tuner takes a warm start from other runs.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return "warm" in inspect.signature(tuner_factory(name)).parameters


def asks_job_length(name: str) -> bool:
    """Whether a tuner searches on in a long job: it takes `job_measurements`, the windows that are still to come.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return "job_measurements" in inspect.signature(tuner_factory(name)).parameters


def check_takes_warm_start(*names: str) -> None:
    """Refuses a warm start if none of the tuners takes one.

    Raises:
        UnknownNameError: if there is none of that name.
        JobError: if none takes a warm start.
    """
    if not any(map(takes_warm_start, names)):
        allowed = ", ".join(name for name in entry_point_names(TUNERS) if takes_warm_start(name))
        whose = f"tuner {names[0]!r} takes no" if len(names) == 1 else f"none of {', '.join(names)} takes a"
        raise JobError(f"{whose} warm start; allowed with: {allowed}")
