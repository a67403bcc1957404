"""What a verb prints: results to stdout, and nothing if nobody listens."""

import contextlib
import io
import os
import sys
from typing import Final

from rich.console import Console, RenderableType

from lagom_overlap.errors import OutputError

EXIT_INTERRUPTED: Final = 130
"""What a shell says of a program that Ctrl-C ended."""
WIDTH = 80
"""Columns where stdout is no terminal."""


def say(text: str) -> None:
    """Writes text and a newline to stdout; a reader that has gone away, such as `head`, is no error.

    Raises:
        OutputError: if stdout cannot be written for another reason, such as a full disk.
    """
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    except OSError as error:
        _forget_stdout()
        raise OutputError(f"cannot write the result to stdout: {error.strerror}") from None


def show(*renderables: RenderableType) -> None:
    """Prints rich renderables, at the terminal's width or at 80 columns."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    buffer = io.StringIO()
    width = os.get_terminal_size().columns if terminal and sys.stdout.fileno() == 1 else WIDTH
    console = Console(file=buffer, width=width, force_terminal=terminal, color_system="auto" if terminal else None)
    console.print(*renderables)
    say(buffer.getvalue().rstrip("\n"))


def _forget_stdout() -> None:
    """Points stdout at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
