import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_traces import KinetoFile

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.chrome_reader import EventReader
from lagom_overlap.trace.files import DEFAULT_LIMITS, ByteStream


def reader_of(data: bytes, block: int = 4096) -> EventReader:
    return EventReader(ByteStream(io.BytesIO(data), "t.json", None, DEFAULT_LIMITS), block_bytes=block)


def names(data: bytes, block: int = 4096) -> list[str]:
    return [event.name for events in reader_of(data, block).blocks() for event in events]


NASTY = ['},{"ph":"X"', "]}", '"', "\\", "a\nb", "}, {", "[{}]", "é", "},\n    {", "\ud7ff"]


@given(
    st.lists(st.sampled_from(NASTY) | st.text(max_size=12), min_size=0, max_size=40),
    st.integers(16, 900),
    st.sampled_from([None, 1, 4]),
)
def test_any_block_size_gives_the_events_that_json_gives(texts, block, indent):
    events = [
        {"name": text, "ph": "X", "ts": n, "args": {"name": text, "list": [{"a": 1}, {"b": text}]}}
        for n, text in enumerate(texts)
    ]
    file = {"schemaVersion": 1, "traceEvents": events, "distributedInfo": 5, "other": [{"x": 1}, {"y": [{}]}]}
    data = json.dumps(file, indent=indent).encode()
    reader = reader_of(data, block)
    assert [event.name for part in reader.blocks() for event in part] == texts
    assert reader.header.distributed_info == 5
    assert reader.warnings == []


@given(st.integers(0, 1500), st.integers(16, 900))
def test_a_file_cut_anywhere_gives_the_events_that_are_whole(cut, block):
    file = KinetoFile()
    for n in range(8):
        file.kernel(f"k{n}", n * 10, 5, launch=None)
    data = file.to_json()[:cut]
    whole = [f"k{n}" for n in range(8) if cut >= data.find(b'"k%d"' % n) >= 0 and _is_whole(file.to_json(), cut, n)]
    try:
        reader = reader_of(data, block)
        found = [event.name for part in reader.blocks() for event in part]
    except TraceError:
        assert not whole
        return
    assert found == whole
    if cut < len(file.to_json()):
        assert reader.warnings


def _is_whole(data: bytes, cut: int, number: int) -> bool:
    begin = data.index(b'"k%d"' % number)
    after = data.find(b'"ph"', begin)
    end = data.rfind(b"}", 0, after) if after >= 0 else data.index(b"]}", data.index(b'"block"', begin)) + 3
    closing = data.index(b"}}", begin) + 2
    return cut >= min(closing, end + 1) and cut >= closing


def test_an_array_without_its_closing_bracket_is_a_trace():
    reader = reader_of(b'[{"name": "a", "ph": "X"}, {"name": "b", "ph": "X"},\n')
    assert [event.name for part in reader.blocks() for event in part] == ["a", "b"]
    assert "inside the list" in reader.warnings[0]


@pytest.mark.parametrize("block", [64, 1 << 20])
def test_broken_json_in_the_middle_names_the_byte(block):
    good = b'{"name": "a", "ph": "X", "ts": 1}'
    data = b'{"traceEvents": [' + good + b', {"name": oops}, ' + b", ".join([good] * 50) + b"]}"
    with pytest.raises(TraceError, match=rf"broken JSON at byte {data.index(b'oops')}"):
        names(data, block)


@pytest.mark.parametrize("bad", ["null", "7", '{"ph": "X", "args": "text"}'])
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_an_entry_that_is_no_event_is_left_out_and_counted(bad, block):
    good = '{"name": "a", "ph": "X", "ts": 1}'
    data = f'{{"traceEvents": [{good}, {bad}, {", ".join([good] * 50)}]}}'.encode()
    reader = reader_of(data, block)
    assert [event.name for part in reader.blocks() for event in part] == ["a"] * 51
    assert reader.warnings == ["1 entries of the list are no events, and left out"]


@pytest.mark.parametrize("bad", [b"nan", b"-nan", b"inf", b"-Infinity", b"NaN"])
def test_numbers_that_json_forbids_are_read_as_absent(bad):
    data = b'{"traceEvents": [{"name": "a", "args": {"x": ' + bad + b', "y": 1}}, {"name": "b is ' + bad + b'"}]}'
    reader = reader_of(data)
    assert [event.name for part in reader.blocks() for event in part] == ["a", f"b is {bad.decode()}"]
    assert reader.warnings


def test_broken_utf8_and_lone_backslashes_do_not_stop_the_reading():
    assert names(b'{"traceEvents": [{"name": "a\xff"}, {"name": "C:\\Users\\\\x\\users"}]}') == [
        "a\ufffd",
        "C:\\Users\\x\\users",
    ]


def test_half_a_pair_of_utf16_is_replaced_and_a_whole_pair_stays():
    # Python's json.dump writes the first for a name that was no UTF-8, read with surrogateescape.
    trace = rb'{"traceEvents": [{"name": "a\udc80b"}, {"name": "\ud83d\ude00 \ud83d"}, {"name": "\\ud800"}]}'
    assert names(trace) == ["a\ufffdb", "\U0001f600 \ufffd", "\\ud800"]


DIRT = {
    "control characters in a text": (b'"k2"', b'"k2\x01\x0b\n\t"'),
    "a comma before the closing bracket": (b"}]", b"},\n]"),
    "two commas": (b'}, {"ph"', b'},, {"ph"'),
    "a comma after the last argument": (b'"block": [256, 1, 1]}', b'"block": [256, 1, 1],}'),
    "a comma after the opening bracket": (b'"traceEvents": [', b'"traceEvents": [,'),
}


@pytest.mark.parametrize("what", DIRT)
@pytest.mark.parametrize("block", [64, 300, 1 << 20])
def test_what_writers_leave_in_by_mistake_costs_no_event(what, block):
    file = KinetoFile()
    for n in range(6):
        file.kernel(f"k{n}", n * 10, 5, launch=None)
    clean = json.dumps({**file.top, "traceEvents": file.events, "last": {"a": 1}}).encode()
    was, becomes = DIRT[what]
    dirty = clean.replace(was, becomes)
    assert dirty != clean
    reader = reader_of(dirty, block)
    found = [event.name.strip() for part in reader.blocks() for event in part]
    assert found == [f"k{n}" for n in range(6)]
    assert len(reader.warnings) == 1
    assert "no event is lost" in reader.warnings[0]


def test_commas_inside_texts_stay_where_another_one_is_mended():
    data = b'[{"name": "f<a,]b,}>", "ph": "X"}, {"name": "g\\",]", "ph": "X"},]'
    assert names(data) == ["f<a,]b,}>", 'g",]']


def test_what_has_no_events_is_no_trace():
    with pytest.raises(TraceError, match='no "traceEvents"'):
        names(b'{"a": 1}')


def test_an_event_larger_than_a_block_is_read_whole():
    text = "x" * 5000
    assert names(json.dumps({"traceEvents": [{"name": text}, {"name": "b"}]}).encode(), 64) == [text, "b"]


def test_lists_nested_beyond_reason_are_refused():
    data = b'{"traceEvents": [{"name": "a", "args": {"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}}]}"
    with pytest.raises(TraceError):
        names(data)
