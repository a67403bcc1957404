"""Trace files as byte streams: plain, gzip, tar or zip, of bounded size, as far as they go.

Nothing is trusted: a compressed file may hold a thousand times its size, end in the middle, or be no trace at all. A
stream counts what it gives out and refuses to go on past `Limits`; a truncated gzip file ends early and says so.
Archives are read where they lie: no name in one becomes a path.
"""

import io
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol
from zipfile import BadZipFile, ZipFile

from lagom_overlap.errors import TraceError
from lagom_overlap.record import open_regular
from lagom_overlap.trace.gpu_trace import short_name
from lagom_overlap.units import GIB, KIB, MIB, format_bytes

EXAMPLE: Final = Path(__file__).with_name("example_trace.json.gz")
"""A made-up trace that comes with the package (benchmarks/make_example_trace.py)."""
_GZIP_MAGIC: Final = b"\x1f\x8b"
_SQLITE_MAGIC: Final = b"SQLite format 3\x00"
_GZIP_BITS: Final = 31
"""zlib's largest window (15), and 16 for gzip's header."""
_PACKED_BLOCK: Final = 64 * KIB
"""Packed bytes that are read at once."""
_TAR_MAGIC_AT: Final = 257
"""Where POSIX puts "ustar" in a header."""
_PEEK: Final = 512
"""The first block of a tar file, which tells what a file is."""
_ZIP_MAGIC: Final = b"PK\x03\x04"
_ZIP_ENCRYPTED: Final = 1
"""The first of the flags that zip keeps of a file."""
_MAX_FOLDERS: Final = 1000
"""Folders that are looked into for where the traces may be."""
_MEMBER_SUFFIXES: Final = (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".log")
_TRACE_SUFFIXES: Final = (*_MEMBER_SUFFIXES, ".tar.gz", ".tgz", ".tar", ".zip", ".sqlite")
PICKLE_MAGIC: Final = b"\x80"
"""What the flight recorder writes unless told otherwise; read by an unpickler that runs nothing."""
_DUMP_NAME: Final = re.compile(r"rank_?\d{1,8}$")
"""How PyTorch names the flight recorder's dumps: `nccl_trace_rank_3`."""
_FOREIGN: Final = {
    b"7z\xbc\xaf": "a 7z archive; unpack it first",
    b"\xfd7zX": "an xz file; unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstandard file; unpack it first",
    b"BZh": "a bzip2 file; unpack it first",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a file may unpack to: in all, and over its packed size once it is beyond `free_bytes`."""

    max_bytes: int = 64 * GIB
    max_ratio: float = 60.0
    free_bytes: int = 256 * MIB
    max_members: int = 10_000


DEFAULT_LIMITS: Final = Limits()


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


class ByteStream:
    """Bytes of one trace, unpacked; `name` for messages, `was_cut` once the packed data ended early."""

    def __init__(self, source: _Source, name: str, packed_bytes: int | None, limits: Limits) -> None:
        self.name = name
        self.was_cut = False
        self._source = source
        self._limits = limits
        self._max = limits.max_bytes
        if packed_bytes is not None:
            self._max = min(self._max, max(limits.free_bytes, int(packed_bytes * limits.max_ratio)))
        self._given = 0

    def read(self, num_bytes: int) -> bytes:
        """Up to `num_bytes` more, fewer only at the end.

        Raises:
            TraceError: if the file unpacks to more than the limits allow, or its packed data is damaged.
        """
        parts: list[bytes] = []
        missing = num_bytes
        while missing > 0 and not self.was_cut:
            try:
                part = self._source.read(min(missing, MIB))
            except EOFError:
                self.was_cut = True
                break
            except (zlib.error, tarfile.TarError, OSError) as error:
                raise TraceError(f"{self.name}: cannot be unpacked: {error}") from error
            if not part:
                break
            parts.append(part)
            missing -= len(part)
            self._given += len(part)
            if self._given > self._max:
                raise TraceError(
                    f"{self.name}: refused, it unpacks to more than {format_bytes(self._max)}; "
                    "unpack it yourself if you trust it"
                )
        return b"".join(parts)


class _Gunzip(io.RawIOBase):
    """A gzip file of one or more members, unpacked in bounded memory.

    Unlike gzip's own reader it gives out all there is of a cut file before it raises `EOFError`.
    """

    def __init__(self, packed: _Source) -> None:
        self._packed = packed
        self._inflate = zlib.decompressobj(wbits=_GZIP_BITS)
        self._ready = b""
        self._num_packed = 0

    def readable(self) -> bool:
        return True

    def _unpack(self, ready: bytes, size: int) -> bytes:
        """Up to `size` bytes of what is next.

        Raises:
            zlib.error: if it is damaged, with the byte of the packed file.
        """
        before = self._inflate.copy()
        try:
            return self._inflate.decompress(ready, size)
        except zlib.error as error:
            at = self._num_packed - len(ready) + _bad_byte(before, ready)
            reason = str(error).rpartition(": ")[2]
            raise zlib.error(f"damaged gzip near byte {at} of the packed file: {reason}") from error

    def read(self, size: int = -1) -> bytes:
        size = _PACKED_BLOCK if size < 0 else size
        while size:
            ready = self._ready
            if not ready:
                ready = self._packed.read(_PACKED_BLOCK)
                self._num_packed += len(ready)
            if self._inflate.eof:
                if not ready.lstrip(b"\0"):
                    return b""
                self._inflate = zlib.decompressobj(wbits=_GZIP_BITS)
            part = self._unpack(ready, size)
            self._ready = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            if part:
                return part
            if not ready:
                raise EOFError("the gzip file ends before its end mark")
        return b""


def _bad_byte(inflate: "zlib._Decompress", packed: bytes) -> int:
    """The first byte that cannot be unpacked."""
    for at in range(len(packed)):
        try:
            inflate.decompress(packed[at : at + 1])
        except zlib.error:
            return at
    return len(packed)


class _Prefixed(io.RawIOBase):
    """A stream with the bytes put back that were read to see what it is."""

    def __init__(self, prefix: bytes, rest: _Source) -> None:
        self._prefix = prefix
        self._rest = rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._prefix:
            part = self._prefix if size < 0 else self._prefix[:size]
            self._prefix = self._prefix[len(part) :]
            return part
        return self._rest.read(size)


class _CountedFile(io.RawIOBase):
    """What tarfile reads from: a limited stream, so that a tar of zeros is refused as any bomb."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(64 * KIB if size < 0 else size)


class _ZipMember(io.RawIOBase):
    """Whichever file of a zip archive is read now: one after the other, so that all can be counted as one stream."""

    def __init__(self) -> None:
        self.source: IO[bytes] = io.BytesIO()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            return self.source.read(size)
        except (BadZipFile, lzma.LZMAError) as error:  # a wrong checksum, a stream that is none
            raise OSError(f"damaged zip archive: {error}") from error


def is_sqlite(path: Path) -> bool:
    """Whether the file is an SQLite database.

    Raises:
        TraceError: if it cannot be read.
    """
    try:
        with open_regular(path) as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError as error:
        raise TraceError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _is_named_like_a_trace(name: str) -> bool:
    return name.endswith(_TRACE_SUFFIXES) or _DUMP_NAME.search(name) is not None


def _is_member(name: str) -> bool:
    """Whether a file in an archive is read: archives in it are not, nor what macOS adds to each file."""
    base = Path(name).name
    return not base.startswith("._") and (base.endswith(_MEMBER_SUFFIXES) or _DUMP_NAME.search(base) is not None)


def trace_paths(path: Path) -> tuple[Path, ...]:
    """The path itself, or, of a folder, every file in it that is named like a trace, in order of name.

    Raises:
        TraceError: if it does not exist, or the folder holds no such file.
    """
    if not path.exists():
        raise TraceError(f"{str(path)!r} does not exist")
    if not path.is_dir():
        if not path.is_file():
            raise TraceError(f"{str(path)!r} is no regular file")
        if path.suffix == ".toml":
            raise TraceError(
                f"{str(path)!r} is no trace; if it is a job file: lagom simulate {path} predicts its step, "
                f"lagom tune {path} tunes its collectives"
            )
        return (path,)
    if (path / "run.json").is_file() and (path / "traces").is_dir():
        path /= "traces"  # of a run of ours, whose other files are named like traces
    paths = tuple(sorted(p for p in path.iterdir() if p.is_file() and _is_named_like_a_trace(p.name)))
    if not paths:
        below = _folder_below(path)
        if below is not None:
            raise TraceError(
                f"folder {str(path)!r} holds no trace, {str(below)!r} does: folders in it are not searched, as they "
                "may be of other runs or steps; name the one that is meant"
            )
        allowed = ", ".join(_TRACE_SUFFIXES)
        raise TraceError(f"folder {str(path)!r} holds no trace (folders in it are not searched); allowed: {allowed}")
    return paths


def _folder_below(path: Path) -> Path | None:
    """The first folder below it that holds a trace, as torchtitan's `profile_trace/iteration_10`; None if none does."""
    for num, (folder, names, files) in enumerate(os.walk(path)):
        names.sort()
        if any(_is_named_like_a_trace(file) for file in files):
            return Path(folder)
        if num >= _MAX_FOLDERS:
            break
    return None


def distinct_files(paths: Sequence[Path]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The traces of files and folders, each file once, and a sentence for each that was named again.

    Raises:
        TraceError: as `trace_paths`.
    """
    first: dict[tuple[int, int], Path] = {}
    notes = []
    for file in (file for path in paths for file in trace_paths(path)):
        status = file.stat()
        known = first.setdefault((status.st_dev, status.st_ino), file)
        if known is not file:
            notes.append(f"{short_name(file)} was named twice and counts once.")
    return tuple(first.values()), tuple(dict.fromkeys(notes))


def _refuse_foreign(head: bytes, name: str) -> None:
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise TraceError(f"{name}: this is {what}")
    if not head.strip():
        raise TraceError(f"{name}: is empty; a trace is expected")


def _is_tar(head: bytes) -> bool:
    return head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar"


def _members(stream: ByteStream, path: Path, limits: Limits) -> Iterator[ByteStream]:
    try:
        with tarfile.open(fileobj=_CountedFile(stream), mode="r|") as archive:
            for index, member in enumerate(archive):
                if index >= limits.max_members:
                    raise TraceError(f"{stream.name}: refused, more than {limits.max_members} files in it")
                if not member.isfile() or not _is_member(member.name):
                    continue
                content = archive.extractfile(member)
                if content is None:
                    continue
                name = short_name(path, member.name)
                if name.endswith(".gz"):
                    yield ByteStream(_Gunzip(content), name, member.size, limits)
                else:
                    yield ByteStream(content, name, None, limits)
    except tarfile.TarError as error:
        if not stream.was_cut:
            raise TraceError(f"{stream.name}: damaged tar archive: {error}") from error


def _opened_zip(file: IO[bytes], name: str) -> ZipFile:
    try:
        return ZipFile(file)
    except (NotImplementedError, UnicodeDecodeError, OSError) as error:
        raise TraceError(f"{name}: damaged zip archive, or one that is not read: {error}") from error


def _zip_members(file: IO[bytes], path: Path, limits: Limits) -> Iterator[ByteStream]:
    name = short_name(path)
    current = _ZipMember()
    whole = ByteStream(current, name, path.stat().st_size, limits)  # many small bombs are one
    try:
        with _opened_zip(file, name) as archive:
            if len(archive.filelist) > limits.max_members:
                raise TraceError(f"{name}: refused, more than {limits.max_members} files in it")
            for member in archive.filelist:
                if member.is_dir() or not _is_member(member.filename):
                    continue
                shown = short_name(path, member.filename)
                if member.flag_bits & _ZIP_ENCRYPTED:
                    raise TraceError(f"{shown}: is encrypted; unpack it yourself")
                try:
                    opened = archive.open(member)
                except (NotImplementedError, UnicodeDecodeError, OSError) as error:
                    raise TraceError(f"{shown}: is packed in a way that is not read ({error}); unpack it") from error
                with opened:
                    current.source = opened
                    unpacked = _CountedFile(whole)
                    packed = _Gunzip(unpacked) if shown.endswith(".gz") else unpacked
                    yield ByteStream(packed, shown, member.compress_size, limits)
    except BadZipFile as error:
        raise TraceError(f"{name}: damaged zip archive, or a part of one: {error}") from error


@contextmanager
def open_streams(path: Path, limits: Limits = DEFAULT_LIMITS) -> Iterator[Iterator[ByteStream]]:
    """The traces in a file: one, or one for every trace in an archive (tar, zip); read each before asking for the next.

    Raises:
        TraceError: if the file cannot be read, is empty, or is of a kind that is not a trace.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise TraceError(f"cannot read {str(path)!r}: {error.strerror}") from error
    name = short_name(path)
    with file:
        packed_bytes = None
        head = file.read(_PEEK)
        file.seek(0)
        source: _Source = file
        if head.startswith(_ZIP_MAGIC):
            yield _zip_members(file, path, limits)
            return
        if head.startswith(_GZIP_MAGIC):
            packed_bytes = path.stat().st_size
            unpacked = _Gunzip(file)
            head = ByteStream(unpacked, name, packed_bytes, limits).read(_PEEK)
            source = _Prefixed(head, unpacked)
        _refuse_foreign(head, name)
        stream = ByteStream(source, name, packed_bytes, limits)
        yield _members(stream, path, limits) if _is_tar(head) else iter((stream,))
