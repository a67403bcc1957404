"""Where a run is written: the folder that the user names, or a fresh one below `lagom-runs/`."""

import logging
import os
import re
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from lagom_overlap.errors import OutputError
from lagom_overlap.record import (
    append_line,
    check_new_folder,
    check_own_folder,
    create_folder,
    make_folder,
    utc_now,
    write_private,
)
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.journal import Entry, entry_to_json

_log = logging.getLogger(__name__)

RUNS_FOLDER: Final = "lagom-runs"
"""Where a run is written when no folder is named, below the current one."""


def check_folder(out: Path | None) -> None:
    """Refuses early what `create_run_folder` would refuse later; creates nothing.

    Raises:
        OutputError: if the folder, or `lagom-runs`, could not be created.
    """
    runs = Path(RUNS_FOLDER)
    if out is not None:
        check_new_folder(out)
    elif os.path.lexists(runs):
        check_own_folder(runs)
    else:
        check_new_folder(runs)


def create_run_folder(out: Path | None, job_name: str) -> Path:
    """The new folder; without a name, one by job and time, numbered where another run took that name.

    Raises:
        OutputError: if it cannot be created.
    """
    if out is not None:
        create_folder(out)
        return out
    runs = Path(RUNS_FOLDER)
    if not os.path.lexists(runs):
        make_folder(runs)
    check_own_folder(runs)
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", job_name).strip(".-")[:80] or "job"
    stamp = utc_now().replace(":", "").replace("-", "")
    numbers = (f"-{number}" if number > 1 else "" for number in count(1))
    folder = next(path for number in numbers if not (path := runs / f"{safe}-{stamp}{number}").exists())
    create_folder(folder)
    return folder


@dataclass(slots=True)
class Journal:
    """The measurements of a run, on disk as soon as they are made; `failure` says why no longer, if so."""

    path: Path
    problems: Problems
    entries: list[Entry] = field(default_factory=list)
    failure: str = ""

    def start(self, header: str) -> None:
        """Writes the header line."""
        write_private(self.path, header.encode() + b"\n")

    def keep(self, entry: Entry) -> None:
        """Adds an entry, in memory, and on disk as long as it takes any: hours of measuring outlive a full one."""
        self.entries.append(entry)
        if self.failure:
            return
        try:
            append_line(self.path, entry_to_json(entry, self.problems))
        except OutputError as error:
            self.failure = str(error)
            _log.warning("measurements are no longer written: %s", error)
