"""A coordinator for one process whose operations take the time that the test says, written from the protocol alone."""

import json
import socket
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

HEADER = struct.Struct("<II")
HELLO = struct.Struct("<IIII")
DESCRIBE = struct.Struct("<II")
OP = struct.Struct("<QIIIiQQQ")
WAIT = struct.Struct("<QQQ")
QUERY = struct.Struct("<QQII")
HOST = struct.Struct("<QII")
COMPLETED = struct.Struct("<IIQIIQ")
ENDED = struct.Struct("<QQQ")


@dataclass
class Coordinator:
    """Streams run in order, every operation but an event takes `op_ns`; nothing contends."""

    path: Path
    op_ns: int = 7000
    refuse_at_op: int = 0
    mark_at_op: int = 0
    hello: tuple[int, ...] = ()
    descriptions: dict[int, dict[str, object]] = field(default_factory=dict)
    ops: list[tuple[int, ...]] = field(default_factory=list)
    waits: list[tuple[int, ...]] = field(default_factory=list)
    queries: list[tuple[int, ...]] = field(default_factory=list)
    hosts: list[tuple[int, ...]] = field(default_factory=list)
    times: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def mark(self) -> Path:
        """A file that is made when operation `mark_at_op` arrives."""
        return self.path.with_suffix(".mark")

    def __enter__(self) -> "Coordinator":
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        self._told: set[int] = set()
        self._stream_end: dict[tuple[int, int], int] = {}
        with connection, connection.makefile("rb") as stream:
            while len(head := stream.read(HEADER.size)) == HEADER.size:
                kind, total = HEADER.unpack(head)
                if not self._handle(connection, kind, stream.read(total - HEADER.size)):
                    return

    def _handle(self, connection: socket.socket, kind: int, body: bytes) -> bool:
        if kind == 1:
            self.hello = HELLO.unpack(body)
        elif kind == 2:
            number, size = DESCRIBE.unpack_from(body)
            assert number not in self.descriptions
            self.descriptions[number] = json.loads(body[8 : 8 + size])
        elif kind == 3:
            op = OP.unpack(body)
            self.ops.append(op)
            self._run(op)
            if op[0] == self.mark_at_op:
                self.mark.touch()
            if op[0] == self.refuse_at_op:
                text = b"rank 1 died"
                connection.sendall(struct.pack("<III", 17, 12 + len(text), len(text)) + text)
                return False
        elif kind == 4:
            wait = WAIT.unpack(body)
            self.waits.append(wait)
            self._complete(connection, wait[0], True, max(wait[1], self.times[wait[0]][1]))
        elif kind == 5:
            query = QUERY.unpack(body)
            self.queries.append(query)
            self._complete(connection, query[0], self.times[query[0]][1] <= query[1], query[1])
        elif kind == 6:
            self.hosts.append(HOST.unpack(body))
        return True

    def _run(self, op: tuple[int, ...]) -> None:
        op_id, device, stream, desc_id, _, issue_ns, after, _ = op
        start = max(issue_ns, self._stream_end.get((device, stream), 0), self.times.get(after, (0, 0))[1])
        is_instant = desc_id == 0 or "event" in self.descriptions[desc_id]
        self.times[op_id] = (start, start + (0 if is_instant else self.op_ns))
        self._stream_end[device, stream] = self.times[op_id][1]

    def _complete(self, connection: socket.socket, op_id: int, is_done: bool, now_ns: int) -> None:
        ended = [i for i, (_, end) in self.times.items() if end <= now_ns and i not in self._told]
        self._told.update(ended)
        size = COMPLETED.size + len(ended) * ENDED.size
        rows = b"".join(ENDED.pack(i, *self.times[i]) for i in ended)
        connection.sendall(COMPLETED.pack(16, size, op_id, is_done, len(ended), now_ns) + rows)
