"""The events of a job for programs: a file of JSON lines, and a file of Prometheus text.

Each rank has its own pair of files, so writers never share one. A file that cannot be written is reported once and then
left alone: a full disk must not end the job.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from lagom_overlap.errors import OutputError
from lagom_overlap.record import append_line, utc_now, write_private

_log = logging.getLogger(__name__)

RANK_VARIABLE: Final = "LAGOM_RANK"
"""PROCESS:RANK of a process whose rank is known from its process group only, not from a launcher's variable."""
Value: TypeAlias = str | int | float | bool | None
HELP: Final[Mapping[str, str]] = {
    "lagom_steps": "Training steps seen since the job began.",
    "lagom_step_seconds": "Length of the last step in seconds, on this rank.",
    "lagom_state": "1 for the state that tuning is in.",
    "lagom_settings": "Call sites that are set to something.",
    "lagom_priority": "Lagom's metric H: computation lost per communication gained; the least climbs next.",
    "lagom_communication_seconds": "Time of collectives per sampled step, by kind.",
    "lagom_reachable_ratio": "Share of the communication time that a knob reaches.",
}
"""Every metric that may be written, and what it is; all are gauges."""


class JsonLines:
    """A file of events: each line an object with `time` (UTC), `rank`, `event` and the event's own fields."""

    def __init__(self, path: Path, *, rank: int) -> None:
        self._path: Path | None = path
        self._rank = rank

    def write(self, event: str, **fields: Value) -> None:
        """Adds an event."""
        if self._path is None:
            return
        line = msgspec.json.encode({"time": utc_now(), "rank": self._rank, "event": event, **fields})
        try:
            append_line(self._path, line.decode())
        except OutputError as error:
            _log.warning("events are no longer written: %s", error)
            self._path = None


class PrometheusFile:
    """The last value of each gauge in Prometheus' text format, for a textfile collector; replaced whole."""

    def __init__(self, path: Path, *, rank: int) -> None:
        self._path: Path | None = path
        self._rank = rank
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge; it is on disk after `flush`.

        Raises:
            ValueError: if there is no such metric.
        """
        if name not in HELP:
            raise ValueError(f"no metric {name!r}; known: {', '.join(HELP)}")
        self._values.setdefault(name, {})[tuple(sorted(labels.items()))] = value

    def forget(self, name: str) -> None:
        """Drops all values of a gauge."""
        self._values.pop(name, None)

    def flush(self) -> None:
        """Writes the file."""
        if self._path is None:
            return
        try:
            write_private(self._path, self.text().encode())
        except OutputError as error:
            _log.warning("metrics are no longer written: %s", error)
            self._path = None

    def text(self) -> str:
        """The file's text."""
        lines = []
        for name, rows in self._values.items():
            lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge"]
            for labels, value in rows.items():
                pairs = [("rank", str(self._rank)), *labels]
                words = ",".join(f'{key}="{_escaped(text)}"' for key, text in pairs)
                lines.append(f"{name}{{{words}}} {value!r}")
        return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank as the plug-in reads it: `RANK_VARIABLE`, else the launcher's variables, else 0."""
    process, _, noted = environment.get(RANK_VARIABLE, "").partition(":")
    if noted.isdecimal() and process == str(os.getpid()):
        return int(noted)
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if (text := environment.get(name, "")).isdecimal():
            return int(text)
    return 0
