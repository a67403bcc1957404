"""Rows of the measured files: read, checked, and what became of them."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

MAX_FILE_BYTES: Final = 1 << 26
MS: Final = 1e-3


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
        """The cell, "" where it is empty."""
        return self.cells[column].strip()

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
            raise BadRowError(f"{column} is empty")
        return value

    def shape(self) -> tuple[int, int, int]:
        """m, n, k.

        Raises:
            BadRowError: if one is missing or no positive whole number.
        """
        m, n, k = (self.count(name) for name in ("m", "n", "k"))
        if m is None or n is None or k is None:
            raise BadRowError("m, n or k is empty")
        return m, n, k


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One measured value and the model's.

    `family` is what is left out together in cross-validation; `claimed` says whether the model claims the row.
    """

    line: int
    quantity: str
    series: str
    kind: str
    family: str
    measured: float
    predicted: float
    claimed: bool = True

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Named:
    """A line that is not judged, and why."""

    line: int
    why: str


def read(path: Path) -> tuple[tuple[str, ...], list[Row], list[Named]]:
    """The file's columns, its whole rows, and the lines whose cells do not match the header.

    Raises:
        BadFileError: if it is missing, oversized, empty or no table.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadFileError(f"{str(path)!r} has more than {MAX_FILE_BYTES} bytes")
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            header = tuple(next(reader, ()))
            if not header:
                raise BadFileError(f"{str(path)!r} is empty")
            if len(set(header)) != len(header):
                raise BadFileError(f"{str(path)!r} names a column twice")
            rows: list[Row] = []
            bad: list[Named] = []
            for cells in reader:
                line = reader.line_num
                if len(cells) != len(header):
                    bad.append(Named(line, f"{len(cells)} cells, the header has {len(header)}"))
                else:
                    rows.append(Row(line, dict(zip(header, cells, strict=True))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadFileError(f"{str(path)!r} cannot be read: {error}") from None
    if not rows and not bad:
        raise BadFileError(f"{str(path)!r} has no rows")
    return header, rows, bad
