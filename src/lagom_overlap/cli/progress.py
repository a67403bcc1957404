"""How far a long verb is: a bar on a terminal is the verb's own; elsewhere a plain line on stderr now and then."""

import sys
from collections.abc import Callable
from threading import Event, Thread
from typing import Final, Self

from lagom_overlap.stderr import write_lines

EVERY_S: Final = 10.0
"""Seconds between lines where there is no terminal: a log stays short, and nobody takes the silence for a hang."""


def is_terminal() -> bool:
    """Whether stderr is one, on which a bar or a status line can be drawn."""
    return sys.stderr is not None and sys.stderr.isatty()


class PlainLines:
    """A line every `EVERY_S` seconds with what `update` was told last; silent on a terminal.

    `wait(seconds)` returns whether the verb has ended meanwhile: it is the clock. One thread that wakes up so rarely
    takes nothing from what is measured.
    """

    def __init__(self, verb: str, doing: str, *, wait: Callable[[float], bool] | None = None) -> None:
        self._verb = verb
        self._doing = doing
        self._ended = Event()
        self._wait = wait or self._ended.wait
        self._thread = None if is_terminal() else Thread(target=self.write, name="lagom-progress", daemon=True)

    def update(self, doing: str) -> None:
        """What the verb is at from now on."""
        self._doing = doing

    def write(self) -> None:
        """Writes lines until the verb has ended."""
        num = 0
        while not self._wait(EVERY_S):
            num += 1
            write_lines(f"lagom {self._verb}: {self._doing} ({num * EVERY_S:.0f} s)")

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
