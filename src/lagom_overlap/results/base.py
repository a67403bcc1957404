"""What every verb returns: one frozen value that `--json` prints, page and terminal show, and a notebook holds.

A result's public fields are its JSON: msgspec encodes them as they stand, so the object and the printed text cannot
differ. What only figures and tables need (a journal, a trace's events) is handed over as an `InitVar`, which is
no field, and kept under a name that begins with an underscore.

`report/` draws results and stands above them, so `summary` and `figure` find it by name when they are called: plotly
is not loaded before someone asks for a figure.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:  # for the annotations: both take long to import, and pandas need not be there
    import pandas as pd
    import plotly.graph_objects as go

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
"""One row of a table of plain types, as pandas and polars take it; all rows of a table have the same keys."""

MAX_SHOWN_ROWS = 50
"""Rows of the table that a notebook shows."""


def encoded(value: object) -> bytes:
    """JSON of a result, or of anything that holds results; infinity and not-a-number become null."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, MappingProxyType):
        return dict(value)
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"no JSON for a {type(value).__name__}")


class Result(ABC):
    """What the results of all verbs have in common."""

    @abstractmethod
    def summary(self) -> str:
        """The result in one line or a few."""

    @abstractmethod
    def table(self) -> Sequence[Row]:
        """The result's main table."""

    def to_json(self) -> str:
        """What the command line prints with `--json`."""
        return encoded(self).decode()

    def to_dict(self) -> dict[str, object]:
        """The same as dictionaries, lists, numbers and text."""
        found: dict[str, object] = msgspec.json.decode(encoded(self))
        return found

    def to_frame(self) -> "pd.DataFrame":
        """The main table as a data frame.

        Raises:
            ModuleNotFoundError: if pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("to_frame needs pandas: pip install pandas", name=error.name) from None
        frame: pd.DataFrame = pandas.DataFrame(list(self.table()))
        return frame

    def _repr_html_(self) -> str:
        """What a notebook shows: the summary and the table, as HTML that loads nothing."""
        said = "".join(f"<p>{escape(line)}</p>" for line in self.summary().splitlines())
        rows = self.table()
        if not rows:
            return said
        head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_shown(cell))}</td>" for cell in row.values()) + "</tr>"
            for row in rows[:MAX_SHOWN_ROWS]
        )
        more = f"<p>and {len(rows) - MAX_SHOWN_ROWS} more rows</p>" if len(rows) > MAX_SHOWN_ROWS else ""
        return f"{said}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


class Drawn(Result):
    """A result with words and a figure of its own in `report/`."""

    verb: ClassVar[str]
    """Its folder of `report/`: `words.summary` and `figures.figure` take the result."""

    def summary(self) -> str:
        """The result in one line or a few."""
        said: str = import_module(f"lagom_overlap.report.{self.verb}.words").summary(self)
        return said

    def figure(self) -> "go.Figure":
        """The result as a plotly figure.

        Raises:
            ValueError: if there is nothing to draw.
        """
        figure: go.Figure = import_module(f"lagom_overlap.report.{self.verb}.figures").figure(self)
        return figure
