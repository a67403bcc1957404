"""Loops whose end rests on a truth value that nobody computed: they may never end, and are named.

The host reads such a value as no (`values.py`). "Until all are done" then never comes. A job that makes steps goes on
whatever it reads; one line that reads again and again without a step is taken for such a loop.
"""

import os
import sys
from collections.abc import Callable
from typing import Final

from lagom_overlap.errors import LagomError

MAX_READS: Final = 10_000
"""By one line of the job without a step: sampling by rejection ends after a few, a check of each tensor of a model
after some thousand. Of a loop of five operators it is some ten seconds."""


class UncomputedValueError(LagomError, RuntimeError):
    """Raised in the job where it asks for sizes or whole numbers that no kernel computed, or waits for them forever."""


class UncomputedReads:
    """Counts them by line since the last step; `refuse` ends the job."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        self._counts: dict[str, int] = {}

    def forget(self) -> None:
        """A step has ended."""
        self._counts.clear()

    def note(self) -> None:
        """The host reads a truth value that nobody computed.

        Raises:
            UncomputedValueError: if one line has done so very often.
        """
        line = _line_of_job()
        self._counts[line] = number = self._counts.get(line, 0) + 1
        if number < MAX_READS:
            return
        text = (
            f"{line} has read {number} truth values that nobody computed without a training step: a loop that may "
            "never end; large kernels compute nothing here, so let it not depend on them"
        )
        self._refuse(text)
        raise UncomputedValueError(f"lagom emulate: {text}")


def _line_of_job() -> str:
    """Where the job is: the innermost line that is neither PyTorch's nor ours, else the innermost of PyTorch's."""
    frame = sys._getframe(1)
    innermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(f"{os.sep}{ours}{os.sep}" in name for ours in ("lagom_overlap", "lagom_emulate")):
            place = f"{name}:{frame.f_lineno}"
            if f"{os.sep}torch{os.sep}" not in name:
                return place
            innermost = innermost or place
        frame = frame.f_back  # type: ignore[assignment]  # None behind the outermost
    return innermost
