"""Ctrl-C, SIGTERM and SIGHUP end a run and keep its results so far; a second signal kills the process.

Terminals, Slurm and Kubernetes send them; SIGHUP means that the terminal was closed or its connection broke. A verb
runs within `as_interrupts`, where the first signal raises KeyboardInterrupt. Launchers forward signals to processes
that the terminal has already signalled, so signals within `GRACE_S` count as one; a later one ends the process at once,
as if nobody had caught it. A signal that was ignored when we started stays ignored.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from types import FrameType
from typing import Final, TypeAlias

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S: Final = 1.0
"""Signals this soon after the first one are forwarded copies of it. Chosen, not measured: longer than a launcher takes
to forward a signal, shorter than a user takes to press Ctrl-C again on purpose."""
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class _Wish:
    """The first signal of this run, if any, and when it came; `is_command` while a command of ours runs."""

    signum: int | None = None
    at_s: float = 0.0
    is_command: bool = False


_WISH: Final = _Wish()


def received() -> bool:
    """Whether a signal has asked the run to end."""
    return _WISH.signum is not None


def exit_code() -> int:
    """The shell's exit code for a program ended by the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + (_WISH.signum or signal.SIGINT)


@contextlib.contextmanager
def as_interrupts(clock: Callable[[], float] = monotonic) -> Iterator[None]:
    """Within, the first signal raises KeyboardInterrupt; for the main thread of a command."""
    _WISH.signum = None

    def interrupt(signum: int, _: FrameType | None) -> None:
        if _is_first(signum, clock):
            raise KeyboardInterrupt

    _WISH.is_command = True
    try:
        with _caught(SIGNALS, interrupt):
            yield
    finally:
        _WISH.is_command = False


@contextlib.contextmanager
def held_back(clock: Callable[[], float] = monotonic) -> Iterator[None]:
    """Ignores the first signal until the block has ended, so that files that belong together are written together."""
    if not _WISH.is_command:  # a signal before this call was for the caller of the library, not for us
        _WISH.signum = None
    with _caught(_ours(), lambda signum, _: _is_first(signum, clock)):
        yield


@contextlib.contextmanager
def noted(note: Callable[[], object]) -> Iterator[None]:
    """Inside the block the first signal calls `note` instead of interrupting; the next one acts as it does outside."""
    before: dict[int, _Handler] = {}

    def take(signum: int, _: FrameType | None) -> None:
        if _WISH.is_command:
            _is_first(signum, monotonic)
        note()
        for each, handler in before.items():
            signal.signal(each, handler)

    with _caught(_ours(), take) as handlers:
        before |= handlers
        yield


def _ours() -> tuple[signal.Signals, ...]:
    """The signals that somebody handles in Python; SIGTERM and SIGHUP with the default action are not ours to catch."""
    return tuple(each for each in SIGNALS if callable(signal.getsignal(each)))


def _is_first(signum: int, clock: Callable[[], float]) -> bool:
    """Whether this is the run's first signal; one that comes `GRACE_S` or more after it ends the process here."""
    if _WISH.signum is None:
        _WISH.signum, _WISH.at_s = signum, clock()
        return True
    if clock() - _WISH.at_s >= GRACE_S:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    return False


@contextlib.contextmanager
def _caught(signals: tuple[signal.Signals, ...], handler: _Handler) -> Iterator[dict[int, _Handler]]:
    """Yields the previous handlers; does nothing outside the main thread, where Python handles no signals."""
    before: dict[int, _Handler] = {}
    if threading.current_thread() is not threading.main_thread():
        yield before
        return
    for each in signals:
        if signal.getsignal(each) is not signal.SIG_IGN:
            before[each] = signal.signal(each, handler)
    try:
        yield before
    finally:
        for number, own in before.items():
            signal.signal(number, own)
