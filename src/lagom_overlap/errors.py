"""What a user can fix, as one small tree.

    LagomError                     a user's mistake or a machine's limit: one line, exit code 2
    |-- JobError                   the job file: unreadable, unknown key, wrong type, impossible value
    |-- UnknownNameError           a preset, model, tuner, backend or profile that does not exist
    |-- SpaceError                 a knob outside its space, or a space that is empty
    |-- OutputError                an output folder that exists or cannot be written
    |-- BundleError                a measurement bundle that is damaged or belongs to another job
    |-- TraceError                 a file that cannot be read, is damaged, or is no profiler file
    |-- DataError                  a third-party dataset that is absent, cannot be fetched, or is something else
    |-- TableError                 a plug-in table that is damaged, truncated or of another version
    |-- MissingDependencyError     an extra that is not installed
    `-- BackendError               the machine could not run the measurement
        |-- RankError              a rank process died or hung
        `-- WrongResultError       a collective returned wrong numbers: nothing was timed

A wrong argument from code is a `ValueError`; `assert` is for our own bugs only.
Every message says what was wrong, the value, and what is allowed.
"""

import re
from collections.abc import Iterable
from typing import Final

_MAX_LONGER: Final = 2
"""How many names that begin with what was typed are suggested; beyond that the list of allowed names says it better."""


_MOST_LISTED: Final = 24
"""Names in a message: more fill a screen."""
_LISTED_BY: Final = {"model": "lagom list models", "page": "lagom docs"}


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """A hint: the allowed names that begin with `name` if they are few, else the closest one; "" if there is none."""
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake, not for each start

    names = sorted(allowed)
    longer = [other for other in names if other.startswith(name)] if name else []
    near = longer if 0 < len(longer) <= _MAX_LONGER else get_close_matches(name, names, n=1)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def allowed_names(name: str, allowed: Iterable[str], listed_by: str = "") -> str:
    """What a message says behind a name that there is not: the nearest one, and the names that are allowed.

    Many are not listed where the nearest one helps, or where the command `listed_by` lists them.
    """
    names = list(allowed)
    near = did_you_mean(name, names)
    if len(names) <= _MOST_LISTED or not (near or listed_by):
        return f"{near}; allowed: {', '.join(names)}"
    return f"{near}; all {len(names)} of them: {listed_by}" if listed_by else near


class LagomError(Exception):
    """Raised for what a user can fix; the command line prints it as one line and exits with 2."""


class JobError(LagomError):
    """Raised when a job file cannot be read, or holds a key, type or value that is not allowed."""


class UnknownNameError(LagomError):
    """Raised when a name (preset, model, tuner, backend, profile) does not exist."""

    @classmethod
    def among(cls, what: str, name: str, allowed: Iterable[str]) -> "UnknownNameError":
        """The error for `name`, listing what is allowed and the nearest word."""
        return cls(f"unknown {what} {name!r}{allowed_names(name, sorted(allowed), _LISTED_BY.get(what, ''))}")


class SpaceError(LagomError):
    """Raised when a knob's value lies outside the space that the engine offers."""


class OutputError(LagomError):
    """Raised when an output folder exists already or cannot be written."""


class BundleError(LagomError):
    """Raised when a measurement bundle is damaged or was recorded for another job."""


class TraceError(LagomError):
    """Raised when a profiler file cannot be read or is damaged, or when the file is no profiler file."""


class DataError(LagomError):
    """Raised when a third-party dataset is absent, cannot be fetched, or is not what the manifest says."""


class TableError(LagomError):
    """Raised when a plug-in table is damaged, truncated or of another version."""


class MissingDependencyError(LagomError):
    """Raised when an optional package is needed; the message holds the pip line."""


class BackendError(LagomError):
    """Raised when the machine could not run the measurement at all; a `Failure` is one configuration that failed."""


class RankError(BackendError):
    """Raised when a rank process died or did not answer within its time."""


class WrongResultError(BackendError):
    """Raised when a collective returned wrong numbers under a configuration; nothing was timed."""


_KINDS: Final = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "array": "a list",
    "object": "a table",
}  # fmt: skip
_EXPECTED: Final = re.compile(r"Expected `([^`]*)`(.*?)(?:, got `[^`]*`)?$")


def first_line(error: BaseException) -> str:
    """What an error says first; its class, where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def in_words(complaint: str) -> str:
    """A decoder's "Expected ..." complaint in the words of TOML ("must be a whole number"); others unchanged."""
    match = _EXPECTED.match(complaint)
    if match is None:
        return complaint.replace("`", "")
    kinds = [_KINDS.get(kind, kind) for kind in match[1].split(" | ") if kind != "null"]
    rest = " without control characters" if "\\x00-" in match[2] else match[2].replace("`", "")  # toml_tables.Name
    return f"must be {' or '.join(kinds)}{rest}"
