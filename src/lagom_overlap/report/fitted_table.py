"""A table that never cuts a value: at most 80 columns wide, up to 120 where a text would wrap, or stacked.

Columns that do not wrap hold numbers and are shown whole; the others wrap at words. A terminal with too little room for
both gets one paragraph per row: its first cell, and below it every other cell after its column's name.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

WIDTH: Final = 80
"""Columns that a table takes at most while its texts fit."""
MOST_WIDTH: Final = 120
"""Columns that one takes whose texts would wrap: in a longer row the eye loses the line."""
_LEAST_TEXT: Final = 12
"""Columns below which wrapped text is no longer read."""
_LONGEST_WORD: Final = 30
"""Words up to here are never broken over two lines: names of collectives are that long."""
_INDENT: Final = 2
"""Columns."""


def to_type(text: str) -> Text:
    """A line to type: never wrapped or cut, so that it can be copied from any terminal."""
    return Text(text, no_wrap=True, overflow="ignore")


def numbers_table(first: str, *others: str) -> Table:
    """An empty table with numbers in all columns but the first."""
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column(first, ratio=1)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


class Fitted:
    """A rich table of plain texts as it fits into the terminal; the table is not printed by itself any more."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, max(WIDTH, min(MOST_WIDTH, self._whole_width())))
        if self._least_width() <= width:
            self._table.width = None if self._table.width is None else width
            yield self._table
            return
        if self._table.title:
            yield Text(str(self._table.title), style="italic")
        if what := _name_of(self._table.columns[0]):
            yield Text(what, style="dim")
        rows = zip_longest(*(column.cells for column in self._table.columns), fillvalue="")
        for row in rows:
            yield from self._stacked([_text(cell) for cell in row], width)
        if self._table.caption:
            yield Text(str(self._table.caption), style="dim italic")

    def _least_width(self) -> int:
        """The columns that the numbers take, with some for each column of text."""
        return sum(map(_least_of, self._table.columns)) + self._between()

    def _whole_width(self) -> int:
        """The columns in which no text wraps."""
        return sum(map(_widest_of, self._table.columns)) + self._between()

    def _between(self) -> int:
        """The columns that padding and lines take."""
        columns, table = self._table.columns, self._table
        _, right, _, left = table.padding
        padding = (left + right) * len(columns) - (0 if table.pad_edge else left + right)
        return padding + (len(columns) + 1 if table.box else 0)

    def _stacked(self, row: list[Text], width: int) -> Iterator[RenderableType]:
        """The first cell that says something on its own line, the others below it in as few lines as hold them."""
        first = next((at for at, cell in enumerate(row) if cell.plain.strip()), 0)
        yield row[first]
        line = ""
        for column, cell in zip(self._table.columns, row, strict=True):
            if cell is row[first] or not cell.plain.strip():
                continue
            parts = [part.strip() for part in cell.plain.splitlines()]
            value = (" " if parts[-1].endswith("%") else ", ").join(parts)  # a share belongs to what stands before it
            item = f"{_name_of(column)} {value}".strip()
            if line and _INDENT + cell_len(line) + 2 + cell_len(item) > width:
                yield _indented(line)
                line = item
            else:
                line = f"{line}, {item}" if line else item
        if line:
            yield _indented(line)


def _indented(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, _INDENT), expand=False)


def _name_of(column: Column) -> str:
    """The header on one line."""
    return " ".join(_text(column.header).plain.replace("-\n", "-").split())


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _widest_of(column: Column) -> int:
    """The longest line of a column."""
    lines = (line for cell in (column.header, *column.cells) for line in _text(cell).plain.splitlines())
    return max(map(cell_len, lines), default=0)


def _least_of(column: Column) -> int:
    """All of a number; of a text the longest word, and enough to read by."""
    cells = [_text(column.header), *map(_text, column.cells)]
    lines = [line for cell in cells for line in cell.plain.splitlines()]
    widest = max(map(cell_len, lines), default=0)
    if column.no_wrap:
        return max(widest, column.min_width or 0)
    words = [
        len(line) - len(line.lstrip()) + max((cell_len(word) for word in line.split()), default=0) for line in lines
    ]
    unbroken = max((width for width in words if width <= _LONGEST_WORD), default=0)
    return max(min(widest, _LEAST_TEXT), unbroken)
