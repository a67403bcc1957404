"""A user's TOML file, and its tables as dataclasses; errors name the key, the value and what is allowed."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from lagom_overlap.errors import JobError, allowed_names, in_words
from lagom_overlap.units import format_bytes, parse_bytes

_PLACE: Final = re.compile(r"(.*) - at `\$\.(.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`$")
_NOT_AN_ENUM: Final = "Invalid enum value "
Shape = TypeVar("Shape")
NOT_A_KEY: Final = {"not a key": True}
"""Metadata of a dataclass's field that no file may give."""
_STEP: Final = re.compile(r"\[(\d+)\]|([^.\[\]]+)")

MAX_SIZE_BYTES: Final = 1 << 48
"""256 TiB: the largest size of the plug-in's table, and larger than any message."""
Name = Annotated[str, Meta(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Count = Annotated[int, Meta(ge=1, le=MAX_SIZE_BYTES)]
Size = str | Count
"""Bytes as a number, or text with a unit: "32 MiB"."""

MAX_KEY_DEPTH: Final = 32
"""Names that dots may join to one key: `tomllib` takes time and memory quadratic in it (20,000 names took 41 s)."""
_TOKEN: Final = re.compile(
    r"""
    (?P<text> \"\"\"(?:[^"\\]|\\.|"(?!""))*+(?:\"\"\")?+ | '''(?:[^']|'(?!''))*+(?:''')?+ | \#[^\n]*+ )
  | (?P<name> "(?:[^"\\\n]|\\.)*+"?+ | '[^'\n]*+'?+ | [A-Za-z0-9_-]++ )
  | (?P<dot> [\ \t]*+\.[\ \t]*+ )
  | (?P<other> [^"'\#A-Za-z0-9_.\ \t-]++ | [\ \t]++ )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Strings and comments, names or values, dots, and everything between them. All quantifiers are possessive, so that an
unclosed string costs no backtracking."""


def parse_toml(content: bytes) -> dict[str, Any]:  # any TOML value
    """The tables of a file.

    Raises:
        ValueError: if it is not UTF-8 or not TOML, or nests too deep.
    """
    text = content.decode("utf-8")
    _check_depth(text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its arrays or tables are nested too deep") from None


def toml_value(value: object) -> str:
    """A value as a file has it, and `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else "[]" if value == () else str(value)


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
    """The table as that dataclass; `where` is the prefix of its keys in messages, such as `operators.`.

    Raises:
        JobError: if a key is unknown or missing, or a value is not allowed.
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
    keys = keys_of(shape)
    for name in sorted(set(table) - set(keys)):
        yield f"unknown key {where + name!r}{allowed_names(name, list(keys))}"
    for name, hint in keys.items():
        inner = table_in(types_in(hint))
        value = table.get(name)
        if inner is None:
            continue
        if isinstance(value, dict):
            yield from _unknown_keys(value, inner, f"{where}{name}.")
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, dict):
                    yield from _unknown_keys(entry, inner, f"{where}{name}[{index}].")


def types_in(hint: Any) -> list[type]:  # any annotation
    """The classes in an annotation: X and NoneType for `tuple[X, ...] | None`."""
    inner = [one for argument in get_args(hint) for one in types_in(argument)]
    return inner if inner else [hint] if isinstance(hint, type) else []


def keys_of(shape: type) -> dict[str, Any]:  # annotations
    """The keys of a table as a file spells them, with their types."""
    hints = get_type_hints(shape)
    if is_dataclass(shape):
        return {field.name: hints[field.name] for field in fields(shape) if field.metadata != NOT_A_KEY}
    assert issubclass(shape, msgspec.Struct), shape
    return {key: hints[name] for key, name in zip(shape.__struct_encode_fields__, shape.__struct_fields__, strict=True)}


def table_in(types: list[type]) -> type | None:
    """The table among what a value may be."""
    return next((one for one in types if is_dataclass(one) or issubclass(one, msgspec.Struct)), None)


def value_at(table: Any, place: str) -> Any:  # any TOML value
    """The value that a place such as `group[0].comm[1]` leads to.

    Raises:
        LookupError: if there is none; a TypeError where a table should be and is not.
    """
    for index, name in _STEP.findall(place):
        table = table[int(index)] if index else table[name]
    return table


def types_at(shape: type, place: str) -> list[type]:
    """What the value there may be."""
    types: list[type] = [shape]
    for _, name in _STEP.findall(place):
        if name:
            outer = table_in(types)
            types = types_in(keys_of(outer).get(name)) if outer else []
    return types


def _explained(message: str, table: dict[str, Any], shape: type, where: str) -> str:
    """A decoder's complaint as one line; what a dataclass's own check raises is already one and stays as it is."""
    match = _PLACE.match(message)
    complaint, place = (match[1], match[2]) if match else (message, "")
    if missing := _MISSING.match(complaint):
        return f"missing key {where + f'{place}.{missing[1]}'.lstrip('.')!r}"
    is_enum = complaint.startswith(_NOT_AN_ENUM)
    if not place or not (is_enum or complaint.startswith("Expected ")):
        return complaint
    words = f"must be {' or '.join(_words_of(types_at(shape, place)))}" if is_enum else in_words(complaint)
    return f"{where}{place} is {repr(value_at(table, place))[:80]}, {words}"


def _words_of(types: list[type]) -> list[str]:
    return [str(word) for one in types if issubclass(one, StrEnum) for word in one]
