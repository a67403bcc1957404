"""Ranks that somebody else started: torchrun, or anything that sets the same four variables.

Rank 0's process stays the controller and starts a child that is rank 0 of the collectives, so that reading a job file
or drawing a progress bar never shares a process with what is measured. Every other process is a rank itself.
"""

import os
from typing import Final

from lagom_overlap.backends.gloo.torch_extra import require_torch
from lagom_overlap.errors import BackendError

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_num_ranks() -> int | None:
    """How many ranks a launcher started; None if none did.

    Raises:
        BackendError: if the launcher's variables are not whole numbers.
    """
    if any(variable not in os.environ for variable in _VARIABLES):
        return None
    return _whole_number("WORLD_SIZE")


def launched_local_num_ranks() -> int | None:
    """How many of them are on this machine; None if no launcher started any."""
    if launched_num_ranks() is None:
        return None
    return _whole_number("LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE")


def join_if_launched_by_torchrun() -> int | None:
    """The exit code of this process if it is a launched rank other than 0, which it lives through here; else None.

    To be called first thing by a command that is about to open the gloo backend, before it writes or prints anything:
    a process that gets a number must exit with it and do nothing else. Rank 0 gets None and goes on as if alone; its
    `open_backend` meets the others here, and its `close` ends them.

    Raises:
        BackendError: if the launcher's variables are not whole numbers.
        MissingDependencyError: if torch is not installed.
    """
    if launched_num_ranks() is None or _whole_number("RANK") == 0:
        return None
    require_torch()
    # Not at the top: torch is only needed where the process becomes a rank.
    from lagom_overlap.engines.gloo_worker import run_joined  # noqa: PLC0415

    return run_joined()


def _whole_number(variable: str) -> int:
    text = os.environ[variable]
    if not text.isascii() or not text.isdigit():
        raise BackendError(f"environment variable {variable} is {text!r}, must be a whole number; unset it to run here")
    return int(text)
