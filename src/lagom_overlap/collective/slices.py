"""Slice and chunk: the two meanings of the paper's C.

AutoCCL's C (`tune_plans.h`, commit a0bf96bf), and with it the Lagom paper's, is the *slice*: the unit of pipelining
inside a chunk. NCCL's getChunkSize speaks of the *chunk* on the wire. A slice of C bytes takes
`ceil(C / 512 KiB)` steps of the 8-step, 4 MiB Simple buffer, rounded up to 1, 2 or 4; a chunk is at most 4 steps, so it
holds 4, 2 or 1 slices. Source: spec, Lagom section 1.4.
"""

from typing import Final

from lagom_overlap.units import KIB, MIB

STEP_BYTES: Final = 512 * KIB
"""One step of NCCL's Simple FIFO: 4 MiB / 8."""
MAX_SLICE_BYTES: Final = 2 * MIB


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
