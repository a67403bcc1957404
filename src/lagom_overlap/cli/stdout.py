"""Text to stdout, and nothing if nobody listens."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Final, TextIO

from lagom_overlap.errors import OutputError

REPLACED: Final = "\ufffd"
_CONTROLS: Final = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - set(map(ord, "\n\t")), REPLACED)


def visible(text: str) -> str:
    """A text out of somebody's file, for a terminal: what would steer it is made visible."""
    return text.translate(_CONTROLS)


def named(path: Path, what: str) -> str:
    """A line that says where a file is: a folder's name may hold what ends a line."""
    return f"{what}: {visible(str(path)).replace(chr(10), REPLACED)}"


def say(text: str) -> None:
    """Writes text and a newline to stdout; a reader that has gone away, such as `head`, is no error.

    Raises:
        OutputError: if stdout cannot be written for another reason, such as a full disk.
    """
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.write(_encodable(text) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        forget(sys.stdout)
    except OSError as error:
        forget(sys.stdout)
        raise OutputError(f"cannot write the result to stdout: {error.strerror}") from None


def forget(stream: TextIO) -> None:
    """Points a stream that cannot be written at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def encoding() -> str:
    """Stdout's."""
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _encodable(text: str) -> str:
    """The text with whatever stdout's encoding lacks escaped as in JSON."""
    try:
        text.encode(encoding())
    except UnicodeEncodeError:
        return "".join(map(_escaped, text))
    return text


def _escaped(char: str) -> str:
    try:
        char.encode(encoding())
    except UnicodeEncodeError:
        import json  # noqa: PLC0415 - for the rare terminal that is not UTF-8

        return json.dumps(char)[1:-1]
    return char
