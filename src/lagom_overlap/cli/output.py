"""What a verb shows: rich's tables and words, as text on stdout."""

import io
import os
import re
import sys
from collections.abc import Iterable
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from lagom_overlap.cli.stdout import encoding, say

LEAST_WIDTH: Final = 24
"""Columns that no table does without; a narrower terminal breaks the lines itself."""
_MAX_DIGITS: Final = 6
"""A COLUMNS of more digits is no width."""
EXIT_UNWRITTEN: Final = 2
"""The result was printed, and a file of it could not be written."""
WIDTH: Final = 80
"""Columns where stdout is no terminal, or one that does not say how wide it is."""
_WRITTEN_OUT: Final = str.maketrans(
    {"×": "x", "−": "-", "–": "-", "→": ">", "←": "<", "…": "~", "Δ": "d", "≥": ">=", "≤": "<=", "“": '"', "”": '"'}
)
"""What stands for our own characters where the terminal's encoding has none of them; in tables, of the same width."""


_BOUND: Final = "\ue000"
"""Stands for a blank at which no line is broken, before a unit or a verb of ours: rich breaks at any of Unicode's."""
_UNIT: Final = re.compile(
    r"(?<=\d) (?=(?:%|[num]?s|[KMGT]i?B|B|[KMGT]?B/s|tokens/s|TFLOP/s|GPUs?|ranks?|steps?|channels?)(?![\w/]))"
    r"|(?<=\blagom) (?=[a-z])|(?<=\blagom docs) (?=[a-z])"
)


class _Console(Console):
    """A console that parts no number from its unit, and no verb of ours from its `lagom`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's, of a text with its numbers bound."""
        if isinstance(renderable, Text) and _UNIT.search(renderable.plain):
            renderable = renderable.copy()
            renderable.plain = _UNIT.sub(_BOUND, renderable.plain)
        return super().render(renderable, options)


class _Page(io.StringIO):
    """Text for stdout; rich draws its boxes as this encoding allows."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a StringIO has none
        return encoding()


def show(*renderables: RenderableType) -> None:
    """Prints rich renderables, as wide as COLUMNS says, else as the terminal is, else 80 columns."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    page = _Page()
    console = _Console(file=page, width=_width(), force_terminal=terminal, color_system="auto" if terminal else None)
    console.print(*renderables, crop=False)  # a line to type is whole, however wide
    text = page.getvalue().rstrip("\n").replace(_BOUND, " ")
    say(text if text.isascii() or encoding().lower().startswith("utf") else text.translate(_WRITTEN_OUT))


def _width() -> int:
    """COLUMNS, as other tools have it, else the terminal's; a terminal that nobody has given a size says 0."""
    wished = os.environ.get("COLUMNS", "")
    if wished.isdecimal() and len(wished) < _MAX_DIGITS and int(wished) > 0:
        return max(LEAST_WIDTH, int(wished))
    if sys.stdout is None or not sys.stdout.isatty() or sys.stdout.fileno() != 1:
        return WIDTH
    return max(LEAST_WIDTH, os.get_terminal_size().columns or WIDTH)
