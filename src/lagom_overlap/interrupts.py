"""Ctrl-C, SIGTERM and SIGHUP end a run: what was found is kept, a second one kills.

Terminals, Slurm and Kubernetes send them; SIGHUP says that the terminal was closed, or its connection broke. A verb
runs within `as_interrupts`: each signal raises KeyboardInterrupt there, once. Launchers pass a signal on to
processes that the terminal has told already, so what follows within `GRACE_S` is the same wish; anything later ends the
process at once, as if nobody had caught the signal. A signal that was ignored when we started stays ignored.
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
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class _Wish:
    """The first signal of this run, if any, and when it came; `is_command` while a command of ours runs."""

    signum: int | None = None
    at_s: float = 0.0
    is_command: bool = False


_WISH: Final = _Wish()


def received() -> bool:
    """Whether the run was told to end."""
    return _WISH.signum is not None


def exit_code() -> int:
    """What a shell says of a program that the signal ended: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
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
    """Lets the first signal pass until the block is done, so that what belongs together is written together."""
    if not _WISH.is_command:  # what a caller of the library was told before is his
        _WISH.signum = None
    with _caught(_ours(), lambda signum, _: _is_first(signum, clock)):
        yield


@contextlib.contextmanager
def noted(note: Callable[[], object]) -> Iterator[None]:
    """Within, the first signal calls `note` in place of interrupting; the next one does as outside."""
    before: dict[int, _Handler] = {}

    def take(signum: int, _: FrameType | None) -> None:
        if _WISH.is_command:
            _is_first(signum, monotonic)
        note()
        for each, handler in before.items():
            signal.signal(each, handler)

    with _caught(_ours(), take) as found:
        before |= found
        yield


def _ours() -> tuple[signal.Signals, ...]:
    """SIGTERM and SIGHUP are held back only where they would interrupt: elsewhere they are not ours to catch."""
    return tuple(each for each in SIGNALS if callable(signal.getsignal(each)))


def _is_first(signum: int, clock: Callable[[], float]) -> bool:
    """Whether nobody has asked before; who asks again, and not by the same breath, is obeyed on the spot."""
    if _WISH.signum is None:
        _WISH.signum, _WISH.at_s = signum, clock()
        return True
    if clock() - _WISH.at_s >= GRACE_S:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    return False


@contextlib.contextmanager
def _caught(signals: tuple[signal.Signals, ...], handler: _Handler) -> Iterator[dict[int, _Handler]]:
    """Yields the handlers before; does nothing outside of the main thread, where Python catches no signals."""
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
