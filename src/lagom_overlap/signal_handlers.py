"""What a program's own signal handlers raise while code of ours waits in it: the program's, no failure of ours.

A job that is about to be preempted may learn of it so: its handler of SIGTERM or SIGUSR1 raises, in whatever the main
thread does, and that may be a wait of ours for another rank, around which any `Exception` counts as a failure of ours.
There it is carried in one that is none (`waiting`), which all of our code treats as it does Ctrl-C, and the outermost
call of ours hands it to the job as it was (`handing_over`).
"""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class HandlerRaised(BaseException):
    """What a handler raised, on its way through our code."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Depth(threading.local):
    """Calls of `handing_over` that this thread is within."""

    calls = 0


_depth = _Depth()


def handing_over(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises; what a handler raised meanwhile, as it was, once nothing of ours is around it."""
    _depth.calls += 1
    try:
        return work()
    except HandlerRaised as carried:
        if _depth.calls > 1:
            raise
        error = carried.error
    finally:
        _depth.calls -= 1
    raise error  # out here, or it would be shown as one that followed from ours


def waiting(wait: Callable[[], Result]) -> Result:
    """What a wait returns that raises nothing by itself: what it raises, a handler did."""
    try:
        return wait()
    except Exception as error:
        if not _depth.calls:
            raise
        carried = HandlerRaised(error)
    raise carried
