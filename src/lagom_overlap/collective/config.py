"""The knobs of one collective.

AutoCCL and Lagom name six: algorithm, protocol, transport, number of channels (NC), number of threads (NT) and chunk
size (C). A knob that an engine lacks, or leaves to its own default, is None.
"""

from dataclasses import dataclass
from enum import StrEnum

from lagom_overlap.errors import SpaceError


class Algorithm(StrEnum):
    """NCCL's algorithms; the order is NCCL's numbering (tuner.h)."""

    TREE = "tree"
    RING = "ring"
    COLLNET_DIRECT = "collnet_direct"
    COLLNET_CHAIN = "collnet_chain"
    NVLS = "nvls"
    NVLS_TREE = "nvls_tree"
    PAT = "pat"


class Protocol(StrEnum):
    """NCCL's wire protocols; the order is NCCL's numbering."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


class Transport(StrEnum):
    """How bytes cross between two GPUs of a node (AutoCCL's T)."""

    P2P = "p2p"
    SHM = "shm"
    COPY_ENGINE = "copy_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """How one collective is run; every field None means: as the engine does untouched.

    `chunk_bytes` is the chunk on the wire, as NCCL's getChunkSize means it. AutoCCL's and the Lagom paper's C is a
    slice: `slices.chunk_bytes_of_slice` converts.
    """

    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    transport: Transport | None = None
    num_channels: int | None = None
    num_threads: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in ("num_channels", "num_threads", "chunk_bytes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise SpaceError(f"{field} is {value}, must be at least 1 (or absent)")

    @property
    def is_untouched(self) -> bool:
        """Whether no knob is set: the engine's own behaviour."""
        return self == UNTOUCHED


UNTOUCHED = CommConfig()
"""No knob set: the engine decides, as it would without us."""
