"""Rows of tables that others measured: read, checked, and why one is not judged.

A row that cannot be read is named with its line and the reason, and the others are still judged; a file that is no
table at all, or of which no row can be judged, ends with one line. Lines count from 1, the header's; a row that spans
several has the number of its first. A column that the file lacks reads as empty.

Every figure goes through `Row.number`: digits of ASCII with a point and an exponent, nothing that a spreadsheet or
Python's own `float` would also take (1_000, 1,000, NaN, other scripts' digits), within what its column can mean
(`LIMITS`). Times that no hardware reaches: `measured_limits.py`.
"""

import csv
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final, TypeVar

from lagom_overlap.errors import LagomError

MAX_FILE_BYTES: Final = 1 << 26
MOST: Final = 1e18
"""Larger figures than any table holds; above it products of them leave the range of a float."""
MOST_LINES: Final = 16
"""Lines that a row may span by line ends inside quotes; a quote that nobody closes costs its own line, not the file."""

_DEGREE: Final = (1.0, float(1 << 20))
TIME_MS: Final = (1e-4, 1e6)
_STEP_S: Final = (1e-4, 86_400.0)
LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(("gpus", "fsdp", "dp_replicate", "dp", "tp", "pp", "cp", "ep", "vp", "interleave"), _DEGREE),
    **dict.fromkeys(("nodes", "channels", "num_blocks", "cus", "grid_or_active_cus"), _DEGREE),
    **dict.fromkeys(("microbatch", "micro_batch"), _DEGREE),
    "global_batch": (1, 1 << 24),
    "layers": (1, 1 << 12),
    "heads": (1, 1 << 14),
    "hidden": (1, 1 << 20),
    "seq": (1, 1 << 26),
    "vocab": (1, 1 << 26),
    **dict.fromkeys(("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "num_tokens"), (1.0, float(1 << 26))),
    **dict.fromkeys(("num_tensor_parallel_workers", "num_workers", "devices_per_node"), _DEGREE),
    "size": (1, 1 << 44),
    "time_ns": (100, 1e12),
    **dict.fromkeys(("m", "n", "k", "tiles"), (1.0, float(1 << 30))),
    **dict.fromkeys(("bytes", "comm_bytes"), (1.0, float(1 << 44))),
    "chunk_bytes": (1, 1 << 34),
    "injector_bytes_per_s": (1e-3, 1e14),
    "tokens_per_s_per_gpu": (1e-3, 1e8),
    "tflops_per_gpu": (1e-4, 1e5),
    "measured_tflops_per_gpu": (1e-4, 1e5),
    **dict.fromkeys(("step_time_s", "measured_iter_s", "derived_iter_s"), _STEP_S),
    **dict.fromkeys(("measured_full_recompute_s", "measured_seqpar_selective_s"), _STEP_S),
    **dict.fromkeys(("solo_s", "median_s"), (1e-7, 1e3)),
}
"""What a column's figures can be: degrees up to a million GPUs, shapes beyond any model's, a day for a step.

Of a column that ends with `_ms`, 100 ns, which no host's clock and no event resolves, to 1000 s.
"""
_DECIMAL: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_NO_NUMBERS: Final = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE | re.ASCII)
_BLANKS: Final = " \t\r\n"
NOT_THERE: Final = "n/a"
"""How tables write that a row has nothing of the kind, such as experts in a dense model."""

T = TypeVar("T")


class BadFileError(Exception):
    """Raised for a file that cannot be read as one of the formats; one line."""


class BadRowError(Exception):
    """Raised for a row that is wrong: the rest of the file is still judged."""


class NotModelledError(Exception):
    """Raised for a row that the model does not cover, with the reason."""


def decimal(text: str, what: str, limits: tuple[float, float] = (1 / MOST, MOST)) -> float:
    """A figure as these tables print it; `what` names it.

    Raises:
        BadRowError: if it is no positive, finite decimal number, or outside `limits`.
    """
    shown = text[:40]
    if _NO_NUMBERS.fullmatch(text):
        raise BadRowError(f"{what} is {shown}, must be positive and finite")
    if not _DECIMAL.fullmatch(text):
        raise BadRowError(f"{what} is {shown!r}, must be a number")
    value, (least, most) = float(text), limits
    if not isfinite(value) or value <= 0:
        raise BadRowError(f"{what} is {shown}, must be positive and finite")
    if not least <= value <= most:
        raise BadRowError(f"{what} is {shown}, beyond what any machine has ({least:g} to {most:g})")
    return value


def whole(text: str, what: str) -> int:
    """A positive whole number below 2^30; `what` names it.

    Raises:
        BadRowError: if it is none.
    """
    value = decimal(text, what, (1, 1 << 30))
    if value != int(value):
        raise BadRowError(f"{what} is {text[:40]}, must be a whole number")
    return int(value)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file, by column."""

    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell, "" where there is none or it says that nothing is there."""
        text = self.cells.get(column, "").strip(_BLANKS)
        return "" if text.lower() == NOT_THERE else text

    def number(self, column: str) -> float | None:
        """The cell as a positive number, None where it is empty.

        Raises:
            BadRowError: if it is no positive, finite number, or none that the column can have.
        """
        text = self.text(column)
        default = TIME_MS if column.endswith("_ms") else (1 / MOST, MOST)
        return decimal(text, column, LIMITS.get(column, default)) if text else None

    def count(self, column: str) -> int | None:
        """The cell as a positive whole number, None where it is empty.

        Raises:
            BadRowError: if it is none.
        """
        value = self.number(column)
        if value is not None and value != int(value):
            raise BadRowError(f"{column} is {self.text(column)[:40]}, must be a whole number")
        return None if value is None else int(value)

    def count_or_zero(self, column: str) -> int | None:
        """The cell as a whole number, which may be 0 where nothing is of that kind; None where it is empty.

        Raises:
            BadRowError: if it is none.
        """
        return 0 if self.text(column) in ("0", "0.0") else self.count(column)

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
    """A line that is not judged, and why: it is wrong, or else the models do not cover it."""

    line: int
    why: str
    is_wrong: bool = True


def tried(row: Row, judge: Callable[[Row], T]) -> T | Named:
    """What `judge` makes of a row, or the row's line and why it makes nothing of it."""
    try:
        return judge(row)
    except (BadRowError, LagomError) as error:
        return Named(row.line, one_line(error))
    except NotModelledError as error:
        return Named(row.line, one_line(error), is_wrong=False)
    except (ValueError, ArithmeticError) as error:  # a figure that no check foresaw costs no other row
        return Named(row.line, f"cannot be modelled: {one_line(error)}")


def one_line(error: object) -> str:
    """A reason on one line."""
    return " ".join(str(error).split())


def report_named(path: Path, named: Sequence[Named], *, num_judged: int) -> None:
    """Names every wrong row on standard error.

    Raises:
        BadFileError: if no row was judged, with the first that was not.
    """
    if not num_judged:
        first = min(named, key=lambda one: (not one.is_wrong, one.line))
        more = f" (nor can {len(named) - 1} more)" if len(named) > 1 else ""
        raise BadFileError(f"no row can be judged: {path}:{first.line}: {first.why}{more}")
    for one in sorted(named, key=lambda one: one.line):
        if one.is_wrong:
            sys.stderr.write(f"{path}:{one.line}: {one.why}\n")


def interrupted(name: str, so_far: str) -> int:
    """What a fit that Ctrl-C ends prints, and its exit code."""
    print(so_far, flush=True)
    sys.stderr.write(f"{name}: interrupted before its end\n")
    return 130


def exit_code_of(name: str, main: Callable[[], int], *also: type[Exception]) -> int:
    """What a script ends with: 2 and one line for a file that is no table (or another of `also`), 130 for Ctrl-C."""
    try:
        code = main()
        sys.stdout.flush()
    except (BadFileError, *also) as error:
        sys.stderr.write(f"{name}: {one_line(error)}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted before its end, without a result\n")
        return 130
    except BrokenPipeError:  # whoever read the output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def read(
    path: Path, needed: Collection[str] = (), names: tuple[str, ...] | None = None
) -> tuple[tuple[str, ...], list[Row], list[Named]]:
    """The file's columns, its whole rows, and the lines whose cells do not match the header; empty lines are none.

    `names` are the columns' where the header names some of them twice.

    Raises:
        BadFileError: if it is missing, oversized, empty, no table, or lacks a `needed` column.
    """
    lines = _lines(path)
    _, found = next(lines)
    header = names or _header(path, found)
    check_columns(path, header, needed)
    rows: list[Row] = []
    bad: list[Named] = []
    for line, cells in lines:
        if isinstance(cells, str):
            bad.append(Named(line, cells))
        elif len(cells) == len(header):
            rows.append(Row(line, dict(zip(header, cells, strict=True))))
        else:
            bad.append(Named(line, f"{len(cells)} cells, the header has {len(header)}"))
    if not rows and not bad:
        raise BadFileError(f"{str(path)!r} has no rows")
    return header, rows, bad


def check_columns(path: Path, header: Collection[str], needed: Collection[str]) -> None:
    """Refuses a table without a column.

    Raises:
        BadFileError: naming what it lacks.
    """
    missing = [name for name in needed if name not in header]
    if missing:
        raise BadFileError(f"{str(path)!r} lacks the columns {', '.join(missing)}")


def check_twice(path: Path, header: Sequence[str]) -> None:
    """Refuses a header that gives two columns one name; columns without a name are nobody's.

    Raises:
        BadFileError: naming the column.
    """
    for place, name in enumerate(header):
        if name and name in header[:place]:
            raise BadFileError(f"{str(path)!r} names a column twice: {name[:60]!r}")


def _header(path: Path, cells: tuple[str, ...] | str) -> tuple[str, ...]:
    if isinstance(cells, str):
        raise BadFileError(f"{str(path)!r} is not a CSV file: its first line {cells}")
    header = tuple(cell.strip() for cell in cells)
    check_twice(path, header)
    return header


def _lines(path: Path) -> Iterator[tuple[int, tuple[str, ...] | str]]:
    """Every row that is not empty with its first line, the header's first; why it cannot be read, where it cannot."""
    lines = io.StringIO(_text(path), newline="").readlines()
    at, num_columns, is_empty = 0, 0, True
    while at < len(lines):
        line = at
        cells, num_lines = _cells(lines[line : line + MOST_LINES])
        if num_lines > 1 and num_columns and len(cells) != num_columns:
            cells, num_lines = "opens a quote that no line near it closes", 1
        at += num_lines
        if isinstance(cells, str) or any(cell.strip() for cell in cells):
            num_columns, is_empty = num_columns or len(cells), False
            yield line + 1, cells
    if is_empty:
        raise BadFileError(f"{str(path)!r} is empty")


def _cells(lines: Sequence[str]) -> tuple[tuple[str, ...] | str, int]:
    """The cells of the row that begins the lines, or what is wrong with it, and the lines that it spans."""
    if "\0" in lines[0]:
        return "holds zero bytes", 1
    if not lines[0].isascii() and any("\udc80" <= letter <= "\udcff" for letter in lines[0]):
        return "is not UTF-8 text", 1
    reader = csv.reader(lines, strict=True)
    try:
        return tuple(next(reader)), reader.line_num
    except csv.Error as error:
        return f"is not CSV: {error}", 1


def _text(path: Path) -> str:
    """The file's text; bytes that are no UTF-8 as surrogates.

    Raises:
        BadFileError: if it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadFileError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a zero byte in the name
        raise BadFileError(f"{str(path)!r} cannot be read: {error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise BadFileError(f"{str(path)!r} has more than {MAX_FILE_BYTES} bytes")
    return content.decode("utf-8-sig", errors="surrogateescape")
