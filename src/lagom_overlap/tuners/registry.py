"""What a tuner's name says of it, before there is one; `guard.make_tuner` makes it."""

import inspect
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.registry import TUNERS, load

DEFAULT_MEASUREMENTS: Final = 40
"""Of a search whose job and tuner say nothing."""


def check_tuner_name(name: str) -> None:
    """Refuses a tuner that does not exist, before anything is started.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    load(TUNERS, "tuner", name)


def searches_launches(name: str) -> bool:
    """Whether a tuner searches the computation's side too.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return bool(getattr(load(TUNERS, "tuner", name), "searches_launches", False))


def search_measurements(given: int | None, name: str) -> int:
    """The most measurements of a search: what a job gives, else the tuner's own budget, else 40.

    Raises:
        UnknownNameError: if there is no tuner of that name.
    """
    return (
        int(getattr(load(TUNERS, "tuner", name), "own_measurements", DEFAULT_MEASUREMENTS)) if given is None else given
    )


def takes_warm_start(name: str) -> bool:
    """Whether a tuner can begin with what other runs say.

    Raises:
        UnknownNameError: if there is none of that name.
    """
    return "warm" in inspect.signature(load(TUNERS, "tuner", name)).parameters


def check_takes_warm_start(name: str) -> None:
    """Refuses a tuner that cannot begin with what other runs say.

    Raises:
        UnknownNameError: if there is none of that name.
        JobError: if it takes no warm start.
    """
    if not takes_warm_start(name):
        raise JobError(f"tuner {name!r} takes no warm start; allowed with: model_based")
