"""Rows of tables that others measured: read, checked, and why one is not judged.

A row that cannot be read is named with its line and the reason, and the others are still judged; a file that is no
table at all ends with one line. Lines count from 1, the header's. A column that the file lacks reads as empty.
"""

import csv
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

MAX_FILE_BYTES: Final = 1 << 26
MOST: Final = 1e18
"""Larger figures than any table holds; above it products of them leave the range of a float."""


class BadFileError(Exception):
    """Raised for a file that cannot be read as one of the formats; one line."""


class BadRowError(Exception):
    """Raised for a row that is wrong: the rest of the file is still judged."""


class NotModelledError(Exception):
    """Raised for a row that the model does not cover, with the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file, by column."""

    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell, "" where there is none."""
        return self.cells.get(column, "").strip()

    def number(self, column: str) -> float | None:
        """The cell as a positive number, None where it is empty.

        Raises:
            BadRowError: if it is no positive, finite number.
        """
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise BadRowError(f"{column} is {text[:40]!r}, must be a number") from None
        if not isfinite(value) or value <= 0:
            raise BadRowError(f"{column} is {text[:40]}, must be positive and finite")
        if not 1 / MOST < value < MOST:
            raise BadRowError(f"{column} is {text[:40]}, beyond what any machine has")
        return value

    def count(self, column: str) -> int | None:
        """The cell as a positive whole number, None where it is empty.

        Raises:
            BadRowError: if it is none.
        """
        value = self.number(column)
        if value is not None and value != int(value):
            raise BadRowError(f"{column} is {self.text(column)[:40]}, must be a whole number")
        return None if value is None else int(value)

    def needed(self, column: str) -> float:
        """The cell as a positive number.

        Raises:
            BadRowError: if it is empty or none.
        """
        value = self.number(column)
        if value is None:
            raise BadRowError(f"{column} is not printed")
        return value

    def needed_count(self, column: str, default: int | None = None) -> int:
        """The cell as a positive whole number, `default` where it is empty.

        Raises:
            BadRowError: if it is none, or empty without a default.
        """
        value = self.count(column)
        if value is None and default is None:
            raise BadRowError(f"{column} is not printed")
        return default if value is None else value  # type: ignore[return-value]  # both None was refused

    def shape(self) -> tuple[int, int, int]:
        """m, n, k.

        Raises:
            BadRowError: if one is missing or no positive whole number.
        """
        return self.needed_count("m"), self.needed_count("n"), self.needed_count("k")


@dataclass(frozen=True, slots=True)
class Named:
    """A line that is not judged, and why."""

    line: int
    why: str


def exit_code_of(name: str, main: Callable[[], int], *also: type[Exception]) -> int:
    """What a script ends with: 2 and one line for a file that is no table (or another of `also`), 130 for Ctrl-C."""
    try:
        return main()
    except (BadFileError, *also) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted before its end, without a result\n")
        return 130


def header_of(path: Path) -> tuple[str, ...]:
    """The columns of a table.

    Raises:
        BadFileError: if it is missing, oversized, empty or no table.
    """
    return next(_lines(path))[1]


def read(path: Path, needed: Collection[str] = ()) -> tuple[tuple[str, ...], list[Row], list[Named]]:
    """The file's columns, its whole rows, and the lines whose cells do not match the header; empty lines are none.

    Raises:
        BadFileError: if it is missing, oversized, empty, no table, or lacks a `needed` column.
    """
    lines = _lines(path)
    _, header = next(lines)
    missing = [name for name in needed if name not in header]
    if missing:
        raise BadFileError(f"{str(path)!r} lacks the columns {', '.join(missing)}")
    rows: list[Row] = []
    bad: list[Named] = []
    for line, cells in lines:
        if len(cells) == len(header):
            rows.append(Row(line, dict(zip(header, cells, strict=True))))
        else:
            bad.append(Named(line, f"{len(cells)} cells, the header has {len(header)}"))
    if not rows and not bad:
        raise BadFileError(f"{str(path)!r} has no rows")
    return header, rows, bad


def _lines(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The header with its line, then every line that is not empty."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadFileError(f"{str(path)!r} has more than {MAX_FILE_BYTES} bytes")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header: tuple[str, ...] = ()
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if header:
                    yield reader.line_num, tuple(cells)
                    continue
                header = tuple(cell.strip() for cell in cells)
                if len(set(header)) != len(header):
                    raise BadFileError(f"{str(path)!r} names a column twice")
                yield reader.line_num, header
    except OSError as error:
        raise BadFileError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadFileError(f"{str(path)!r} is not UTF-8 text (byte {error.start})") from None
    except csv.Error as error:
        raise BadFileError(f"{str(path)!r} is not a CSV file: {error}") from None
    if not header:
        raise BadFileError(f"{str(path)!r} is empty")
