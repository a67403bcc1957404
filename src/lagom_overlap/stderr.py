"""Lines of ours on stderr, which may be closed, full, or replaced by the job: none of that is an error of anybody's."""

import contextlib
import os
import sys


def write_lines(*lines: str) -> None:
    """Writes each line with its newline; what cannot be written is lost, because nobody is left to tell.

    Python's own stderr is written past its buffer: a line that stays there is tried again as the process ends, and
    where that fails the process exits with 120, whatever the job's own exit code is.
    """
    stream, own = sys.stderr, sys.__stderr__
    if stream is None:  # closed by whoever started us
        return
    text = "".join(f"{line}\n" for line in lines)
    with contextlib.suppress(Exception):  # a stream of the job's own may raise anything
        if own is not None and stream is own:
            own.flush()
            left = text.encode(own.encoding, own.errors or "backslashreplace")
            while left:
                left = left[os.write(own.fileno(), left) :]
        else:
            stream.write(text)
            stream.flush()
