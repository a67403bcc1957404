"""The knobs of one collective.

AutoCCL and Lagom name six: algorithm, protocol, transport, number of channels (NC), number of threads (NT) and chunk
size (C). A knob that an engine lacks, or leaves to its own default, is None.

C has two meanings. In AutoCCL (`tune_plans.h`, commit a0bf96bf) and in the Lagom paper it is the *slice*, the unit of
pipelining inside a chunk; NCCL's getChunkSize returns the *chunk* on the wire. A slice of C bytes takes
`ceil(C / 512 KiB)` steps of the 8-step, 4 MiB Simple buffer, rounded up to 1, 2 or 4; a chunk has at most 4 steps, so
it holds 4, 2 or 1 slices. Source: spec, Lagom section 1.4.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lagom_overlap.errors import SpaceError
from lagom_overlap.units import KIB, MIB


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
    """How one collective is run; with every field None the engine decides, as it does untouched.

    `chunk_bytes` is the chunk on the wire, as NCCL's getChunkSize means it. AutoCCL's and the Lagom paper's C is a
    slice: `chunk_bytes_of_slice` converts.
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


STEP_BYTES: Final = 512 * KIB
"""One step of NCCL's Simple FIFO: 4 MiB / 8."""
MAX_SLICE_BYTES: Final = 2 * MIB
"""Four steps: the most that a chunk holds, so a slice of this size is the whole chunk."""


def slices_per_chunk(slice_bytes: int) -> int:
    """Slices in one chunk: 4 up to 512 KiB, 2 up to 1 MiB, 1 up to 2 MiB.

    Raises:
        ValueError: if the slice is empty or above 2 MiB.
    """
    if not 1 <= slice_bytes <= MAX_SLICE_BYTES:
        raise ValueError(f"slice of {slice_bytes} bytes, must be between 1 and {MAX_SLICE_BYTES}")
    steps = -(-slice_bytes // STEP_BYTES)
    return {1: 4, 2: 2, 3: 1, 4: 1}[steps]


def chunk_bytes_of_slice(slice_bytes: int) -> int:
    """The chunk on the wire of an AutoCCL / Lagom C: 684 KiB -> 1368 KiB, 1366 KiB -> 1366 KiB, 2 MiB -> 2 MiB."""
    return slices_per_chunk(slice_bytes) * slice_bytes
