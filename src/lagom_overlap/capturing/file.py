"""A capture as a file: JSON, packed with gzip where the name ends in `.gz`; docs/formats.md.

A file is data and nothing in it is run. It is checked key by key, its size is bounded, and what it says must make a
valid `IssuedStep`; otherwise one line says what is wrong.
"""

import gzip
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError, OutputError
from lagom_overlap.record import open_regular, read_regular, write_private
from lagom_overlap.units import format_bytes
from lagom_overlap.workload import (
    Attention,
    Buffer,
    Combine,
    CommOp,
    CompOp,
    Gather,
    Gemm,
    Iteration,
    Kernel,
    MemoryBound,
    Op,
    Origin,
    Phase,
    Reduce,
    ShardSpec,
    TensorUse,
    Work,
)
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.ops import is_host_read

FORMAT: Final = "lagom-capture"
VERSION: Final = 1
"""Of the file's format; a file of another version is refused."""
MAX_FILE_BYTES: Final = 1 << 29
"""A file that unpacks to more than 512 MiB is refused; a step of 20,000 operators has about 15 MB."""
MAX_OPS: Final = 1_000_000
"""Chosen, far above any step that is known, so that a damaged file cannot allocate more."""

_Name = Annotated[str, Meta(max_length=1000)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class _Doc(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A table of the file: unknown keys are errors."""


class _AttentionDoc(_Doc, frozen=True, kw_only=True):
    batch: _Count
    num_heads: _Count
    seq_len: _Count
    head_dim: _Count
    causal: bool
    passes: float = 1.0
    element_bytes: _Count = 2
    backward: bool = False
    reach: float = 0.0
    window: _Count = 0
    narrow: bool = False


class _KernelDoc(_Doc, frozen=True, kw_only=True):
    num_blocks: _Count
    blocks_per_sm: _Count
    wave_s: float
    block_bytes: float
    grid: _Count | None = None
    cluster: _Count = 1
    own_tiles: _Count = 0


class _CollectiveDoc(_Doc, frozen=True, kw_only=True):
    kind: CollectiveKind
    num_bytes: _Count
    num_ranks: _Count
    num_nodes: _Count | None = None
    communicator: _Name


class _UseDoc(_Doc, frozen=True, kw_only=True):
    source: _Name = ""
    axes: list[_Count | None]


class _ShardsDoc(_Doc, frozen=True, kw_only=True):
    """`combine`: a dimension to concatenate along, or "sum"."""

    inputs: list[_UseDoc]
    combine: list[_Count | str]
    sizes: list[_Count]


class _OpDoc(_Doc, frozen=True, kw_only=True):
    """Exactly one of gemm = [m, n, k, element_bytes], attention, memory (bytes), kernel, collective."""

    name: _Name
    stream: _Name
    gemm: Annotated[list[_Count], Meta(min_length=4, max_length=4)] | None = None
    attention: _AttentionDoc | None = None
    memory: _Count | None = None
    kernel: _KernelDoc | None = None
    collective: _CollectiveDoc | None = None
    deps: list[_Name] = []
    waits: list[_Name] = []
    phase: Phase | None = None
    layer: int | None = None
    microbatch: _Count = 0
    module: _Name = ""
    framework_op: _Name = ""
    shards: _ShardsDoc | None = None
    host_read: bool = False


class _BufferDoc(_Doc, frozen=True, kw_only=True):
    name: _Name
    num_bytes: _Count
    maker: _Name
    users: list[_Name] = []


class _FileDoc(_Doc, frozen=True, kw_only=True):
    format: str
    version: int
    name: _Name
    num_ranks: _Count
    is_dataflow: bool
    resident_bytes: _Count = 0
    groups: dict[str, list[_Count]] = {}
    notes: list[str] = []
    ops: Annotated[list[_OpDoc], Meta(max_length=MAX_OPS)]
    buffers: Annotated[list[_BufferDoc], Meta(max_length=MAX_OPS)] = []


class _Head(msgspec.Struct):
    """Enough of any file to tell whose it is."""

    format: str = ""
    version: int = 0


# Writing.


def _shards_doc(shards: ShardSpec | None) -> _ShardsDoc | None:
    if shards is None:
        return None
    return _ShardsDoc(
        inputs=[_UseDoc(source=use.source, axes=list(use.axes)) for use in shards.inputs],
        combine=["sum" if isinstance(combine, Reduce) else combine.dim for combine in shards.combine],
        sizes=list(shards.sizes),
    )


def _work_fields(work: Work) -> dict[str, object]:
    match work:
        case Gemm():
            return {"gemm": [work.m, work.n, work.k, work.element_bytes]}
        case Attention():
            return {"attention": msgspec.convert(work, _AttentionDoc, from_attributes=True)}
        case MemoryBound():
            return {"memory": work.num_bytes}
        case Kernel():
            return {"kernel": msgspec.convert(work, _KernelDoc, from_attributes=True)}


def _op_doc(op: Op, waits: Iterable[str]) -> _OpDoc:
    if isinstance(op, CompOp):
        what = _work_fields(op.work)
    else:
        call = op.collective
        what = {
            "collective": _CollectiveDoc(
                kind=call.kind,
                num_bytes=call.num_bytes,
                num_ranks=call.num_ranks,
                num_nodes=call.num_nodes,
                communicator=op.communicator,
            )
        }
    fields: dict[str, object] = {
        **what,
        "name": op.name,
        "stream": op.stream,
        "deps": list(op.deps),
        "waits": list(waits),
        "phase": op.origin.phase,
        "layer": op.origin.layer,
        "microbatch": op.origin.microbatch,
        "module": op.origin.module,
        "framework_op": op.origin.kernel,
        "shards": _shards_doc(op.shards),
        "host_read": is_host_read(op),
    }
    return _OpDoc(**fields)  # type: ignore[arg-type]  # assembled above, field by field


def encode_capture(capture: IssuedStep) -> bytes:
    """The file's JSON."""
    iteration = capture.iteration
    document = _FileDoc(
        format=FORMAT,
        version=VERSION,
        name=iteration.name,
        num_ranks=capture.num_ranks,
        is_dataflow=iteration.is_dataflow,
        resident_bytes=iteration.resident_bytes,
        groups={name: list(ranks) for name, ranks in capture.groups.items()},
        notes=list(capture.notes),
        ops=[_op_doc(op, capture.waits.get(op.name, ())) for op in iteration.ops],
        buffers=[
            _BufferDoc(name=buffer.name, num_bytes=buffer.num_bytes, maker=buffer.maker, users=list(buffer.users))
            for buffer in iteration.buffers
        ],
    )
    return msgspec.json.encode(document) + b"\n"


def write_capture(path: Path, capture: IssuedStep) -> None:
    """Writes a capture; a name that ends in `.gz` is packed. The same capture gives the same bytes.

    Raises:
        OutputError: if the file exists or cannot be written.
    """
    content = encode_capture(capture)
    if path.suffix == ".gz":
        content = gzip.compress(content, compresslevel=6, mtime=0)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # the name is ours
    except FileExistsError:
        raise OutputError(f"{str(path)!r} exists already; give another name or remove it") from None
    except OSError as error:
        raise OutputError(f"{str(path)!r} cannot be written: {error.strerror}") from None
    try:
        write_private(path, content)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


# Reading.


def _unpacked(path: Path) -> bytes:
    with open_regular(path) as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if is_packed:
            return gzip.GzipFile(fileobj=file).read(MAX_FILE_BYTES + 1)
    return read_regular(path, MAX_FILE_BYTES)


def read_capture(path: Path) -> IssuedStep:
    """The capture in a file.

    Raises:
        JobError: if it cannot be read, is none, is too large, or does not hold together.
    """
    where = f"capture {str(path)!r}"
    try:
        content = _unpacked(path)
    except FileNotFoundError:
        raise JobError(f"{where} does not exist") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise JobError(f"{where} is damaged: {error}") from None
    except OSError as error:
        raise JobError(f"{where} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise JobError(f"{where} unpacks to more than {format_bytes(MAX_FILE_BYTES)}, the most that is allowed")
    return decode_capture(content, where)


def decode_capture(content: bytes, where: str) -> IssuedStep:
    """The capture that JSON describes.

    Raises:
        JobError: naming the place, or what does not hold together.
    """
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.format != FORMAT:
            raise JobError(f"{where} is no capture: format is {head.format!r}, must be {FORMAT!r}")
        if head.version != VERSION:
            raise JobError(f"{where} has version {head.version}; this version of lagom reads {VERSION}")
        document = msgspec.json.decode(content, type=_FileDoc)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobError(f"{where} is no capture: {error}") from None
    try:
        return _capture_of(document)
    except JobError as error:
        raise JobError(f"{where}: {error}") from None


def _capture_of(document: _FileDoc) -> IssuedStep:
    ops = tuple(_op_of(doc) for doc in document.ops)
    names = {op.name for op in ops}
    for doc in document.ops:
        unknown = [name for name in doc.waits if name not in names]
        if unknown:
            raise JobError(f"{doc.name!r} waits for {unknown[0]!r}, no operator of it")
    iteration = Iteration(
        name=document.name,
        ops=ops,
        is_dataflow=document.is_dataflow,
        buffers=tuple(
            Buffer(name=doc.name, num_bytes=doc.num_bytes, maker=doc.maker, users=tuple(doc.users))
            for doc in document.buffers
        ),
        resident_bytes=document.resident_bytes,
    )
    capture = IssuedStep(
        iteration=iteration,
        num_ranks=document.num_ranks,
        groups={name: tuple(ranks) for name, ranks in document.groups.items()},
        waits={doc.name: tuple(doc.waits) for doc in document.ops if doc.waits},
        notes=tuple(document.notes),
    )
    capture.issued  # noqa: B018  its waits are in order, or this raises
    return capture


def _work_of(doc: _OpDoc) -> Work:
    if doc.gemm is not None:
        return Gemm(*doc.gemm)
    if doc.attention is not None:
        return msgspec.convert(doc.attention, Attention, from_attributes=True)
    if doc.kernel is not None:
        return msgspec.convert(doc.kernel, Kernel, from_attributes=True)
    assert doc.memory is not None
    return MemoryBound(doc.memory)


def _combine_of(value: int | str, name: str) -> Combine:
    if value == "sum":
        return Reduce()
    if isinstance(value, str):
        raise JobError(f'{name!r}: combine is {value!r}, must be "sum" or the number of a dimension')
    return Gather(value)


def _op_of(doc: _OpDoc) -> Op:
    given = [doc.gemm, doc.attention, doc.memory, doc.kernel, doc.collective]
    if sum(what is not None for what in given) != 1:
        raise JobError(f"operator {doc.name!r}: give exactly one of gemm, attention, memory, kernel, collective")
    origin = Origin(
        phase=doc.phase, layer=doc.layer, microbatch=doc.microbatch, module=doc.module, kernel=doc.framework_op
    )
    shards = None
    if doc.shards is not None:
        shards = ShardSpec(
            inputs=tuple(TensorUse(use.source, tuple(use.axes)) for use in doc.shards.inputs),
            combine=tuple(_combine_of(value, doc.name) for value in doc.shards.combine),
            sizes=tuple(doc.shards.sizes),
        )
    deps = tuple(doc.deps)
    if doc.collective is None:
        return CompOp(
            name=doc.name,
            work=_work_of(doc),
            stream=doc.stream,
            deps=deps,
            origin=origin,
            shards=shards,
            is_host_read=doc.host_read,
        )
    if doc.host_read:
        raise JobError(
            f"operator {doc.name!r}: host_read is true of a collective; what reads its result is a computation"
        )
    call = doc.collective
    return CommOp(
        name=doc.name,
        collective=Collective(call.kind, call.num_bytes, call.num_ranks, call.num_nodes),
        stream=doc.stream,
        communicator=call.communicator,
        deps=deps,
        origin=origin,
        shards=shards,
    )
