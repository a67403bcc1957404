"""The measurements of a running job on disk, so that a restart goes on where the job ended, on whatever node.

The file is a measurement bundle (docs/formats.md): a header, then a line per measured setting with Y, every x_j, Z and
H; `lagom tune --backend recorded` replays it. It is made private, and a line is one write: a kill leaves whole lines
and at most one torn one at the end, which is dropped. A journal that cannot be written is given up with one warning:
the job goes on.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from lagom_overlap.errors import OutputError
from lagom_overlap.record import append_line, read_regular, write_private
from lagom_overlap.tuners.bundle import MAX_BUNDLE_BYTES

_log = logging.getLogger(__name__)


class JournalFile:
    """A rank's copy; without a path it keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> str:
        """The journal's text; empty if there is none or it cannot be read."""
        if self._path is None:
            return ""
        try:
            return read_regular(self._path, MAX_BUNDLE_BYTES, is_own=True).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            _log.warning("cannot read the journal %s: %s; starting a new one", self._path, error.strerror)
            return ""

    def write(self, lines: Sequence[str], *, is_new: bool) -> None:
        """Appends lines, or starts the file over with them."""
        if self._path is None:
            return
        try:
            if is_new:
                write_private(self._path, "".join(f"{line}\n" for line in lines).encode())
            else:
                for line in lines:
                    append_line(self._path, line)
        except OutputError as error:
            _log.warning("%s; tuning goes on without a journal", error)
            self._path = None


def whole_lines(text: str) -> list[str]:
    """The lines of a journal, without one that was torn at the end."""
    return text[: text.rfind("\n") + 1].splitlines()
