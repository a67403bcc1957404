"""Captures that were recorded as one JSON object per line: program order, streams and their waits, bytes, FLOPs.

Such a file names no tensors, so the data flow is what streams and events enforce: operators of a stream in order, each
after what its stream waits for. Only FSDP's gathers of parameters are set free of that: they wait for their own
copies and for nothing else. A real capture (`fake_tensor`) leaves more freedom. Matrix products whose shapes cannot be
read from their arguments count as memory traffic.
"""

import gzip
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.capture.base import Capture
from lagom_overlap.capture.clock import StreamClock
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, MemoryBound, Op, Origin, Phase, Work

MAX_LINES: Final = 1_000_000
MAX_BYTES: Final = 1 << 30

_KINDS: Final = {
    "allgather": CollectiveKind.ALL_GATHER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "allreduce": CollectiveKind.ALL_REDUCE,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "send": CollectiveKind.SEND_RECV,
    "recv": CollectiveKind.SEND_RECV,
}
"""First match of the operator's name; a reduce-scatter is not a scatter."""
_GATHER: Final = "FSDP::all_gather"
_COPY_OUT: Final = "FSDP::all_gather_copy_out"
_PRODUCTS: Final = ("mm", "addmm", "bmm")


class _Line(msgspec.Struct, frozen=True):
    kind: str
    op: str
    shapes: list[list[int]] = []
    dtype: str = ""
    out_bytes: int = 0
    in_bytes: int = 0
    mod: str = ""
    bw: bool = False
    group_desc: str = ""
    ranks: list[int] = []
    stream: int = 0
    ann: str = ""


class _Recording:
    """Turns lines into operators."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.groups: dict[str, tuple[int, ...]] = {}
        self._clock = StreamClock()
        self._gathering: int | None = None

    def take(self, line: _Line) -> None:
        stream = f"stream{line.stream}"
        if line.kind == "sync":
            self._sync(line, stream)
        elif line.kind in ("compute", "comm"):
            self._operator(line, stream)

    def _sync(self, line: _Line, stream: str) -> None:
        match line.op:
            case "record":
                self._clock.record(stream, line.in_bytes)
            case "wait_event":
                self._clock.wait_event(stream, line.in_bytes)
            case "wait_stream":
                self._clock.wait_stream(stream, f"stream{line.in_bytes}")

    def _operator(self, line: _Line, stream: str) -> None:
        if not line.in_bytes + line.out_bytes:
            return
        number = len(self.ops)
        waits = {*self._clock.so_far(stream), *self._clock.issue(number, stream)}
        if line.ann.startswith(_GATHER) and not line.ann.startswith(_COPY_OUT):
            waits = set() if self._gathering is None else {self._gathering}
            self._gathering = None if line.kind == "comm" else number
        phase = Phase.BACKWARD if line.bw else Phase.FORWARD
        origin = Origin(phase=phase, module=line.mod.partition(".")[2], kernel=line.op.removesuffix(".default"))
        if line.kind == "comm" and len(line.ranks) > 1:
            communicator = line.group_desc.removeprefix("mesh_") or "world"
            self.groups[communicator] = tuple(line.ranks)
            num_bytes = max(line.out_bytes, line.in_bytes - line.out_bytes, 1)
            self.ops.append(
                CommOp(
                    name=f"{number}.{origin.kernel}",
                    collective=Collective(_kind(line.op), num_bytes, len(line.ranks)),
                    stream=stream if line.stream else "comm",
                    communicator=communicator,
                    deps=tuple(self.ops[wait].name for wait in sorted(waits)),
                    origin=origin,
                )
            )
            return
        self.ops.append(
            CompOp(
                name=f"{number}.{origin.kernel}",
                work=_work(line),
                stream=stream,
                deps=tuple(self.ops[wait].name for wait in sorted(waits)),
                origin=origin,
            )
        )


def _kind(name: str) -> CollectiveKind:
    for word, kind in _KINDS.items():
        if word in name:
            return kind
    raise JobError(f"collective {name!r} is not known; allowed: names with {', '.join(_KINDS)}")


def _work(line: _Line) -> Work:
    name = line.op.split(".")[1] if "." in line.op else line.op
    matrices = line.shapes[-2:]
    if name in _PRODUCTS and len(matrices) == 2 and all(len(shape) >= 2 and min(shape) > 0 for shape in matrices):
        (*batch, m, k), (*_, n) = matrices
        rows = m
        for size in batch:
            rows *= size
        return Gemm(rows, n, k, 4 if line.dtype == "float32" else 2)
    return MemoryBound(line.in_bytes + line.out_bytes)


def read_recording(path: Path) -> Capture:
    """The capture in a file of one JSON object per line, packed with gzip or plain.

    Raises:
        JobError: if the file cannot be read, is too large, or a line is none.
    """
    where = f"recording {str(path)!r}"
    recording = _Recording()
    decode = msgspec.json.Decoder(_Line).decode
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise JobError(f"{where} unpacks to more than {MAX_BYTES} bytes, the most that is allowed")
        lines = content.splitlines()
        if len(lines) > MAX_LINES:
            raise JobError(f"{where} has {len(lines)} lines; allowed: {MAX_LINES}")
        for number, line in enumerate(lines, 1):
            try:
                recording.take(decode(line))
            except msgspec.DecodeError as error:
                raise JobError(f"{where}, line {number}: {error}") from None
    except FileNotFoundError:
        raise JobError(f"{where} does not exist") from None
    except (OSError, EOFError) as error:
        raise JobError(f"{where} cannot be read: {error}") from None
    num_ranks = 1 + max((max(ranks) for ranks in recording.groups.values()), default=0)
    name = path.name.partition(".")[0]
    return Capture(iteration=Iteration(name, tuple(recording.ops), True), num_ranks=num_ranks, groups=recording.groups)
