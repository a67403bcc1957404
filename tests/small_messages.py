"""Jobs whose messages are small: what is done with calls of 1 MiB and slices of 512 KiB is done with a 64th of each.

Ranks of tests share two cores, where most of what a large message costs is copying it through the loopback device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lagom_overlap.collective import size_class
from lagom_overlap.engines import gloo_space
from lagom_overlap.online.routes import gloo

SCALE = 64
LEAST_BYTES = size_class.LEAST_BYTES // SCALE
SLICE_BYTES = gloo_space.MIN_SLICE_BYTES // SCALE


def make_small(least_bytes: int = LEAST_BYTES, slice_bytes: int = SLICE_BYTES) -> None:
    """For this process: calls of so many bytes and more can be set, in slices of so many; and `num_used` counts."""
    size_class.LEAST_BYTES = least_bytes  # type: ignore[misc]
    gloo_space.MIN_SLICE_BYTES = slice_bytes  # type: ignore[misc]
    gloo._run = partial(count_used, gloo._run)  # type: ignore[assignment]


_num_used = 0


def count_used(run: Callable[..., Any] = lambda: None, *args: Any, **how: Any) -> Any:
    """Runs a call under a setting, and counts it."""
    global _num_used  # noqa: PLW0603 - one for the process
    _num_used += 1
    return run(*args, **how)


def num_used() -> int:
    """Calls of this process in which a setting was in force: bits that agree prove nothing where there were none."""
    return _num_used
