"""Events of a Chrome/Kineto JSON trace, decoded in bounded memory, as far as a damaged file goes.

A file is read in blocks. Each block is cut at a comma between two events and decoded as a list of typed events (msgspec
skips what no field names). A cut inside a string or a nested list cannot decode, because the brackets do not close, so
a wrong cut is noticed and an earlier one is tried. The end of the list is where msgspec finds "trailing characters".

Whoever reads may decode the usual block in a quicker way of its own (`usual_events.py`): each complete block is offered
as bytes first, and decoded here only if it is turned down.

Kineto writes times in microseconds with up to three decimals. A float64 holds them exactly below 2^53 ns (104 days);
Kineto since torch 2.4 counts from `baseTimeNanoseconds` and stays below. Files with decimals beyond are decoded again
with `Decimal`, slower and exact.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final

import msgspec

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.files import ByteStream
from lagom_overlap.trace.usual_events import CollectiveArgs
from lagom_overlap.units import KIB, MIB, format_bytes

NEARLY_US: Final = 0.9 * 2**53 / 1000
"""Microseconds below which a float64 holds nanoseconds exactly, with some room."""
_SAMPLE: Final = 16
"""One event of so many is looked at: a file has times of one kind."""
_BLOCK: Final = 256 * KIB
"""Bytes that are read at once."""
_MAX_HEADER: Final = 64 * MIB
"""What stands before the first event has some KB. Chosen: a larger one is no trace's."""
_MAX_BUFFER: Final = 64 * MIB
"""An event has some hundred bytes. Chosen: beyond it the file is damaged."""
_MAX_CUTS: Final = 24
"""Places before which a block is cut until what is left is whole JSON. Chosen, not measured."""
_MAX_REFUSED: Final = 8
"""Blocks turned down one after the other, after which none is offered any more."""
_EVENTS_KEY: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_SPACE: Final = b" \t\r\n"
_BAD_NUMBER: Final = re.compile(rb"([:\[,]\s*)-?(?:nan(?:\(ind\))?|inf(?:inity)?)(?=\s*[,}\]])", re.IGNORECASE)
_ESCAPE: Final = re.compile(
    rb'\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\'
)
"""A pair of surrogates, another escape, or a backslash that escapes nothing."""
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
"""Half a pair: what Python writes for a name that is no UTF-8."""
_EXTRA_COMMA: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|(?<=\[),|,(?=\s*[,\]}])', re.DOTALL)
"""A text, which is left alone, or a comma with nothing before or behind it."""
_CONTROLS_TO_SPACES: Final = bytes(max(byte, 0x20) for byte in range(256))
"""JSON allows control characters between values only, where a space is as good."""


class Args(CollectiveArgs, gc=False):
    """The arguments of an event that we read; types differ between tools, so they are checked where used."""

    correlation: Any = None
    device: Any = None
    stream: Any = None
    grid: Any = None
    block: Any = None
    wait_on_stream: Any = None
    wait_on_event: Any = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")
    external_id: Any = msgspec.field(default=None, name="External id")
    external_id_old: Any = msgspec.field(default=None, name="external id")


class TraceEvent(msgspec.Struct, gc=False):
    """One event of a trace."""

    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """One event with times to the last digit."""

    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = None
    tid: Any = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    args: Args | None = None


class Header(msgspec.Struct):
    """What stands next to the events."""

    device_properties: Any = msgspec.field(default=None, name="deviceProperties")
    distributed_info: Any = msgspec.field(default=None, name="distributedInfo")


class _Whole(Header):
    trace_events: list[TraceEvent] | None = msgspec.field(default=None, name="traceEvents")


_WHOLE: Final = msgspec.json.Decoder(_Whole)
_EVENTS: Final = msgspec.json.Decoder(list[TraceEvent])
_EVENT: Final = msgspec.json.Decoder(TraceEvent)
_ENTRIES: Final = msgspec.json.Decoder(list[msgspec.Raw])
_EXACT_EVENTS: Final = msgspec.json.Decoder(list[ExactEvent])
_HEADER: Final = msgspec.json.Decoder(Header)
_DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _byte_of(error: Exception) -> int | None:
    match = _BYTE.search(str(error))
    return int(match[1]) if match else None


def _escaped(found: re.Match[bytes]) -> bytes:
    if len(found[0]) == 1:
        return b"\\\\"
    return b"\\ufffd" if _SURROGATE.fullmatch(found[0]) else found[0]


def repaired(data: bytes) -> bytes:
    """The bytes with what profilers write and JSON forbids mended.

    That is nan, inf, lone backslashes, control characters in texts, commas with nothing behind them, broken UTF-8, half
    a pair of UTF-16.
    """
    data = data.translate(_CONTROLS_TO_SPACES)
    data = _BAD_NUMBER.sub(rb"\1null", data)
    data = _ESCAPE.sub(_escaped, data)
    data = _EXTRA_COMMA.sub(lambda found: found[0] if found[0] != b"," else b" ", data)
    return data.decode("utf-8", errors="replace").encode()


def _cut_before(data: bytes, end: int) -> int:
    """The last comma before `end` that may stand between two events; -1 where there is none."""
    while True:
        brace = data.rfind(b"{", 0, end)
        if brace < 0:
            return -1
        comma = brace - 1
        while comma >= 0 and data[comma] in _SPACE:
            comma -= 1
        before = comma - 1
        while before >= 0 and data[before] in _SPACE:
            before -= 1
        if before >= 0 and data[comma] == ord(",") and data[before] == ord("}"):
            return comma
        end = brace


def _is_event(entry: bytes) -> bool:
    try:
        _EVENT.decode(entry)
    except msgspec.ValidationError:
        return False
    return True


def _refuse(_: bytes) -> bool:
    """Takes no block."""
    return False


class EventReader:
    """The events of one file in blocks; `header`, `warnings` and `is_torn` are complete after the last one.

    `is_torn`: the file ends within an event, so that later ones are missing.
    """

    def __init__(self, stream: ByteStream, prefix: bytes = b"", block_bytes: int = _BLOCK) -> None:
        self.header = Header()
        self.warnings: list[str] = []
        self.is_torn = False
        self._stream = stream
        self._prefix = prefix
        self._block = block_bytes
        self._exact = False
        self._at = 0
        self._num_foreign = 0
        self._take: Callable[[bytes], bool] = _refuse
        self._num_refused = _MAX_REFUSED

    def blocks(self, take: Callable[[bytes], bool] = _refuse) -> Iterator[list[TraceEvent]]:
        """The events, block by block, but for those that `take` took: it is offered complete lists of events.

        Raises:
            TraceError: if this is not a trace or its JSON is broken, with the byte position.
        """
        self._take, self._num_refused = take, 0
        data = self._prefix
        if len(data) < self._block:
            data += self._stream.read(self._block - len(data))
        if len(data) < self._block and not self._stream.was_cut:
            try:
                whole = _WHOLE.decode(data)
            except _DECODE_ERRORS:
                pass
            else:
                if whole.trace_events is None:
                    raise self._no_events()
                if not self._wants_exact(whole.trace_events):
                    self.header = whole
                    yield whole.trace_events
                    return
        yield from self._in_blocks(data)

    def _no_events(self) -> TraceError:
        return TraceError(f'{self._stream.name}: is not a trace: no "traceEvents" in it')

    def _fail(self, why: str, at: int) -> TraceError:
        why = _BYTE.sub("", why.removeprefix("JSON is malformed: ")).strip()
        return TraceError(f"{self._stream.name}: broken JSON at byte {at}: {why}")

    def _no_event(self, error: msgspec.ValidationError) -> TraceError:
        """Of JSON that is right where what stands in it is no event; the path counts from where this block begins."""
        return TraceError(f"{self._stream.name}: not an event in the list from byte {self._at}: {error}")

    @staticmethod
    def _wants_exact(events: list[TraceEvent]) -> bool:
        """Whether any time may be beyond what floats hold; no clock jumps by days and back within a few events."""
        return any(type(e.ts) is float and abs(e.ts) >= NEARLY_US for e in events[::_SAMPLE])

    def _start(self, data: bytes) -> tuple[bytes, bytes]:
        """(what stands before the events as an open object, what follows the opening bracket)."""
        head = data.lstrip(b"\xef\xbb\xbf" + _SPACE)
        if head.startswith(b"["):
            self._at = len(data) - len(head) + 1
            return b"", head[1:]
        match = _EVENTS_KEY.search(data)
        while match is None:
            more = self._stream.read(max(self._block, len(data)))  # all of it is searched again
            if not more or len(data) > _MAX_HEADER or (head and not head.startswith(b"{")):
                raise self._no_events()
            data += more
            match = _EVENTS_KEY.search(data)
        self._at = match.end()
        return data[: match.end()].lstrip(b"\xef\xbb\xbf"), data[match.end() :]

    def _in_blocks(self, data: bytes) -> Iterator[list[TraceEvent]]:
        header, buffer = self._start(data)
        wanted = self._block
        while True:
            buffer += self._stream.read(max(0, wanted - len(buffer)))
            if len(buffer) < wanted:
                break
            decoded = self._decode_block(buffer)
            if decoded is None:
                wanted *= 2
                if wanted > _MAX_BUFFER:
                    raise TraceError(
                        f"{self._stream.name}: byte {self._at}: one event of more than {format_bytes(_MAX_BUFFER // 2)}"
                    )
                continue
            wanted = self._block
            events, rest, has_ended = decoded
            yield events
            if has_ended:
                self._finish(header, rest)
                return
            self._at += len(buffer) - len(rest)
            buffer = rest
        events, after = self._decode_last(buffer)
        yield events
        self._finish(header, after)

    def _exactly(self, data: bytes) -> list[TraceEvent]:
        """The events of a complete list, with exact times where floats are too coarse."""
        try:
            events = _EVENTS.decode(data)
        except msgspec.ValidationError:
            data = self._only_events(data)
            events = _EVENTS.decode(data)
        if self._exact or self._wants_exact(events):
            self._exact = True
            return _EXACT_EVENTS.decode(data)  # type: ignore[return-value]  # the same fields
        return events

    def _only_events(self, data: bytes) -> bytes:
        """The list without what is no event: null, numbers, texts, objects whose fields are something else."""
        entries = _ENTRIES.decode(data)
        events = [entry for entry in map(bytes, entries) if _is_event(entry)]
        self._num_foreign += len(entries) - len(events)
        return b"".join((b"[", b",".join(events), b"]"))

    def _decode_to_end(self, data: bytes) -> tuple[list[TraceEvent], bytes | None]:
        """(events, what follows the list) of bytes that start with the list; None where nothing follows."""
        try:
            return self._exactly(data), None
        except _DECODE_ERRORS as error:
            at = _byte_of(error)
            if "trailing characters" not in str(error) or at is None:
                raise
        end = len(data[: at - 1].rstrip(_SPACE))
        return self._exactly(data[:end]), data[end:]

    def _decode(self, data: bytes) -> tuple[list[TraceEvent], bytes | None]:
        """As `_decode_to_end`, numbers and text mended where JSON forbids them."""
        try:
            return self._decode_to_end(data)
        except _DECODE_ERRORS as error:
            mended = data if "truncated" in str(error) else repaired(data)
            if mended == data:
                raise
        events = self._decode_to_end(mended)
        self._warn_once(
            "characters that JSON forbids (nan, inf, lone backslashes, control characters, extra commas, broken UTF-8 "
            "or UTF-16) were replaced; no event is lost"
        )
        return events

    def _warn_once(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _decode_block(self, buffer: bytes) -> tuple[list[TraceEvent], bytes, bool] | None:
        """(events, what follows them, whether the list has ended); None where the buffer is too short for one event."""
        cut = len(buffer)
        for _ in range(_MAX_CUTS):
            cut = _cut_before(buffer, cut)
            if cut < 0:
                return None
            block = b"".join((b"[", memoryview(buffer)[:cut], b"]"))
            if self._is_taken(block):
                return [], buffer[cut + 1 :], False
            try:
                events, after = self._decode(block)
            except msgspec.ValidationError as error:
                raise self._no_event(error) from error
            except _DECODE_ERRORS as error:
                at = _byte_of(error)
                if at is not None and at < cut - 1:
                    raise self._fail(str(error), self._at + at - 1) from error
                continue
            if after is None:
                return events, buffer[cut + 1 :], False
            return events, after[:-1] + buffer[cut:], True
        raise self._fail("no event ends here", self._at)

    def _is_taken(self, block: bytes) -> bool:
        """Whether whoever reads has decoded a block in a way of their own."""
        if self._exact or self._num_refused >= _MAX_REFUSED:
            return False
        taken = self._take(block)
        self._num_refused = 0 if taken else self._num_refused + 1
        return taken

    def _decode_last(self, buffer: bytes) -> tuple[list[TraceEvent], bytes | None]:
        """(events, what follows the list) of what remains; None where the file ends inside the list."""
        try:
            events, after = self._decode(b"[" + buffer)
        except msgspec.ValidationError as error:
            raise self._no_event(error) from error
        except _DECODE_ERRORS as error:
            if "truncated" not in str(error):
                raise self._fail(str(error), self._at + (_byte_of(error) or 1) - 1) from error
        else:
            return events, after or b""
        self.warnings.append(
            f"file ends at byte {self._at + len(buffer)} inside the list of events; read as far as it goes"
        )
        closed = buffer.rstrip(_SPACE + b",")
        cut = len(closed)
        for _ in range(_MAX_CUTS):
            try:
                events = self._decode(b"[" + closed[:cut] + b"]")[0]
                self.is_torn = self._stream.was_cut or cut < len(closed)
                return events, None
            except _DECODE_ERRORS:
                cut = _cut_before(buffer, cut)
                if cut < 0:
                    break
        self.is_torn = True
        return [], None

    def _finish(self, header: bytes, trailer: bytes | None) -> None:
        """Reads what stands around the events."""
        if self._num_foreign:
            self.warnings.append(f"{self._num_foreign} entries of the list are no events, and left out")
        if not header:
            return
        data = header + (b"]}" if trailer is None else b"]" + trailer + self._stream.read(_MAX_HEADER))
        try:
            self.header = _HEADER.decode(data)
        except _DECODE_ERRORS:
            try:
                self.header = _HEADER.decode(repaired(data))
            except _DECODE_ERRORS as error:
                if self._stream.was_cut or "truncated" in str(error):
                    with suppress(*_DECODE_ERRORS):
                        self.header = _HEADER.decode(header + b"]}")
                self._warn_once(f"what stands around the events could not be read: {error}")
