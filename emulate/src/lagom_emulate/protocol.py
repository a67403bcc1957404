"""The wire between a process on emulated GPUs and its coordinator: fixed little-endian records on a unix stream socket.

`csrc/emulated_gpu/protocol.h` has the same layout; a test holds both equal. Every record begins with its type and its
length in bytes, header included. What is read here comes from a training job, so nothing of it is trusted: lengths are
bounded, texts are decoded into typed structs (`description.py`), and whatever does not fit raises `ProtocolError`.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from lagom_overlap.errors import LagomError

VERSION: Final = 1
MAX_JSON_BYTES: Final = 1 << 16
"""A description is at most this long; the client's own limit is lower."""
MAX_REFUSAL_BYTES: Final = 400

HEADER: Final = struct.Struct("<II")
_DESCRIBE: Final = struct.Struct("<II")
_COMPLETED: Final = struct.Struct("<IIQIIQ")
_ENDED: Final = struct.Struct("<QQQ")
_REFUSED: Final = struct.Struct("<III")


class RecordType(IntEnum):
    """What a record is."""

    HELLO = 1
    DESCRIBE = 2
    OP = 3
    WAIT = 4
    QUERY = 5
    HOST = 6
    COMPLETED = 16
    REFUSED = 17


class ProtocolError(LagomError):
    """Raised when a client sends what the protocol does not allow; its message goes back in a REFUSED."""


class Hello(NamedTuple):
    """A process says which GPU it begins with; `host` counts machines from 0."""

    version: int
    device: int
    pid: int
    host: int


class Describe(NamedTuple):
    """A kind of operation, once."""

    desc_id: int
    text: bytes


class Op(NamedTuple):
    """One operation on a stream; `after_op` must have ended before it starts (0: none)."""

    op_id: int
    device: int
    stream: int
    desc_id: int
    priority: int
    issue_ns: int
    after_op: int
    instance: int


class Wait(NamedTuple):
    """The host waits for an operation; `thread` 0 is the device's own helper, during which the host goes on."""

    op_id: int
    host_ns: int
    thread: int


class Query(NamedTuple):
    """Whether an operation has ended at `host_ns`; without `advances` the asker's clock stands still."""

    op_id: int
    host_ns: int
    advances: int
    pad: int


class Host(NamedTuple):
    """Where the host's clock is; `state` 1: the process has finished."""

    host_ns: int
    state: int
    pad: int


Record = Hello | Describe | Op | Wait | Query | Host

_FIXED: Final[dict[int, tuple[struct.Struct, type[Hello | Op | Wait | Query | Host]]]] = {
    RecordType.HELLO: (struct.Struct("<IIII"), Hello),
    RecordType.OP: (struct.Struct("<QIIIiQQQ"), Op),
    RecordType.WAIT: (struct.Struct("<QQQ"), Wait),
    RecordType.QUERY: (struct.Struct("<QQII"), Query),
    RecordType.HOST: (struct.Struct("<QII"), Host),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """When one operation ran."""

    op_id: int
    start_ns: int
    end_ns: int


class RecordDecoder:
    """Records out of bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Record]:
        """The records that are complete now.

        Raises:
            ProtocolError: if a record has an unknown type or a length that its type does not allow.
        """
        self._buffer += data
        at, end = 0, len(self._buffer)
        try:
            while end - at >= HEADER.size:
                kind, num_bytes = HEADER.unpack_from(self._buffer, at)
                _check_length(kind, num_bytes)
                if end - at < num_bytes:
                    break
                yield self._record(kind, at + HEADER.size, num_bytes - HEADER.size)
                at += num_bytes
        finally:
            del self._buffer[:at]

    def _record(self, kind: int, at: int, num_bytes: int) -> Record:
        fixed = _FIXED.get(kind)
        if fixed is not None:
            return fixed[1]._make(fixed[0].unpack_from(self._buffer, at))
        desc_id, json_bytes = _DESCRIBE.unpack_from(self._buffer, at)
        if json_bytes != num_bytes - _DESCRIBE.size:
            raise ProtocolError(f"a description says {json_bytes} bytes of text in a record of {num_bytes}")
        begin = at + _DESCRIBE.size
        return Describe(desc_id, bytes(self._buffer[begin : begin + json_bytes]))


def _check_length(kind: int, num_bytes: int) -> None:
    fixed = _FIXED.get(kind)
    if fixed is not None:
        allowed = HEADER.size + fixed[0].size
        if num_bytes != allowed:
            raise ProtocolError(f"a record of type {kind} has {num_bytes} bytes, must have {allowed}")
    elif kind != RecordType.DESCRIBE:
        raise ProtocolError(f"unknown record type {kind}")
    elif not 0 <= num_bytes - HEADER.size - _DESCRIBE.size <= MAX_JSON_BYTES:
        raise ProtocolError(f"a description of {num_bytes} bytes; at most {MAX_JSON_BYTES} are allowed")


def encode(record: Record) -> bytes:
    """A client's record as bytes: what our own clients in Python send."""
    if isinstance(record, Describe):
        body = _DESCRIBE.pack(record.desc_id, len(record.text)) + record.text
        return HEADER.pack(RecordType.DESCRIBE, HEADER.size + len(body)) + body
    kind = next(kind for kind, (_, struct_type) in _FIXED.items() if struct_type is type(record))
    layout = _FIXED[kind][0]
    return HEADER.pack(kind, HEADER.size + layout.size) + layout.pack(*record)


def completed(op_id: int, *, is_done: bool, now_ns: int, ended: Iterable[Ended] = ()) -> bytes:
    """The reply to a WAIT or QUERY, with what else has ended since the last one."""
    rows = [_ENDED.pack(one.op_id, one.start_ns, one.end_ns) for one in ended]
    size = _COMPLETED.size + len(rows) * _ENDED.size
    return _COMPLETED.pack(RecordType.COMPLETED, size, op_id, is_done, len(rows), now_ns) + b"".join(rows)


def refused(text: str) -> bytes:
    """The reply that ends a client's part: one line, cut to what a client prints."""
    line = " ".join(text.split()).encode("utf-8", "replace")[:MAX_REFUSAL_BYTES]
    return _REFUSED.pack(RecordType.REFUSED, _REFUSED.size + len(line), len(line)) + line


@dataclass(frozen=True, slots=True)
class Completed:
    """A COMPLETED as a client reads it."""

    op_id: int
    is_done: bool
    now_ns: int
    ended: tuple[Ended, ...]


def decode_reply(data: bytes) -> tuple[Completed | str | None, int]:
    """The first reply in these bytes and its length; None and 0 where it is not whole yet. A text is a refusal."""
    if len(data) < HEADER.size:
        return None, 0
    kind, num_bytes = HEADER.unpack_from(data)
    if len(data) < num_bytes:
        return None, 0
    if kind == RecordType.REFUSED:
        return data[_REFUSED.size : num_bytes].decode("utf-8", "replace"), num_bytes
    _, _, op_id, is_done, num_ended, now_ns = _COMPLETED.unpack_from(data)
    rows = (_ENDED.unpack_from(data, _COMPLETED.size + i * _ENDED.size) for i in range(num_ended))
    return Completed(op_id, bool(is_done), now_ns, tuple(Ended(*row) for row in rows)), num_bytes
