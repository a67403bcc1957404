"""liblagom_workers.so, spoken to through ctypes; calls release the interpreter lock while they wait."""

import ctypes
from collections.abc import Sequence
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import BackendError
from lagom_overlap.plugin.library import installed_library

LIBRARY_NAME: Final = "liblagom_workers.so"
VERSION: Final = 1
KINDS: Final = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)
"""In the order of the library's numbers."""


class WorkersLibrary:
    """One rank's worker threads; `sockets` are by channel, then by peer (this rank's own place is ignored).

    Raises:
        MissingDependencyError: if the library is not built.
        BackendError: if it is of another version or cannot start its threads.
    """

    def __init__(self, *, rank: int, num_ranks: int, sockets: Sequence[Sequence[int]]) -> None:
        library = ctypes.CDLL(str(installed_library(LIBRARY_NAME)))
        version = library.lw_version()
        if version != VERSION:
            raise BackendError(f"{LIBRARY_NAME} is version {version}, this package needs {VERSION}: install it again")
        library.lw_open.restype = ctypes.c_void_p
        library.lw_open.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
        library.lw_close.argtypes = [ctypes.c_void_p]
        library.lw_close.restype = None
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        library.lw_start.argtypes = [*(pointer, ctypes.c_int, pointer, pointer, size, ctypes.c_int, size, ctypes.c_int)]
        library.lw_wait.argtypes = [pointer, ctypes.c_int]
        flat = [number for channel in sockets for number in channel]
        self._library = library
        self._engine = library.lw_open(rank, num_ranks, len(sockets), (ctypes.c_int * len(flat))(*flat))
        if not self._engine:
            raise BackendError(f"rank {rank}: the system refused {len(sockets)} worker threads")

    def start(
        self,
        kind: CollectiveKind,
        source: int,
        target: int,
        *,
        num_elements: int,
        num_channels: int,
        chunk_elements: int,
        wait_mode: int,
    ) -> int:
        """Starts a collective on fp32 memory at these addresses; the number to give to `wait`.

        Raises:
            BackendError: if the library refuses it (an argument out of range, too many in flight).
        """
        number = self._library.lw_start(
            *(self._engine, KINDS.index(kind), source, target, num_elements, num_channels, chunk_elements, wait_mode)
        )
        if number < 0:
            raise BackendError(f"{LIBRARY_NAME} refused {kind} of {num_elements} elements: error {-number}")
        return int(number)

    def wait(self, number: int) -> int:
        """Returns when the collective has ended: 0, or the errno of what broke."""
        return int(self._library.lw_wait(self._engine, number))

    def close(self) -> None:
        """Ends the threads; safe to call twice."""
        engine, self._engine = self._engine, None
        if engine:
            self._library.lw_close(engine)
