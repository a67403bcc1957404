"""What a tuner's name says of it, before there is one; `guard.make_tuner` makes it."""

import inspect
from collections.abc import Callable
from typing import Any, Final

from lagom_overlap.errors import JobError
from lagom_overlap.registry import TUNERS, entry_point_names, load

OURS: Final = "ours"
"""The search that everybody gets who names none: `tune`, online, `compare`, `both_sides`, traces and warm starts."""
IN_A_RUNNING_JOB: Final = {OURS: "descent"}
"""There a search begins at the job's own settings, and each measurement costs steps of training."""
DEFAULT_MEASUREMENTS: Final = 40
"""Of a search whose job and tuner say nothing."""


def tuner_factory(name: str, *, online: bool = False) -> Callable[..., Any]:
    """What makes the tuner of that name, in a running job where `online`.

    Raises:
        UnknownNameError: if there is none.
    """
    return load(TUNERS, "tuner", IN_A_RUNNING_JOB.get(name, name) if online else name)


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


def search_measurements(given: int | None, name: str) -> int:
    """The most measurements of a search: what a job gives, else the tuner's own budget, else 40.

    Raises:
        UnknownNameError: if there is no tuner of that name.
    """
    return int(getattr(tuner_factory(name), "own_measurements", DEFAULT_MEASUREMENTS)) if given is None else given


def takes_warm_start(name: str, *, online: bool = False) -> bool:
    """Whether a tuner can begin with what other runs say.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return "warm" in inspect.signature(tuner_factory(name, online=online)).parameters


def check_takes_warm_start(*names: str) -> None:
    """Refuses a warm start where none of the tuners can begin with what other runs say.

    Raises:
        UnknownNameError: if there is none of that name.
        JobError: if none takes a warm start.
    """
    if not any(map(takes_warm_start, names)):
        allowed = ", ".join(name for name in entry_point_names(TUNERS) if takes_warm_start(name))
        whose = f"tuner {names[0]!r} takes no" if len(names) == 1 else f"none of {', '.join(names)} takes a"
        raise JobError(f"{whose} warm start; allowed with: {allowed}")
