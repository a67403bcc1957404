"""A table of published training steps: one row, one job that somebody ran, with its measured throughput.

A row that cannot be read is named with file, line and reason; the others are still judged. Lines count from 1, the
header's.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import Cluster
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import Precision

COLUMNS: Final = ("framework", "model", "gpu_type", "gpus", "tp", "pp", "global_batch", "seq", "precision")
"""What a row must have; `tokens_per_s_per_gpu`, `tflops_per_gpu` or `step_time_s` says what was measured."""


class RowError(LagomError):
    """A row that is not predicted, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """One job and its measured iteration time; `group` and `family` are how errors are gathered and left out."""

    line: int
    group: str
    family: str
    what: str
    model: TransformerModel
    layout: ParallelLayout
    seq_len: int
    cluster: Cluster
    framework: str
    precision: Precision
    measured_s: float
    shard: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table by column; a missing column reads as empty."""

    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell, "" where there is none."""
        return self.cells.get(column, "").strip()

    def number(self, column: str) -> float | None:
        """A positive number; None where the cell is empty.

        Raises:
            RowError: if it is no positive, finite number.
        """
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise RowError(f"{column} is {text[:40]!r}, must be a number") from None
        if not isfinite(value) or value <= 0:
            raise RowError(f"{column} is {text[:40]}, must be positive and finite")
        return value

    def count(self, column: str, default: int | None = None) -> int:
        """A whole number; `default` where the cell is empty.

        Raises:
            RowError: if it is none, or empty without a default.
        """
        value = self.number(column)
        if value is None:
            if default is None:
                raise RowError(f"{column} is not printed")
            return default
        if value != int(value):
            raise RowError(f"{column} is {value}, must be a whole number")
        return int(value)


def is_step_table(columns: list[str]) -> bool:
    """Whether a header is of this kind of table."""
    return set(COLUMNS) <= {column.strip() for column in columns}


def read_step_rows(path: Path) -> Iterator[Row]:
    """The table's lines; one with too few or too many cells has none of them."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        header = [column.strip() for column in next(reader)]
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            whole = len(cells) == len(header)
            yield Row(reader.line_num, dict(zip(header, cells, strict=True)) if whole else {})
