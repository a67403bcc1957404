"""What NCCL says of its calls in NVTX ranges, as Nsight Systems exports it: communicator, bytes, ranks.

NCCL names its payload's fields in nvtx_payload_schemas.h ("NCCL communicator ID", "Message size [bytes]", "No. of
ranks", "Rank"). Nsight writes a payload as JSON (`jsonText`) or as bytes (`binaryData`): a header of four 64-bit
numbers (domain, schema, size of the payload, start of the payload), then the fields at the offsets that
NVTX_PAYLOAD_SCHEMA_ENTRIES gives; the upper halves of the first two may hold flags.
"""

import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

_HEADER: Final = struct.Struct("<IIIIQQ")
_COMMUNICATOR: Final = "NCCL communicator ID"
_BYTES: Final = "Message size [bytes]"
_NUM_RANKS: Final = "No. of ranks"
_RANK: Final = "Rank"
_FIELDS: Final = frozenset({_COMMUNICATOR, _BYTES, _NUM_RANKS, _RANK})
_FOUR_BYTES: Final = frozenset({5, 6, 15, 16})
"""Types INT, UINT, INT32 and UINT32 of nvToolsExtPayload.h; the other numbers of NCCL's payloads have eight."""
_MAX_DEPTH: Final = 8
"""Ranges around a launch that are looked at, the innermost first. Bounds the computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRange:
    """A call of NCCL on the CPU: when, its name, its communicator ("" where unknown), bytes that one rank gives."""

    start_ns: int
    end_ns: int
    name: str
    communicator: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    name: str
    offset: int
    num_bytes: int


@dataclass(slots=True)
class NcclRanges:
    """NCCL's ranges by thread, and what communicators are known of: (ranks, own rank) by process and communicator."""

    layouts: dict[int, list[_Entry]] = field(default_factory=lambda: defaultdict(list))
    threads: dict[int, list[NcclRange]] = field(default_factory=lambda: defaultdict(list))
    groups: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)

    def take_layouts(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Rows of NVTX_PAYLOAD_SCHEMA_ENTRIES: schema, type, name, offset (None: 0)."""
        for schema, kind, name, offset in rows:
            if type(schema) is int and name in _FIELDS and (offset is None or type(offset) is int):
                size = 4 if kind in _FOUR_BYTES else 8
                self.layouts[schema].append(_Entry(name=name, offset=max(0, offset or 0), num_bytes=size))

    def take(self, thread: int, process: int, interval: tuple[int, int], name: str, texts: tuple[Any, Any]) -> None:
        """A range named like a call of NCCL, with its payload as JSON and as bytes, either of which may be absent."""
        fields = _fields_of_json(texts[0]) or self._fields_of_bytes(texts[1])
        number = fields.get(_COMMUNICATOR)
        communicator = "" if number is None else f"comm {number:x}"
        if communicator and _NUM_RANKS in fields:
            self.groups[process, communicator] = (fields[_NUM_RANKS], fields.get(_RANK, -1))
        self.threads[thread].append(
            NcclRange(
                start_ns=interval[0],
                end_ns=interval[1],
                name=name,
                communicator=communicator,
                num_bytes=fields.get(_BYTES, 0),
            )
        )

    def _fields_of_bytes(self, data: Any) -> dict[str, int]:
        if type(data) is str:
            try:
                data = bytes.fromhex(data.removeprefix("0x"))
            except ValueError:
                return {}
        if type(data) is not bytes or len(data) < _HEADER.size:
            return {}
        payload = data[_HEADER.size :]
        return {
            entry.name: int.from_bytes(payload[entry.offset : entry.offset + entry.num_bytes], "little")
            for entry in self.layouts.get(_HEADER.unpack_from(data)[2], ())
            if entry.offset + entry.num_bytes <= len(payload)
        }

    def sort(self) -> None:
        """Puts the ranges in order of start; `around` needs it."""
        for ranges in self.threads.values():
            ranges.sort(key=lambda held: (held.start_ns, -held.end_ns))

    def around(self, thread: int, at_ns: int) -> NcclRange | None:
        """The innermost range around a time on a thread."""
        ranges = self.threads.get(thread, [])
        last = bisect_right(ranges, at_ns, key=lambda nccl_range: nccl_range.start_ns)
        return next(
            (
                nccl_range
                for nccl_range in reversed(ranges[max(0, last - _MAX_DEPTH) : last])
                if at_ns <= nccl_range.end_ns
            ),
            None,
        )

    def rank_of(self, process: int) -> tuple[int, int] | None:
        """(rank, number of ranks) of a process in its largest communicator."""
        known = [group for (owner, _), group in self.groups.items() if owner == process and group[1] >= 0]
        if not known:
            return None
        num_ranks, rank = max(known)
        return rank, num_ranks


def _fields_of_json(text: Any) -> dict[str, int]:
    """The numbers that a payload's JSON gives NCCL's fields, however deep they stand."""
    if type(text) is not str or _COMMUNICATOR not in text:
        return {}
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    fields: dict[str, int] = {}
    left = [decoded]
    while left:
        part = left.pop()
        if type(part) is list:
            left.extend(part)
        elif type(part) is dict:
            left.extend(part.values())
            fields |= {name: number for name in _FIELDS if (number := _number(part.get(name))) is not None}
    return fields


def _number(value: Any) -> int | None:
    if type(value) is str:
        try:
            value = int(value, 0)
        except ValueError:
            return None
    return value if type(value) is int and 0 <= value < 2**64 else None
