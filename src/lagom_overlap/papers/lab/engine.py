"""Collectives on worker threads of our own: an instrument on which channels and chunks cost what the paper says.

On gloo a larger slice is better for computation and communication alike. Here, as on a GPU, more channels speed the
collective and slow the computation, because each is a thread that wants the core; and so does a larger chunk. The
engine exists to study tuners under genuine contention on a machine without a GPU. It is no product path: torch's gloo
is faster, and nothing here is deployed.

More than two ranks: an all-reduce and a reduce-scatter sum in ring order, which depends on the part, never on the
configuration; so results do not change with the knobs.

liblagom_workers.so, spoken to through ctypes; calls release the interpreter lock while they wait.
"""

import ctypes
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind, ConfigKey, ConfigSpace, ConfigTable, Protocol
from lagom_overlap.engines.base import Buffers, Handle
from lagom_overlap.engines.cpu_limits import ELEMENT_BYTES
from lagom_overlap.engines.gloo_group import Store
from lagom_overlap.errors import BackendError
from lagom_overlap.nccl_plugin.library import load_library
from lagom_overlap.papers.lab.space import CHANNELS, DEFAULT, PROTOCOLS, check_config, effective, workers_space

CONNECT_TIMEOUT_S: Final = 60.0
"""Chosen: ranks of one machine meet within it."""
_HELLO: Final = struct.Struct("<16sII")
_MAX_STRANGERS: Final = 64
"""Connections without the token until something else is at work on the port."""


class WorkersMesh:
    """Connected sockets by channel, then peer; the place of this rank itself holds None.

    The lower rank of a pair listens, the higher one connects and says which channel it is and a token that came through
    the store, so that a stranger on the port is turned away.
    """

    def __init__(self, store: Store, *, rank: int, num_ranks: int, num_channels: int, host: str) -> None:
        self.sockets: list[list[socket.socket | None]] = [[None] * num_ranks for _ in range(num_channels)]
        try:
            self._meet(store, rank, num_ranks, host)
        except BaseException:
            self.close()
            raise

    def numbers(self) -> list[list[int]]:
        """File descriptors by channel, then peer; -1 for this rank itself."""
        return [[-1 if peer is None else peer.fileno() for peer in channel] for channel in self.sockets]

    def close(self) -> None:
        """Closes every connection."""
        for channel in self.sockets:
            for peer in channel:
                if peer is not None:
                    peer.close()

    def _meet(self, store: Store, rank: int, num_ranks: int, host: str) -> None:
        with socket.create_server((host, 0), backlog=len(self.sockets) * num_ranks) as listener:
            listener.settimeout(CONNECT_TIMEOUT_S)
            token = secrets.token_bytes(16)
            store.set(f"workers/{rank}", f"{listener.getsockname()[1]} {token.hex()}")
            for peer in range(rank):
                self._connect(store, rank, peer, host)
            self._accept(listener, token, range(rank + 1, num_ranks))

    def _connect(self, store: Store, rank: int, peer: int, host: str) -> None:
        port, token = store.get(f"workers/{peer}").decode("ascii").split()
        for channel in range(len(self.sockets)):
            connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
            self.sockets[channel][peer] = _prepared(connection)
            connection.sendall(_HELLO.pack(bytes.fromhex(token), channel, rank))

    def _accept(self, listener: socket.socket, token: bytes, expected: range) -> None:
        missing, strangers = len(self.sockets) * len(expected), 0
        while missing:
            connection, _ = listener.accept()
            connection.settimeout(CONNECT_TIMEOUT_S)
            greeting, channel, peer = _HELLO.unpack(_received(connection, _HELLO.size))
            known = hmac.compare_digest(greeting, token) and peer in expected and channel < len(self.sockets)
            if known and self.sockets[channel][peer] is None:
                self.sockets[channel][peer] = _prepared(connection)
                missing -= 1
                continue
            connection.close()
            strangers += 1
            if strangers > _MAX_STRANGERS:
                raise BackendError(f"{strangers} connections that are no rank's came to the workers' port: give up")


def _prepared(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            return data.ljust(num_bytes, b"\0")  # a stranger that hung up: its token will not fit
        data += more
    return data


LIBRARY_NAME: Final = "liblagom_workers.so"
VERSION: Final = 1
"""LW_VERSION of csrc: a library of another version is refused."""
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
        MissingDependencyError: if the library is not built, or of another version.
        BackendError: if it cannot start its threads.
    """

    def __init__(self, *, rank: int, num_ranks: int, sockets: Sequence[Sequence[int]]) -> None:
        library = load_library(LIBRARY_NAME, "lw", VERSION, ctypes.CDLL)
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


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A collective that the threads are moving; keeps its memory alive."""

    library: WorkersLibrary
    number: int
    buffers: Buffers

    def wait(self) -> None:
        """Returns when this rank's target is complete.

        Raises:
            RuntimeError: if a connection broke; torch raises the same when gloo loses a rank.
        """
        error = self.library.wait(self.number)
        if error:
            raise RuntimeError(f"a worker lost its connection: {os.strerror(abs(error))}")


@dataclass(slots=True)
class WorkersEngine:
    """Implements `Engine`; every rank must be on this machine."""

    mesh: WorkersMesh
    library: WorkersLibrary
    _table: ConfigTable = field(default_factory=lambda: ConfigTable({}))
    _epoch: int = -1

    def space(self, collective: Collective) -> ConfigSpace:
        """See `Engine`."""
        return workers_space(collective)

    def apply(self, table: ConfigTable, epoch: int) -> None:
        """See `Engine`."""
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} is not after {self._epoch}, the one in force")
        for _, config in table:
            check_config(config)
        self._table, self._epoch = table, epoch

    def execute(self, key: ConfigKey, buffers: Buffers) -> Handle:
        """See `Engine`; an untouched call runs under `workers_space.DEFAULT`."""
        config = effective(self._table.get(key) or DEFAULT)
        assert config.num_channels is not None, "filled"
        assert config.chunk_bytes is not None, "filled"
        number = self.library.start(
            key.kind,
            buffers.source.data_ptr(),
            buffers.target.data_ptr(),
            num_elements=key.num_bytes // ELEMENT_BYTES,
            num_channels=config.num_channels,
            chunk_elements=config.chunk_bytes // ELEMENT_BYTES,
            wait_mode=PROTOCOLS.index(config.protocol or Protocol.LL128),
        )
        return _InFlight(self.library, number, buffers)

    def close(self) -> None:
        """Ends the threads, then the connections."""
        self.library.close()
        self.mesh.close()


def open_workers(store: Store, *, rank: int, num_ranks: int, host: str) -> WorkersEngine:
    """Meets the other ranks and starts the threads. Collective: every rank calls it.

    Raises:
        MissingDependencyError: if the library is not built.
        BackendError: if threads or connections are refused.
    """
    mesh = WorkersMesh(store, rank=rank, num_ranks=num_ranks, num_channels=CHANNELS[-1], host=host)
    try:
        library = WorkersLibrary(rank=rank, num_ranks=num_ranks, sockets=mesh.numbers())
    except BaseException:
        mesh.close()
        raise
    return WorkersEngine(mesh, library)
