"""Fitted constants of the overlap model as a file: JSON, `calibration.json`.

    {"format": "lagom-overlap-calibration", "version": 1, "note": "...", "channel_power": 0.8, "queueing": 1.5,
     "ways": [{"kind": "all_gather", "sliced": true, "work_s_per_byte": 7e-10, "work_s_per_slice": 5e-4,
               "wait_s_per_byte": 7e-10, "wait_s_per_slice": 3e-3}]}

`note` says in words what was measured, where and when.
"""

from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost.overlap_fit import OverlapConstants, Way, WayConstants
from lagom_overlap.errors import JobError
from lagom_overlap.record import read_regular

FILE_NAME: Final = "calibration.json"
_FORMAT: Final = "lagom-overlap-calibration"
_VERSION: Final = 1
"""Of the file's format; a file of another version is refused."""
_MAX_BYTES: Final = 1 << 20
"""Chosen: such a file has some KB."""


class _WayRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: CollectiveKind
    sliced: bool
    work_s_per_byte: float
    work_s_per_slice: float
    wait_s_per_byte: float
    wait_s_per_slice: float


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    note: str
    channel_power: float
    queueing: float
    ways: list[_WayRow]


def constants_to_json(constants: OverlapConstants, note: str) -> bytes:
    """The file's content."""
    ways = [
        _WayRow(way.kind, way.sliced, *(getattr(own, name) for name in WayConstants.__slots__))
        for way, own in sorted(constants.ways.items())
    ]
    file = _File(_FORMAT, _VERSION, note, constants.channel_power, constants.queueing, ways)
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def read_constants(path: Path) -> tuple[OverlapConstants, str]:
    """The constants of a file, and its note.

    Raises:
        JobError: if it cannot be read, or is no such file.
    """
    try:
        data = read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise JobError(f"calibration {str(path)!r} cannot be read: {error.strerror}") from None
    try:
        file = msgspec.json.decode(data, type=_File)
        if (file.format, file.version) != (_FORMAT, _VERSION):
            raise ValueError(f"format {file.format!r} version {file.version}, allowed: {_FORMAT!r} version {_VERSION}")
        ways = {
            Way(row.kind, row.sliced): WayConstants(**{name: getattr(row, name) for name in WayConstants.__slots__})
            for row in file.ways
        }
        constants = OverlapConstants(ways=ways, channel_power=file.channel_power, queueing=file.queueing)
    except (msgspec.MsgspecError, ValueError) as error:
        raise JobError(f"calibration {str(path)!r} is none: {error}") from None
    return constants, file.note
