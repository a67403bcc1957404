"""What a verb prints: results to stdout, and nothing if nobody listens."""

import contextlib
import io
import json
import os
import sys
from typing import Final, TextIO

from rich.console import Console, RenderableType

from lagom_overlap.errors import OutputError

LEAST_WIDTH: Final = 24
"""Columns that no table does without; a narrower terminal breaks the lines itself."""
_MAX_DIGITS: Final = 6
EXIT_UNWRITTEN: Final = 2
"""The result was printed, and a file of it could not be written."""
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
    """Prints rich renderables, as wide as COLUMNS says, else as the terminal is, else 80 columns."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    page = _Page()
    console = Console(file=page, width=_width(), force_terminal=terminal, color_system="auto" if terminal else None)
    console.print(*renderables)
    text = page.getvalue().rstrip("\n")
    say(text if text.isascii() or _encoding().lower().startswith("utf") else text.translate(_WRITTEN_OUT))


def _width() -> int:
    """COLUMNS, as other tools have it, else the terminal's; a terminal that nobody has given a size says 0."""
    wished = os.environ.get("COLUMNS", "")
    if wished.isdecimal() and len(wished) < _MAX_DIGITS and int(wished) > 0:
        return max(LEAST_WIDTH, int(wished))
    if sys.stdout is None or not sys.stdout.isatty() or sys.stdout.fileno() != 1:
        return WIDTH
    return max(LEAST_WIDTH, os.get_terminal_size().columns or WIDTH)


def forget(stream: TextIO) -> None:
    """Points a stream that cannot be written at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
