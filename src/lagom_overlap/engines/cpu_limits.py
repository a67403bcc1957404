"""What the CPU engines refuse alike: they move fp32 elements in equal parts, over limited channels and pieces."""

from collections.abc import Sequence
from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.errors import BackendError, SpaceError
from lagom_overlap.units import format_bytes

ELEMENT_BYTES: Final = 4
"""Everything is fp32."""
KINDS: Final = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)


def check_fp32_collective(collective: Collective, engine: str) -> None:
    """Refuses what the engine of that name cannot run.

    Raises:
        BackendError: for another kind, or a size that is not a whole number of fp32 elements in equal parts.
    """
    if collective.kind not in KINDS:
        raise BackendError(f"{engine} cannot run {collective.kind} here; it can run {', '.join(KINDS)}")
    parts = 1 if collective.kind is CollectiveKind.ALL_REDUCE else collective.num_ranks
    unit = ELEMENT_BYTES * parts
    if collective.num_bytes % unit:
        raise BackendError(
            f"{collective.kind} of {collective.num_bytes} bytes over {collective.num_ranks} ranks: {engine} moves fp32 "
            f"elements in equal parts, so the size must be a multiple of {unit} bytes"
        )


def check_knobs(
    config: CommConfig, engine: str, *, lacking: Sequence[str], most_channels: int, least_chunk_bytes: int
) -> None:
    """Refuses a configuration that the engine of that name cannot set; an untouched one is always fine.

    Raises:
        SpaceError: naming the knob, its value and what is allowed.
    """
    for knob in lacking:
        value = getattr(config, knob)
        if value is not None:
            raise SpaceError(f"{knob} is {value}, but {engine} has no such knob: leave it out")
    if config.num_channels is not None and config.num_channels > most_channels:
        raise SpaceError(f"num_channels is {config.num_channels}, {engine} offers 1 to {most_channels}")
    if config.chunk_bytes is not None and config.chunk_bytes < least_chunk_bytes:
        raise SpaceError(
            f"chunk_bytes is {config.chunk_bytes} ({format_bytes(config.chunk_bytes)}), on {engine} at least "
            f"{least_chunk_bytes} ({format_bytes(least_chunk_bytes)})"
        )
