"""The time that a planner is given."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from time import monotonic

_interrupted = threading.Event()


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C ends every deadline, so that planners return the best they have; a second interrupts.

    Yields the event that says whether it came. Does nothing outside of the main thread.
    """
    _interrupted.clear()
    if threading.current_thread() is not threading.main_thread():
        yield _interrupted
        return

    def end(signum: int, frame: object) -> None:
        _interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield _interrupted
    finally:
        signal.signal(signal.SIGINT, before)
        _interrupted.clear()


def is_interrupted() -> bool:
    """The user has ended the search by Ctrl-C."""
    return _interrupted.is_set()


class Deadline:
    """A moment so many seconds from now; the only clock of planning."""

    def __init__(self, budget_s: float) -> None:
        self._start_s = monotonic()
        self._end_s = self._start_s + budget_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return monotonic() - self._start_s

    @property
    def left_s(self) -> float:
        """Seconds until the end; negative behind it, 0 once the user has ended the search."""
        return min(0.0, self._end_s - monotonic()) if _interrupted.is_set() else self._end_s - monotonic()

    def within(self, limit_s: float) -> "Deadline":
        """The nearer of this one and `limit_s` seconds from now."""
        return Deadline(min(limit_s, self.left_s))
