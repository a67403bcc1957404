"""The rings that the plug-ins write (`csrc/lagom_ring.h`): whole, or piece by piece while a process writes on.

A header, then entries of one size, overwritten from the oldest on. The first word of an entry is its number in the
order of writing, plus one; 0 while it is being written. Neither end maps the file: one that is truncated under a
mapping ends the process (SIGBUS). The plug-in keeps a ring in memory and writes it to the file now and then; who reads
the ring of its own process has that done before each look.
"""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.errors import TableError
from lagom_overlap.nccl_plugin.table_layout import RING_HEADER
from lagom_overlap.record import open_regular

_START: Final = RING_HEADER.itemsize


Log = TypeVar("Log")


@dataclass(frozen=True, slots=True)
class RingFormat(Generic[Log]):
    """One kind of ring: `name` is what messages call it, `log_of` decodes its entries.

    That is given them in the order of writing, and how many older ones were overwritten before they were read; what it
    raises (IndexError, ValueError) says that one is damaged.
    """

    name: str
    magic: int
    version: int
    entry: np.dtype[np.void]
    log_of: Callable[[NDArray[np.void], int], Log]

    def decoded(self, path: Path, entries: NDArray[np.void], num_lost: int) -> Log:
        """The entries as a log.

        Raises:
            TableError: if one is damaged.
        """
        try:
            return self.log_of(entries, num_lost)
        except (IndexError, ValueError) as error:
            raise TableError(f"{path}: an entry is damaged: {error}") from error


class RingFile(Generic[Log]):
    """A ring that is being written, read piece by piece: each entry is taken once."""

    def __init__(self, path: Path, layout: RingFormat[Log], flush: Callable[[], None]) -> None:
        """Opens the file; `flush` writes to it what is not there yet, if this is the process whose ring it is.

        Raises:
            TableError: if it is not a ring of this kind, or not a regular file of this user.
        """
        try:
            file = open_regular(path, is_own=True)
        except OSError as error:
            raise TableError(f"cannot read the {layout.name} {path}: {error.strerror}") from error
        self._path, self._layout, self._descriptor, self._flush = path, layout, file.fileno(), flush
        weakref.finalize(self, file.close)
        size = os.fstat(self._descriptor).st_size
        self._num_entries = _checked(path, os.pread(self._descriptor, _START, 0), size, layout)
        self._num_seen = 0

    @property
    def process_id(self) -> int:
        """The process that made the ring."""
        return int(self._header()["process_id"])

    @property
    def num_written(self) -> int:
        """Entries so far, those that were overwritten among them."""
        return int(self._header()["num_written"])

    @property
    def num_dropped(self) -> int:
        """What was never written, for want of room in the plug-in."""
        return int(self._header()["num_dropped"])

    @property
    def num_late(self) -> int:
        """Events that came after their entry was written."""
        return int(self._header()["num_late"])

    @property
    def num_open(self) -> int:
        """What has begun and is not written yet; where it is 0, `take` has all."""
        return int(self._header()["num_open"])

    def take(self) -> Log:
        """The entries since the last call, up to the first that is still being written.

        Raises:
            TableError: if an entry is damaged, or the file was truncated or begun anew meanwhile.
        """
        num_written, size = self.num_written, self._num_entries
        if num_written < self._num_seen:
            raise TableError(f"{self._path}: the {self._layout.name} was begun anew by another process")
        first = max(self._num_seen, num_written - size)
        numbers = np.arange(first, num_written)
        entries = self._entries(first, num_written)
        after = self._entries(first, num_written)["sequence"]  # one that changed under the copy has another number now
        oldest = np.minimum(entries["sequence"].astype(np.int64), after.astype(np.int64))
        under_way = np.flatnonzero(oldest < numbers + 1)
        end = int(under_way[0]) if len(under_way) else len(numbers)
        numbers, entries, after = numbers[:end], entries[:end], after[:end]
        whole = entries[(entries["sequence"] == numbers + 1) & (after == numbers + 1)]
        last = int(numbers[-1]) + 1 if end else first
        num_lost = last - self._num_seen - len(whole)
        self._num_seen = last
        return self._layout.decoded(self._path, whole, num_lost)

    def _header(self) -> np.void:
        self._flush()
        header: np.void = np.frombuffer(self._read(0, _START), RING_HEADER)[0]
        return header

    def _entries(self, first: int, end: int) -> NDArray[np.void]:
        """Entries number `first` to `end`, at most a round of the ring, which may go over its edge."""
        size, each = self._num_entries, self._layout.entry.itemsize
        start = first % size
        until_edge = min(end - first, size - start)
        data = self._read(_START + start * each, until_edge * each)
        data += self._read(_START, (end - first - until_edge) * each)
        return np.frombuffer(data, self._layout.entry)

    def _read(self, start: int, num_bytes: int) -> bytes:
        data = os.pread(self._descriptor, num_bytes, start)
        if len(data) < num_bytes:
            raise TableError(f"{self._path}: the {self._layout.name} was truncated while it was in use")
        return data


def read_ring(path: Path, layout: RingFormat[Log]) -> Log:
    """What a ring holds, also while a process writes it: entries under way are left out.

    Raises:
        TableError: if the file cannot be read or is not a ring of this kind.
    """
    try:
        with open_regular(path) as file:
            data, size = file.read(_START), os.fstat(file.fileno()).st_size
            num_entries = _checked(path, data, size, layout)
            data += file.read(size - _START)
    except OSError as error:
        raise TableError(f"cannot read the {layout.name} {path}: {error.strerror}") from error
    if len(data) < size:
        raise TableError(f"{path}: the {layout.name} was truncated while it was read")
    ring = np.frombuffer(data, layout.entry, num_entries, _START)
    written = ring[ring["sequence"] > 0]
    written = written[np.argsort(written["sequence"], kind="stable")]
    num_written = int(np.frombuffer(data, RING_HEADER, 1)[0]["num_written"])
    return layout.decoded(path, written, max(0, num_written - len(written)))


def _checked(path: Path, data: bytes, num_bytes: int, layout: RingFormat[Log]) -> int:
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
