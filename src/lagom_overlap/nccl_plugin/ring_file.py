"""The rings that the plug-ins write (`csrc/lagom_ring.h`): whole, or piece by piece while a process writes on.

A header, then entries of one size, overwritten from the oldest on. The first word of an entry is its number in the
order of writing, plus one; 0 while it is being written.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.errors import TableError
from lagom_overlap.nccl_plugin.table_layout import RING_HEADER

_START: Final = RING_HEADER.itemsize


@dataclass(frozen=True, slots=True)
class RingFormat:
    """One kind of ring: `name` is what messages call it."""

    name: str
    magic: int
    version: int
    entry: np.dtype[np.void]


@dataclass(frozen=True, slots=True)
class RingEntries:
    """Entries in the order of writing; `num_lost` older ones were overwritten before they were read."""

    entries: NDArray[np.void]
    num_lost: int


class RingFile:
    """A ring that is being written; each entry is taken once."""

    def __init__(self, path: Path, layout: RingFormat) -> None:
        """Maps the file.

        Raises:
            TableError: if it is not a ring of this kind, or not a regular file of this user: another user could
                truncate it, and the next look would end this process.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise TableError(f"cannot read the {layout.name} {path}: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
                raise TableError(f"{path}: not a regular file of this user")
            num_entries = _checked(path, file.read(_START), status.st_size, layout)
            self._header = np.memmap(file, RING_HEADER, "r", 0, (1,))
            self._ring = np.memmap(file, layout.entry, "r", _START, (num_entries,))
        self._num_seen = 0

    @property
    def num_written(self) -> int:
        """Entries so far, those that were overwritten among them."""
        return int(self._header[0]["num_written"])

    @property
    def num_dropped(self) -> int:
        """What was never written, for want of room in the plug-in."""
        return int(self._header[0]["num_dropped"])

    @property
    def num_late(self) -> int:
        """Events that came after their entry was written."""
        return int(self._header[0]["num_late"])

    def take(self) -> RingEntries:
        """The entries since the last call, up to the first that is still being written."""
        num_written, size = self.num_written, len(self._ring)
        numbers = np.arange(max(self._num_seen, num_written - size), num_written)
        places = numbers % size
        entries = self._ring[places]  # a copy
        after = self._ring["sequence"][places]  # an entry that changed under the copy has another number now
        under_way = np.flatnonzero(after.astype(np.int64) < numbers + 1)
        end = int(under_way[0]) if len(under_way) else len(numbers)
        numbers, entries, after = numbers[:end], entries[:end], after[:end]
        whole = entries[(entries["sequence"] == numbers + 1) & (after == numbers + 1)]
        last = int(numbers[-1]) + 1 if end else max(self._num_seen, num_written - size)
        num_lost = last - self._num_seen - len(whole)
        self._num_seen = last
        return RingEntries(whole, num_lost)


def read_ring(path: Path, layout: RingFormat) -> RingEntries:
    """What a ring holds, also while a process writes it: entries under way are left out.

    Raises:
        TableError: if the file cannot be read or is not a ring of this kind.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TableError(f"cannot read the {layout.name} {path}: {error.strerror}") from error
    num_entries = _checked(path, data, len(data), layout)
    ring = np.frombuffer(data, layout.entry, num_entries, _START)
    written = ring[ring["sequence"] > 0]
    written = written[np.argsort(written["sequence"], kind="stable")]
    num_written = int(np.frombuffer(data, RING_HEADER, 1)[0]["num_written"])
    return RingEntries(written, max(0, num_written - len(written)))


def _checked(path: Path, data: bytes, num_bytes: int, layout: RingFormat) -> int:
    """How many entries the ring has."""
    if len(data) < _START:
        raise TableError(f"{path}: {len(data)} bytes are too few for a {layout.name}")
    header = np.frombuffer(data, RING_HEADER, 1)[0]
    if header["magic"] != layout.magic or header["version"] != layout.version:
        raise TableError(f"{path}: not a {layout.name} of version {layout.version}")
    num_entries = int(header["num_entries"])
    if header["entry_bytes"] != layout.entry.itemsize or num_bytes != _START + num_entries * layout.entry.itemsize:
        raise TableError(f"{path}: {num_bytes} bytes do not hold {num_entries} entries")
    return num_entries
