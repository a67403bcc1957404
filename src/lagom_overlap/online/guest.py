"""Runs our code inside the job: a failure of ours is reported in one line and never becomes the job's failure.

Nor is an error of the job's taken for ours. A job that is about to be preempted may learn of it by its handler of
SIGTERM or SIGUSR1, which raises in whatever code the main thread runs: that may be ours, waiting for another rank,
where any `Exception` counts as a failure of ours. So where we wait, what a handler raises is carried in one that is
none (`carrying`), which all of our code treats as it does Ctrl-C, and the outermost call of ours hands it to the job as
it was (`handing_over`).
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from lagom_overlap.errors import LagomError
from lagom_overlap.stderr import write_lines

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def safely(work: Callable[[], None], *, ends_the_job: type[LagomError] | None = None) -> None:
    """Runs `work`; a failure is reported in one line and swallowed, except for errors that must end the job.

    What a signal's handler of the job's raises meanwhile is the job's.
    """
    handing_over(lambda: _safely(work, ends_the_job))


def _safely(work: Callable[[], None], ends_the_job: type[LagomError] | None) -> None:
    try:
        work()
    except LagomError as error:
        if ends_the_job is not None and isinstance(error, ends_the_job):
            raise
        _complain(str(error))
    except Exception as error:
        _log.debug("lagom failed in the job", exc_info=True)
        _complain(f"{type(error).__name__}: {error}")


def _complain(text: str) -> None:
    from lagom_overlap.online.events import rank_of  # noqa: PLC0415 - a process without a word of ours needs none of it

    write_lines(f"lagom: the job runs without us (rank {rank_of()}): {' '.join(text.split())}")


def say(lines: list[str]) -> None:
    """Lines for people, on stderr: stdout is the job's."""
    write_lines(*(f"lagom: {line}" for line in lines))


class HandlerRaised(BaseException):
    """What a handler raised, on its way through our code."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Depth(threading.local):
    """Calls of ours that this thread is within."""

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


@contextmanager
def carrying() -> Iterator[None]:
    """Within `handing_over`: has what the handlers raise pass through code of ours that takes exceptions for its own.

    Python runs handlers in the main thread alone. Looks at all signals, which takes some 10 us: for waits.
    """
    if not _depth.calls or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
    ours = {number: partial(_call, handler) for number, handler in handlers.items()}
    try:
        for number, handler in ours.items():
            signal.signal(number, handler)
        yield
    finally:
        for number, handler in ours.items():
            if signal.getsignal(number) is handler:  # else a handler has put another one in its place
                signal.signal(number, handlers[number])


def _call(handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
    try:
        handler(number, frame)
    except Exception as error:
        carried = HandlerRaised(error)
    else:
        return
    raise carried
