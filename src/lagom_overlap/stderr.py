"""Writes our lines to stderr, which may be closed, full, or replaced by the job; none of that raises."""

import contextlib
import os
import sys


def write_lines(*lines: str) -> None:
    """Writes each line with its newline; a line that cannot be written is lost, what would steer a terminal escaped.

    Python's own stderr is written without its buffer: Python flushes a buffered line again when the process ends, and
    if that fails it exits with 120 in place of the job's own exit code.
    """
    stream, own = sys.stderr, sys.__stderr__
    if stream is None:  # closed by whoever started us
        return
    text = "".join(f"{_visible(line)}\n" for line in lines)
    with contextlib.suppress(Exception):  # a stream of the job's own may raise anything
        if own is not None and stream is own:
            own.flush()
            left = text.encode(own.encoding, own.errors or "backslashreplace")
            while left:
                left = left[os.write(own.fileno(), left) :]
        else:
            stream.write(text)
            stream.flush()


def _visible(line: str) -> str:
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
