"""What a process says of a kind of operation: JSON, decoded into a typed struct.

One of the first group of fields says what it is; `op`, `flops`, `bytes`, `wire_bytes`, `access`, `floor` and
`uncounted` beside a kernel come from the framework hook (`hook.py`), `part` marks every kernel of a framework's
operator but the first. A product beside a kernel is a convolution's, whose operands are in `bytes`.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from lagom_emulate.protocol import ProtocolError
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.units import format_memory
from lagom_overlap.workload import Access

_MOST: Final = 1 << 62
Amount = Annotated[int, Meta(ge=0, le=_MOST)]
Size = Annotated[int, Meta(ge=1, le=_MOST)]
Name = Annotated[str, Meta(max_length=8192)]
Dimensions = Annotated[tuple[Amount, ...], Meta(max_length=3)]
Float = Annotated[float, Meta(ge=0)]


class GemmText(msgspec.Struct, frozen=True):
    """A matrix product as BLAS was called; `result` is the format that it writes ("": the operands')."""

    m: Amount
    n: Amount
    k: Amount
    batch: Amount = 1
    dtype: Name = "bf16"
    result: Name = ""


class CollectiveText(msgspec.Struct, frozen=True):
    """A collective as NCCL runs it; `bytes` as NCCL's tuner counts them.

    `present` of its ranks are processes (0: all); the others do what these do.
    """

    comm: Name
    kind: CollectiveKind
    bytes: Amount
    num_ranks: Annotated[int, Meta(ge=1, le=1 << 20)]
    rank: Amount = 0
    dtype: Name = ""
    present: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    nodes: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    algorithm: Name | None = None
    protocol: Name | None = None
    num_channels: Annotated[int, Meta(ge=0, le=4096)] = 0
    num_threads: Annotated[int, Meta(ge=0, le=4096)] = 0
    chunk_bytes: Amount = 0
    grid: Any = None


class Description(msgspec.Struct, frozen=True):
    """A kind of operation. What a newer device says beyond this is not read."""

    kernel: Name | None = None
    grid: Dimensions = ()
    block: Dimensions = ()
    num_elements: Amount | None = None
    gemm: GemmText | None = None
    copy: Name | None = None
    memset: Amount | None = None
    collective: CollectiveText | None = None
    event: Name | None = None
    host_function: bool = False
    refused: Name | None = None
    mark: dict[str, Any] | None = None
    bytes: Float | None = None
    flops: Float | None = None
    wire_bytes: Float = 0
    access: Access | None = None
    op: Name | None = None
    head_dim: Size | None = None
    reach: Annotated[float, Meta(gt=0)] | None = None
    part: Amount = 0
    floor: bool = False
    uncounted: bool = False

    @property
    def call(self) -> str:
        """What a process does in a collective, up to the other's name: `sends 67.1 MB to`; empty for anything else."""
        one = self.collective
        if one is None:
            return ""
        size = format_memory(one.bytes)
        if one.kind is not CollectiveKind.SEND_RECV:
            return f"runs {one.kind} of {size} with"
        return f"receives {size} from" if one.rank else f"sends {size} to"

    @property
    def label(self) -> str:
        """What a timeline shows."""
        if self.collective is not None:
            return f"{self.collective.kind} {self.collective.bytes} B"
        if self.gemm is not None and self.kernel is None:
            g = self.gemm
            return f"gemm {g.m}x{g.n}x{g.k}" + (f" x{g.batch}" if g.batch > 1 else "")
        if self.copy is not None:
            return f"copy {self.copy}"
        if self.memset is not None:
            return "memset"
        return self.op or (self.kernel or "kernel")[:120]


_DECODER: Final = msgspec.json.Decoder(Description)


def read_description(text: bytes) -> Description:
    """The description that a process sent.

    Raises:
        ProtocolError: if it is none.
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a description cannot be read: {error}") from None
