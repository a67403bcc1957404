"""A job file with some keys set otherwise: `--set parallel.fsdp=16`, or several values of one key, or of several.

In the file itself any key of `[parallel]` may have several values: `fsdp = { auto = [8, 16, 32] }`. Every combination
is one job, checked as a job file is.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

import tomli_w

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.reading import parse_job, read_tables, seen_from
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.toml_tables import parse_toml

MAX_VARIANTS: Final = 4096
"""Combinations of values: as many take minutes, and more is a slip of the pen."""
_KEY: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
_VALUE: Final = re.compile(r"(?:\[[^\]]*\]|\"[^\"]*\"|[^,\[\]\"])+")
_VALUES: Final = re.compile(f"{_VALUE.pattern}(?:,{_VALUE.pattern})*")

Values = Mapping[str, object]
"""Keys, joined by dots, with one value each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVariants:
    """The tables of a job file, and the values that some keys have in turn; `where` names the file in messages."""

    tables: Mapping[str, Any]
    axes: Mapping[str, tuple[object, ...]]
    where: str
    folder: Path
    may_lack_work: bool = False
    """Whether something else says what is trained, as of `read_job`."""

    @classmethod
    def read(cls, path: Path, sets: Sequence[str] = (), *, may_lack_work: bool = False) -> "JobVariants":
        """A job file's, with what `--set` says.

        Raises:
            JobError: if it cannot be read, a key is none, or there are too many combinations.
        """
        return replace(cls.of(read_tables(path), str(path), path.parent, sets), may_lack_work=may_lack_work)

    @classmethod
    def of(cls, tables: Mapping[str, Any], where: str, folder: Path, sets: Sequence[str] = ()) -> "JobVariants":
        """Those of decoded tables; keys of `sets` are set, or have several values.

        Raises:
            JobError: if a key is none, or there are too many combinations.
        """
        own, axes = deepcopy(dict(tables)), dict[str, tuple[object, ...]]()
        for key, values in [*_named(own, where), *map(_asked, sets)]:
            axes.pop(key, None)
            if len(values) == 1:
                _put(own, key, values[0], where)
            else:
                axes[key] = values
        num = prod(len(values) for values in axes.values())
        if num > MAX_VARIANTS:
            raise JobError(
                f"{where}: {', '.join(axes)} have {num} combinations of values, at most {MAX_VARIANTS} are tried"
            )
        return cls(tables=own, axes=axes, where=where, folder=folder)

    def one(self) -> JobSpec:
        """The only job.

        Raises:
            JobError: if there are several, or it holds what is not allowed.
        """
        if self.axes:
            raise JobError(
                f"{self.where}: {' and '.join(self.axes)} with several values: `lagom simulate` compares them; here "
                "give one value"
            )
        return self.spec({})

    def combinations(self) -> Iterator[Values]:
        """Every combination of the values."""
        for values in product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    def with_values(self, values: Values) -> dict[str, Any]:
        """The tables with those values."""
        tables = deepcopy(dict(self.tables))
        for key, value in values.items():
            _put(tables, key, value, self.where)
        return tables

    def spec(self, values: Values) -> JobSpec:
        """The job with those values.

        Raises:
            JobError: if it holds what is not allowed.
        """
        job = parse_job(self.with_values(values), self.where, may_lack_work=self.may_lack_work)
        return seen_from(job, self.folder)


def job_toml(tables: Mapping[str, Any], head: Sequence[str]) -> bytes:
    """A job file: comments, then the tables."""
    return ("".join(f"# {line}\n" for line in head) + "\n" + tomli_w.dumps(tables)).encode()


def _named(tables: dict[str, Any], where: str) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Keys of [parallel] with `{ auto = [...] }`, which are taken out."""
    parallel = tables.get("parallel")
    if not isinstance(parallel, dict):
        return
    for key, value in list(parallel.items()):
        if not isinstance(value, dict):
            continue
        values = value.get("auto")
        if set(value) != {"auto"} or not isinstance(values, list) or not values:
            raise JobError(f"{where}: parallel.{key} is {str(value)[:60]}, must be a value or {{ auto = [A, B, ...] }}")
        del parallel[key]
        yield f"parallel.{key}", _different(values, f"{where}: parallel.{key}")


def _different(values: Sequence[object], where: str) -> tuple[object, ...]:
    """The values without repetitions, lists as tuples; 1 and true are two values."""
    for value in values:
        plain = value if isinstance(value, list) else [value]
        if any(isinstance(one, dict | list) for one in plain):
            raise JobError(f"{where} is {str(value)[:60]}, must be a number, a word, or a list of these")
    own = [tuple(value) if isinstance(value, list) else value for value in values]
    return tuple({(type(value), value): value for value in own}.values())


def _asked(text: str) -> tuple[str, tuple[object, ...]]:
    """What `KEY=A,B` sets."""
    key, equals, text_of_values = text.partition("=")
    key = key.strip()
    parts = [part.strip() for part in _VALUE.findall(text_of_values)]
    if not equals or not _KEY.fullmatch(key) or not _VALUES.fullmatch(text_of_values) or not all(parts):
        raise JobError(f"--set {text!r}: must be TABLE.KEY=VALUE or TABLE.KEY=A,B,..., such as parallel.fsdp=8,16,32")
    return key, _different([_value(part) for part in parts], f"--set {key}")


def _value(text: str) -> object:
    """A TOML value; a bare word is text, as shells take quotes away."""
    try:
        return parse_toml(f"value = {text}".encode())["value"]
    except ValueError:
        return text


def _put(tables: dict[str, Any], key: str, value: object, where: str) -> None:
    *path, last = key.split(".")
    table: Any = tables
    for name in path:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise JobError(f"{where}: {key}: {name!r} is no table")
    table[last] = list(value) if isinstance(value, tuple) else value
