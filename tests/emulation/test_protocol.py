"""The records in Python and in C are the same, and nothing that a client sends is trusted."""

import re
import struct
from pathlib import Path

import pytest

from lagom_emulate import protocol
from lagom_emulate.protocol import (
    Describe,
    Ended,
    Hello,
    Host,
    Op,
    ProtocolError,
    Query,
    RecordDecoder,
    RecordType,
    Wait,
    completed,
    decode_reply,
    encode,
    refused,
)

HEADER = Path(__file__).parents[2] / "emulate" / "csrc" / "protocol.h"
CODES = {"uint32_t": "I", "int32_t": "i", "uint64_t": "Q"}
FIELD_NAMES = {"after_op": "after_event_op", "host": "pad"}
RECORDS = [
    Hello(1, 3, 4711, 0),
    Describe(1, b'{"memset": 4}'),
    Op(1, 3, 7, 1, -5, 123, 0, 9),
    Wait(1, 500, 4712),
    Query(1, 600, 1, 0),
    Host(700, 1, 0),
]


def c_layouts() -> dict[str, tuple[str, list[str]]]:
    """struct format and field names of every record in the C header."""
    found = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} protocol_(\w+);", HEADER.read_text(), re.DOTALL):
        code, names = "<", []
        for kind, words in re.findall(r"^\s*(\w+) ([\w, ]+);", body, re.MULTILINE):
            fields = [word.strip() for word in words.split(",")]
            code += "II" if kind == "protocol_header" else CODES[kind] * len(fields)
            names += [] if kind == "protocol_header" else fields
        found[name] = code, names
    return found


@pytest.mark.parametrize("record", [record for record in RECORDS if not isinstance(record, Describe)])
def test_a_record_has_the_layout_of_the_c_header(record: protocol.Record) -> None:
    code, names = c_layouts()[type(record).__name__.lower()]
    data = encode(record)
    assert struct.calcsize(code) == len(data)
    kind, size, *values = struct.unpack(code, data)
    assert (RecordType(kind).name.lower(), size) == (type(record).__name__.lower(), len(data))
    assert tuple(values) == tuple(record)
    assert names == [FIELD_NAMES.get(name, name) for name in record._fields]


def test_types_and_version_are_those_of_the_c_header() -> None:
    text = HEADER.read_text()
    assert int(re.search(r"PROTOCOL_VERSION (\d+)", text)[1]) == protocol.VERSION
    found = {name: int(value) for name, value in re.findall(r"PROTOCOL_(\w+) = (\d+)", text) if "HOST_" not in name}
    assert found == {kind.name: kind.value for kind in RecordType}


def test_replies_have_the_layout_of_the_c_header() -> None:
    layouts = c_layouts()
    data = completed(5, is_done=True, now_ns=10, ended=[Ended(4, 1, 2), Ended(5, 2, 3)])
    code, ended_code = layouts["completed"][0], layouts["ended"][0]
    assert len(data) == struct.calcsize(code) + 2 * struct.calcsize(ended_code)
    assert struct.unpack_from(code, data) == (RecordType.COMPLETED, len(data), 5, 1, 2, 10)
    assert struct.unpack_from(ended_code, data, struct.calcsize(code)) == (4, 1, 2)
    line = refused("no\nmore")
    assert struct.unpack_from(layouts["refused"][0], line) == (RecordType.REFUSED, len(line), 7)
    assert decode_reply(line) == ("no more", len(line))


def test_records_are_read_however_the_bytes_are_cut() -> None:
    data = b"".join(encode(record) for record in RECORDS)
    for size in (1, 5, 24, len(data)):
        decoder, found = RecordDecoder(), []
        for at in range(0, len(data), size):
            found += decoder.feed(data[at : at + size])
        assert found == RECORDS


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<II", 99, 16),
        struct.pack("<II", RecordType.OP, 8),
        struct.pack("<II", RecordType.OP, 1 << 31),
        struct.pack("<II", RecordType.DESCRIBE, 1 << 30),
        struct.pack("<II", RecordType.DESCRIBE, 3),
        struct.pack("<IIII", RecordType.DESCRIBE, 16, 1, 500),
    ],
)
def test_a_record_that_cannot_be_is_refused_before_its_bytes_are_awaited(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(RecordDecoder().feed(data))


def test_a_refusal_is_one_bounded_line() -> None:
    text, size = decode_reply(refused("x" * 10_000 + "\n" + "y"))
    assert text == "x" * protocol.MAX_REFUSAL_BYTES
    assert size == len(refused("x" * 10_000))
