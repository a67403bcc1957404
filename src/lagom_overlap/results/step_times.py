"""steps.json: how long the latest steps of a run took that ran under one setting, on rank 0."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Final, Literal

import msgspec

from lagom_overlap.errors import BundleError, in_words
from lagom_overlap.record import read_regular, write_private

STEPS_NAME: Final = "steps.json"
FORMAT: Final = 1
"""Of the file; a file of another is refused."""
MOST_STEPS: Final = 10_000
"""The latest steps that are kept: bounds memory and the file."""
SETTLE: Final = 3
"""Steps left out at the beginning, which warm up connections, allocators and compilation. Chosen, not measured."""
_MAX_BYTES: Final = 1 << 24
"""Chosen: a million steps."""


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the begin of a step to the next one's, with `num_settings` set; `num_steps` are all of the run.

    Steps of a search, a verdict or a check are not among them. `clock`: on NCCL they are timed by events of the GPU, of
    which the host runs ahead; on gloo by the host.
    """

    format: int = FORMAT
    num_steps: int
    num_settings: int
    clock: Literal["host", "device"] = "host"
    steps_s: tuple[float, ...]

    @property
    def settled_s(self) -> tuple[float, ...]:
        """The steps behind the first, which settle; all, where there are no others."""
        return self.steps_s[SETTLE:] or self.steps_s

    @property
    def median_s(self) -> float | None:
        """The median of the settled steps; None without a step."""
        return median(self.settled_s) if self.steps_s else None


def write_step_times(folder: Path, times: RunSteps) -> None:
    """Writes the file.

    Raises:
        OutputError: if it cannot be written.
    """
    write_private(folder / STEPS_NAME, msgspec.json.encode(times) + b"\n")


def read_step_times(folder: Path) -> RunSteps | None:
    """The file's content; None where the run wrote none.

    Raises:
        BundleError: if it cannot be read or is damaged.
    """
    path = folder / STEPS_NAME
    if not path.is_file():
        return None
    try:
        times = msgspec.json.decode(read_regular(path, _MAX_BYTES), type=RunSteps)
    except OSError as error:
        raise BundleError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BundleError(f"{str(path)!r} is damaged: {in_words(str(error))}") from None
    if times.format != FORMAT or not _are_times(times.steps_s):
        raise BundleError(f"{str(path)!r} is damaged: format {times.format}, or a step that takes no time")
    return times


def _are_times(steps_s: Iterable[float]) -> bool:
    return all(0 < step_s < float("inf") for step_s in steps_s)
