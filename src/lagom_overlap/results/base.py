"""What every verb returns: one frozen value that `--json` prints, page and terminal show, and a notebook holds.

A result's public fields are its JSON: msgspec encodes them as they stand, so the object and the printed text cannot
differ. What only figures and tables need (a journal, a trace's events) is handed over as an `InitVar`, which is
no field, and kept under a name that begins with an underscore; a result that was read back from JSON may lack it.

`report/` draws results and stands above them, so `summary` and `figure` find it by name when they are called: plotly
is not loaded before someone asks for a figure.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from html import escape
from importlib import import_module
from math import inf
from pathlib import Path, PurePath
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from lagom_overlap.errors import BundleError

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


@dataclass(frozen=True, kw_only=True)
class Result(ABC):
    """What the results of all verbs have in common; `tool` is the command, `version` that of the package."""

    tool: str = "lagom"
    # By name: mypy loses the InitVars of who imports this module where it imports the package, whose stub names them.
    version: str = field(default_factory=lambda: str(import_module("lagom_overlap").__version__))

    def behind(self, name: str, what: str) -> Any:
        """What a result is drawn from and its JSON lacks, by the name it is kept under; `what` it is, for the error.

        Raises:
            BundleError: if the result was read back from a run folder that does not hold it.
        """
        try:
            return self.__dict__[name]
        except KeyError:
            raise BundleError(f"a run of {self.tool} that was loaded from its folder has no {what}") from None

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
        fields_by_name: dict[str, object] = msgspec.json.decode(encoded(self))
        return fields_by_name

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
        paragraphs = "".join(f"<p>{escape(line)}</p>" for line in self.summary().splitlines())
        try:
            rows = self.table()
        except BundleError as error:  # one that was loaded; a cell must show what there is
            return f"{paragraphs}<p>{escape(str(error))}</p>"
        if not rows:
            return paragraphs
        head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_shown(cell))}</td>" for cell in row.values()) + "</tr>"
            for row in rows[:MAX_SHOWN_ROWS]
        )
        more = f"<p>and {len(rows) - MAX_SHOWN_ROWS} more rows</p>" if len(rows) > MAX_SHOWN_ROWS else ""
        return f"{paragraphs}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


class Drawn(Result):
    """A result with words and a figure of its own in `report/`."""

    verb: ClassVar[str]
    """Its module of `report/`, whose `summary` and `figure` take the result."""

    def summary(self) -> str:
        """The result in one line or a few; of one that was loaded and lacks what they are made from, that."""
        try:
            text: str = import_module(f"lagom_overlap.report.{self.verb}").summary(self)
        except BundleError as error:
            return f"{error}; lagom show RUN says its figures"
        return text

    def figure(self) -> "go.Figure":
        """The result as a plotly figure.

        Raises:
            ValueError: if there is nothing to draw.
        """
        figure: go.Figure = import_module(f"lagom_overlap.report.{self.verb}").figure(self)
        return figure


R = TypeVar("R", bound=Result)


def decoded(kind: type[R], raw: object) -> R:
    """A result from its JSON: every field typed; what JSON never held is missing (`Result.behind`).

    A number that JSON has no word for was written as null; where a number must stand, it is infinite again.

    Raises:
        msgspec.ValidationError: if a field is missing, or is not of its type.
    """
    if not is_dataclass(kind) or not isinstance(raw, dict):
        raise msgspec.ValidationError(f"Expected `object`, got `{type(raw).__name__}`")
    hints, result = get_type_hints(kind), object.__new__(kind)
    for one in fields(kind):
        if one.name in raw:
            hint = hints[one.name]
            value = msgspec.convert(_with_infinities(raw[one.name], hint), hint, dec_hook=_from_plain)
        elif one.default is not MISSING:
            value = one.default
        elif one.default_factory is not MISSING:
            value = one.default_factory()
        else:
            raise msgspec.ValidationError(f"Object missing required field `{one.name}`")
        object.__setattr__(result, one.name, value)
    return result


def _from_plain(kind: type, value: object) -> object:
    if issubclass(kind, PurePath) and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"no {kind.__name__} from JSON")


def _with_infinities(raw: object, hint: Any) -> object:
    """Plain JSON with infinity in place of null wherever the type is a number that may not be None."""
    args: tuple[Any, ...] = get_args(hint)
    if raw is None:
        return inf if hint is float else None
    if get_origin(hint) in (Union, UnionType):
        kinds = [arg for arg in args if is_dataclass(arg) or get_args(arg)]
        return _with_infinities(raw, kinds[0]) if len(kinds) == 1 else raw
    if isinstance(raw, dict) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return {key: _with_infinities(value, hints.get(key)) for key, value in raw.items()}
    if isinstance(raw, dict) and len(args) == 2:
        return {key: _with_infinities(value, args[1]) for key, value in raw.items()}
    if isinstance(raw, list) and args:
        of_each = args[:1] * len(raw) if args[-1] is Ellipsis or len(args) == 1 else args
        return [_with_infinities(value, kind) for value, kind in zip(raw, of_each, strict=False)]
    return raw
