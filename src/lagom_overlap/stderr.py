"""Lines of ours on stderr, which may be closed, full, or replaced by the job: none of that is an error of anybody's."""

import contextlib
import sys


def write_lines(*lines: str) -> None:
    """Writes each line with its newline; what cannot be written is lost, because nobody is left to tell."""
    if sys.stderr is None:  # closed by whoever started us
        return
    with contextlib.suppress(Exception):  # a stream of the job's own may raise anything
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
