"""The coordinator behind a socket: every process of the job is one connection, one thread serves all of them.

Nothing here can hang: a process that dies ends its part, one that sleeps outside of CUDA holds nobody, and where no
process moves any more each wait is refused with a line that names who waits for what. The socket lies in a folder that
only its owner can enter; whose process speaks is what the kernel says (SO_PEERCRED).
"""

import contextlib
import os
import select
import selectors
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final

from lagom_emulate.coordinator import Coordinator, Reply
from lagom_emulate.prices import CostModelPrices
from lagom_emulate.processes import Activity, JobWork, launch_queues_of, local_world_size_of, rank_of
from lagom_emulate.protocol import (
    VERSION,
    Describe,
    Hello,
    Host,
    Op,
    ProtocolError,
    Query,
    Record,
    RecordDecoder,
    Wait,
    completed,
    refused,
)
from lagom_emulate.recorder import Recorder
from lagom_overlap.errors import JobError, LagomError

IDLE_S: Final = 0.05
"""A host that has said nothing for so long, all its threads asleep, holds nobody any more."""
WATCHED_S: Final = 0.3
"""The same where nobody but a watchdog asks: a host may be about to go on, or wait for it at the job's end."""
PROGRESS_S: Final = 10.0
_POLL_S: Final = 0.02
_CHUNK_BYTES: Final = 1 << 20
_MAX_PROCESSES: Final = 1024
_PEER: Final = struct.Struct("iII")


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    pid: int
    decoder: RecordDecoder = field(default_factory=RecordDecoder)
    out: bytearray = field(default_factory=bytearray)
    rank: int | None = None
    activity: Activity | None = None
    heard_s: float = 0.0
    is_closing: bool = False

    @property
    def has_unread(self) -> bool:
        """Whether something has come that nobody has read: it spoke while we were busy, or had no processor."""
        waiting = select.poll()  # `select.select` refuses descriptors from 1024 on
        waiting.register(self.socket, select.POLLIN)
        return bool(waiting.poll(0))


class EmulationServer:
    """Serves the processes of one job.

    Args:
        path: where the socket is made.
        is_running: whether the job's command still runs.
        say: takes lines of progress.
        stall_s: seconds without any record and any event after which the waits are refused.
        is_symmetric: whether ranks of the job are not started, so that others may wait for them without asking us.
    """

    def __init__(
        self,
        path: Path,
        coordinator: Coordinator,
        prices: CostModelPrices,
        recorder: Recorder,
        *,
        is_running: Callable[[], bool],
        say: Callable[[str], None],
        stall_s: float,
        is_symmetric: bool = False,
    ) -> None:
        self.num_processes = 0
        self.refusals: list[str] = []
        self._coordinator, self._prices, self._recorder = coordinator, prices, recorder
        self._is_running, self._say, self._stall_s = is_running, say, stall_s
        self._connections: dict[int, _Connection] = {}
        self._by_rank: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
        except OSError:
            self.close()
            raise
        path.chmod(0o600)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._heard_s = self._said_s = self._began_s = self._moved_s = self._looked_s = monotonic()
        self._work = JobWork(os.getpid())
        self._num_events, self._searched = 0, (0, self._heard_s)
        self._world_size, self._has_begun = 1, False
        self._is_symmetric = is_symmetric
        self._ending: str | None = None
        self._still_s = self._began_s

    def serve(self) -> None:
        """Until the job's command has ended and all its processes have gone.

        Raises:
            JobError: if the job needs a rank that is not started.
        """
        while self._is_running() or self._connections:
            for key, events in self._selector.select(_POLL_S):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                connection = self._connections[key.fd]
                if events & selectors.EVENT_WRITE:
                    self._send(connection)
                if events & selectors.EVENT_READ and key.fd in self._connections:
                    self._receive(connection)
            now_s = monotonic()
            if self._have_begun(now_s):
                self._answer(self._coordinator.advance())
                if now_s - self._looked_s >= IDLE_S:
                    self._looked_s = now_s
                    self._look_for_sleepers(now_s)
            self._tell_progress(now_s)
            if self._is_symmetric:
                self._end_where_nobody_comes(now_s)
            if self._ending is not None:
                raise JobError(self._ending)

    def close(self) -> None:
        """Closes the socket and every connection; safe to call twice."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def __enter__(self) -> "EmulationServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _have_begun(self, now_s: float) -> bool:
        """Whether all ranks have come, so that they begin together; one that waits for another's GPU cannot come."""
        if not self._has_begun and self.num_processes:
            self._has_begun = self.num_processes >= self._world_size or not self._work.is_busy(now_s)
        return self._has_begun

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            accepted, _ = self._listener.accept()
            if len(self._connections) >= _MAX_PROCESSES:
                accepted.close()
                return
            accepted.setblocking(False)
            pid, _, _ = _PEER.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            self._connections[accepted.fileno()] = _Connection(accepted, pid)
            self._selector.register(accepted, selectors.EVENT_READ)

    def _receive(self, connection: _Connection) -> None:
        """Takes the records that have come."""
        try:
            data = connection.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        if connection.is_closing:
            return
        try:
            for record in connection.decoder.feed(data):
                self._take(connection, record)
        except LagomError as error:
            self._refuse(connection, str(error))

    def _take(self, connection: _Connection, record: Record) -> None:
        rank = connection.rank
        if not isinstance(record, Query) or record.advances:  # a watchdog asks whether anybody lives or not
            self._heard_s = connection.heard_s = monotonic()
        if isinstance(record, Hello):
            self._greet(connection, record)
            return
        if rank is None:
            raise ProtocolError("the first record must be a HELLO")
        match record:
            case Op():
                self._coordinator.submit(rank, record)
            case Wait():
                self._coordinator.wait(rank, record)
            case Query():
                self._coordinator.query(rank, record)
            case Describe():
                self._coordinator.describe(rank, record.desc_id, record.text)
                priced = self._prices.priced(record.text)
                self._recorder.describe(rank, record.desc_id, priced)
                self._ending = self._ending or priced.description.refused
            case Host():
                self._coordinator.host(rank, record)

    def _greet(self, connection: _Connection, hello: Hello) -> None:
        if connection.rank is not None:
            raise ProtocolError("a second HELLO")
        if self._is_symmetric and local_world_size_of(connection.pid) is None:
            self._ending = "--symmetric: the command starts a process without RANK and LOCAL_WORLD_SIZE; use torchrun"
        if hello.version != VERSION:
            raise ProtocolError(f"the client speaks version {hello.version}, the coordinator version {VERSION}")
        rank, world_size = rank_of(connection.pid)
        self._world_size = max(self._world_size, world_size)
        if rank is None or rank in self._by_rank:
            rank = next(n for n in range(_MAX_PROCESSES * 2) if n not in self._by_rank)
        connection.rank, connection.activity = rank, Activity(connection.pid)
        self._by_rank[rank] = connection
        self.num_processes += 1
        self._coordinator.hello(rank, hello.host, launch_queues_of(connection.pid))

    def _answer(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            connection = self._by_rank.get(reply.process)
            if connection is None or connection.is_closing:
                continue
            connection.out += completed(reply.op_id, is_done=reply.is_done, now_ns=reply.now_ns, ended=reply.ended)
            self._send(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            sent = connection.socket.send(connection.out)
            del connection.out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
        self._selector.modify(connection.socket, wanted)

    def _refuse(self, connection: _Connection, text: str) -> None:
        """Says why, and hears no more of the process."""
        self.refusals.append(f"rank {connection.rank}: {text}" if connection.rank is not None else text)
        self._tell_to_close(connection, text)

    def _tell_to_close(self, connection: _Connection, text: str) -> None:
        connection.is_closing = True
        connection.out += refused(text)
        if connection.rank is not None:
            self._coordinator.leave(connection.rank)
        self._send(connection)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        rank = connection.rank
        if rank is not None and not connection.is_closing and self._coordinator.leave(rank):
            self._say(f"rank {rank} (process {connection.pid}) has gone before it had finished")

    def _look_for_sleepers(self, now_s: float) -> None:
        """Lets time pass without hosts that sleep; refuses all waits where nobody moves any more."""
        is_awake = False
        silence_s = IDLE_S if self._coordinator.is_asked else WATCHED_S
        for rank in self._coordinator.silent():
            if self._is_silent(self._by_rank[rank], now_s, silence_s):
                self._coordinator.sleep(rank)
            else:
                is_awake = True
        num_events = self._coordinator.clock.num_events
        if num_events == self._num_events and (num_events, self._heard_s) != self._searched:
            self._searched = num_events, self._heard_s
            if circle := self._coordinator.describe_circle():
                self._refuse_all(circle)
        if is_awake or num_events != self._num_events or not self._coordinator.is_asked or self._work.is_busy(now_s):
            self._num_events, self._moved_s = num_events, now_s
        elif now_s - max(self._heard_s, self._moved_s) >= self._stall_s:
            self._refuse_all(f"nobody has moved for {self._stall_s:.0f} s: {self._coordinator.describe_waits()}")

    @staticmethod
    def _is_silent(connection: _Connection, now_s: float, at_least_s: float) -> bool:
        """Whether a process has said nothing for so long, and has slept.

        One that asks us again and again sleeps whenever we look, and takes less than a tick of the kernel between.
        """
        has_slept = connection.activity is not None and connection.activity.has_slept(now_s, at_least_s)
        return has_slept and now_s - connection.heard_s >= at_least_s and not connection.has_unread

    def _refuse_all(self, text: str) -> None:
        """Says the same to every process; once in the result."""
        self.refusals.append(text)
        for connection in list(self._connections.values()):
            if not connection.is_closing:
                self._tell_to_close(connection, text)

    def _end_where_nobody_comes(self, now_s: float) -> None:
        """Ranks that wait on a store or a socket for one that is not started never ask us."""
        if self._coordinator.is_asked or self._work.is_busy(now_s):
            self._still_s = now_s
        elif now_s - max(self._heard_s, self._still_s) >= self._stall_s:
            self._ending = (
                f"--symmetric: nothing has moved for {self._stall_s:.0f} s: the job waits outside of its GPUs, as for "
                "ranks that are not started (a store, a socket)"
            )

    def _tell_progress(self, now_s: float) -> None:
        if now_s - self._said_s < PROGRESS_S:
            return
        self._said_s = now_s
        parts = [f"{now_s - self._began_s:.0f} s", f"{self.num_processes} ranks", f"{self._recorder.num_steps} steps"]
        parts.append(
            f"{self._recorder.num_operations} operations, {self._coordinator.clock.now_ns / 1e6:.1f} ms virtual"
        )
        waits = self._coordinator.describe_waits()
        if waits and now_s - self._heard_s >= PROGRESS_S:
            parts.append(waits)
        self._say(", ".join(parts))
