"""A user's TOML file, and a table of it as a dataclass: what is wrong is told by key, value and what is allowed."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from lagom_overlap.errors import JobError, did_you_mean, in_words
from lagom_overlap.units import format_bytes, parse_bytes

_PLACE: Final = re.compile(r"(.*) - at `\$\.(.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`$")
_NOT_AN_ENUM: Final = "Invalid enum value "
Shape = TypeVar("Shape")
NOT_A_KEY: Final = {"not a key": True}
"""Metadata of a dataclass's field that no file may give."""
_STEP: Final = re.compile(r"\[(\d+)\]|([^.\[\]]+)")

MAX_SIZE_BYTES: Final = 1 << 48
Name = Annotated[str, Meta(min_length=1, max_length=120)]
Count = Annotated[int, Meta(ge=1, le=MAX_SIZE_BYTES)]
Size = str | Count
"""Bytes as a number, or text with a unit: "32 MiB"."""

MAX_KEY_DEPTH: Final = 32
"""Names that dots may join to one key. `tomllib` takes time and memory by the square of it: 20,000 took 41 s."""
_TOKEN: Final = re.compile(
    r"""
    (?P<text> \"\"\"(?:[^"\\]|\\.|"(?!""))*+(?:\"\"\")?+ | '''(?:[^']|'(?!''))*+(?:''')?+ | \#[^\n]*+ )
  | (?P<name> "(?:[^"\\\n]|\\.)*+"?+ | '[^'\n]*+'?+ | [A-Za-z0-9_-]++ )
  | (?P<dot> [\ \t]*+\.[\ \t]*+ )
  | (?P<other> [^"'\#A-Za-z0-9_.\ \t-]++ | [\ \t]++ )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Texts and comments, names or values, dots, and all between; nothing is read twice, whatever is left open."""


def parse_toml(content: bytes) -> dict[str, Any]:  # any TOML value
    """The tables of a file.

    Raises:
        ValueError: if it is no UTF-8 text or no TOML, or nests deeper than anybody writes.
    """
    text = content.decode("utf-8")
    _check_depth(text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its arrays or tables are nested too deep") from None


def _check_depth(text: str) -> None:
    depth = 0
    for token in _TOKEN.finditer(text):
        if token.lastgroup != "dot":
            depth = depth if token.lastgroup == "name" else 0
            continue
        depth += 1
        if depth >= MAX_KEY_DEPTH:
            line = text.count("\n", 0, token.start()) + 1
            raise ValueError(f"line {line}: more than {MAX_KEY_DEPTH} names joined by dots, the most a key may have")


def size_bytes(value: str | int, where: str) -> int:
    """A size of a user's file in bytes.

    Raises:
        JobError: if the text is no size or is not positive.
    """
    if isinstance(value, int):
        return value
    try:
        num_bytes = parse_bytes(value)
    except ValueError as error:
        raise JobError(f"{where}: {error}") from None
    if not 1 <= num_bytes <= MAX_SIZE_BYTES:
        raise JobError(f"{where}: {value!r} is outside 1 B to {format_bytes(MAX_SIZE_BYTES)}")
    return num_bytes


def from_table(table: Any, shape: type[Shape], source: str, where: str = "") -> Shape:  # any TOML value
    """The table as that dataclass; `where` is what stands before its keys, such as `operators.`.

    Raises:
        JobError: naming the source, and a key that is unknown or missing, or its value and what is allowed.
    """
    if not isinstance(table, dict):
        raise JobError(f"{source}: {where.rstrip('.')} is {repr(table)[:80]}, must be a table")
    unknown = next(_unknown_keys(table, shape, where), None)
    if unknown is not None:
        raise JobError(f"{source}: {unknown}")
    try:
        return msgspec.convert(table, shape)
    except msgspec.ValidationError as error:
        raise JobError(f"{source}: {_explained(str(error), table, shape, where)}") from None


def _unknown_keys(table: dict[str, Any], shape: type, where: str) -> Iterator[str]:
    allowed = [field.name for field in fields(shape) if field.metadata != NOT_A_KEY]
    for name in sorted(set(table) - set(allowed)):
        yield f"unknown key {where + name!r}{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}"
    for name, hint in get_type_hints(shape).items():
        inner = next((one for one in types_in(hint) if is_dataclass(one)), None)
        found = table.get(name)
        if inner is None:
            continue
        if isinstance(found, dict):
            yield from _unknown_keys(found, inner, f"{where}{name}.")
        elif isinstance(found, list):
            for index, one in enumerate(found):
                if isinstance(one, dict):
                    yield from _unknown_keys(one, inner, f"{where}{name}[{index}].")


def types_in(hint: Any) -> list[type]:  # any annotation
    """The classes that an annotation is made of: of `tuple[X, ...] | None` the class X among them."""
    inner = [one for argument in get_args(hint) for one in types_in(argument)]
    return inner if inner else [hint] if isinstance(hint, type) else []


def _explained(message: str, table: dict[str, Any], shape: type, where: str) -> str:
    """A decoder's complaint in one line; those of a dataclass about itself are whole as they are."""
    found = _PLACE.match(message)
    complaint, place = (found[1], found[2]) if found else (message, "")
    if missing := _MISSING.match(complaint):
        return f"missing key {where + f'{place}.{missing[1]}'.lstrip('.')!r}"
    is_enum = complaint.startswith(_NOT_AN_ENUM)
    if not place or not (is_enum or complaint.startswith("Expected ")):
        return complaint
    value: Any = table
    types: list[type] = [shape]
    for index, name in _STEP.findall(place):
        value = value[int(index)] if index else value[name]
        if name:
            outer = next(one for one in types if is_dataclass(one))
            types = types_in(get_type_hints(outer)[name])
    words = f"must be {' or '.join(_words_of(types))}" if is_enum else in_words(complaint)
    return f"{where}{place} is {repr(value)[:80]}, {words}"


def _words_of(types: list[type]) -> list[str]:
    return [str(word) for one in types if issubclass(one, StrEnum) for word in one]
