"""The worker engine's connections: one TCP connection for each channel and pair of ranks, on one machine.

The lower rank of a pair listens, the higher one connects and says which channel it is and a token that came through the
store, so that a stranger on the port is turned away.
"""

import hmac
import secrets
import socket
import struct
from typing import Final

from lagom_overlap.engines.gloo_group import Store
from lagom_overlap.errors import BackendError

CONNECT_TIMEOUT_S: Final = 60.0
_HELLO: Final = struct.Struct("<16sII")
_MAX_STRANGERS: Final = 64


class WorkersMesh:
    """Connected sockets by channel, then peer; the place of this rank itself holds None."""

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
