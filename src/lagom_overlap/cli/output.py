"""What a verb prints: results to stdout, and nothing if nobody listens."""

import contextlib
import io
import json
import os
import sys
from typing import Final, TextIO

from rich.console import Console, RenderableType

from lagom_overlap.errors import OutputError

EXIT_INTERRUPTED: Final = 130
"""What a shell says of a program that Ctrl-C ended."""
WIDTH: Final = 80
"""Columns where stdout is no terminal, or one that does not say how wide it is."""
_WRITTEN_OUT: Final = str.maketrans(
    {"×": "x", "−": "-", "–": "-", "→": ">", "←": "<", "…": "~", "Δ": "d", "≥": ">=", "≤": "<=", "“": '"', "”": '"'}
)
"""What stands for our own characters where the terminal's encoding has none of them; in tables, of the same width."""


class _Page(io.StringIO):
    """Text for stdout; rich draws its boxes as this encoding allows."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a StringIO has none
        return _encoding()


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _encodable(text: str) -> str:
    """The text with whatever stdout's encoding lacks escaped as in JSON."""
    try:
        text.encode(_encoding())
    except UnicodeEncodeError:
        return "".join(map(_escaped, text))
    return text


def _escaped(char: str) -> str:
    try:
        char.encode(_encoding())
    except UnicodeEncodeError:
        return json.dumps(char)[1:-1]
    return char


def say(text: str) -> None:
    """Writes text and a newline to stdout; a reader that has gone away, such as `head`, is no error.

    Raises:
        OutputError: if stdout cannot be written for another reason, such as a full disk.
    """
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.write(_encodable(text) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        forget(sys.stdout)
    except OSError as error:
        forget(sys.stdout)
        raise OutputError(f"cannot write the result to stdout: {error.strerror}") from None


def show(*renderables: RenderableType) -> None:
    """Prints rich renderables, at the terminal's width or at 80 columns."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    page = _Page()
    console = Console(file=page, width=_width(), force_terminal=terminal, color_system="auto" if terminal else None)
    console.print(*renderables)
    text = page.getvalue().rstrip("\n")
    say(text if text.isascii() or _encoding().lower().startswith("utf") else text.translate(_WRITTEN_OUT))


def _width() -> int:
    """The terminal's columns; a terminal that nobody has given a size says 0."""
    if sys.stdout is None or not sys.stdout.isatty() or sys.stdout.fileno() != 1:
        return WIDTH
    return os.get_terminal_size().columns or WIDTH


def forget(stream: TextIO) -> None:
    """Points a stream that cannot be written at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
