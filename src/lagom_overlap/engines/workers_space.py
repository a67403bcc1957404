"""What the worker engine can be asked for; needs no torch, so that a controller can use it.

A channel is a worker thread with connections of its own. `chunk_bytes` is a chunk's share of the whole message, as on
gloo. The protocol is how a thread waits for the wire, from the one that takes the core most to the one that leaves it:
LL spins, LL128 yields the core after each look, Simple blocks in the kernel. The names are NCCL's for the same ladder
of latency against cost; nothing else of NCCL's protocols is meant.
"""

from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.engines.gloo_space import ELEMENT_BYTES, KINDS
from lagom_overlap.errors import BackendError, SpaceError
from lagom_overlap.units import KIB, MIB, format_bytes

CHANNELS: Final = (1, 2, 4, 8)
"""The channel counts that a search is offered; the last is the most that the engine opens."""
MIN_CHUNK_BYTES: Final = 64 * KIB
OFFERED_CHUNKS: Final = (256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB)
PROTOCOLS: Final = (Protocol.SIMPLE, Protocol.LL128, Protocol.LL)
"""Block, yield, spin: in the order of the C library's wait modes."""
LACKING: Final = ("algorithm", "transport", "num_threads")
DEFAULT: Final = CommConfig(protocol=Protocol.LL128, num_channels=8, chunk_bytes=2 * MIB)
"""What an untouched call runs with: the Lagom paper's default of 8 channels and 2 MiB, waiting by yielding."""


def check_collective(collective: Collective) -> None:
    """Refuses what the engine cannot run.

    Raises:
        BackendError: for another kind, or a size that is not a whole number of fp32 elements in equal parts.
    """
    if collective.kind not in KINDS:
        raise BackendError(f"workers cannot run {collective.kind}; they can run {', '.join(KINDS)}")
    unit = ELEMENT_BYTES * (1 if collective.kind is CollectiveKind.ALL_REDUCE else collective.num_ranks)
    if collective.num_bytes % unit:
        raise BackendError(
            f"{collective.kind} of {collective.num_bytes} bytes over {collective.num_ranks} ranks: workers move fp32 "
            f"elements in equal parts, so the size must be a multiple of {unit} bytes"
        )


def check_config(config: CommConfig) -> None:
    """Refuses a configuration that the engine cannot set; an untouched one is always fine.

    Raises:
        SpaceError: naming the knob, its value and what is allowed.
    """
    for knob in LACKING:
        value = getattr(config, knob)
        if value is not None:
            raise SpaceError(f"{knob} is {value}, but workers have no such knob: leave it out")
    if config.num_channels is not None and config.num_channels > CHANNELS[-1]:
        raise SpaceError(f"num_channels is {config.num_channels}, workers offer 1 to {CHANNELS[-1]}")
    if config.chunk_bytes is not None and config.chunk_bytes < MIN_CHUNK_BYTES:
        raise SpaceError(
            f"chunk_bytes is {config.chunk_bytes} ({format_bytes(config.chunk_bytes)}), with workers at least "
            f"{MIN_CHUNK_BYTES} ({format_bytes(MIN_CHUNK_BYTES)})"
        )


def effective(config: CommConfig) -> CommConfig:
    """The configuration with every knob that is None filled from the default."""
    return CommConfig(
        protocol=config.protocol or DEFAULT.protocol,
        num_channels=config.num_channels or DEFAULT.num_channels,
        chunk_bytes=config.chunk_bytes or DEFAULT.chunk_bytes,
    )


def workers_space(collective: Collective) -> ConfigSpace:
    """A subspace per way of waiting; channels 1, 2, 4, 8; chunks from 256 KiB to 4 MiB, within the message."""
    check_collective(collective)
    chunks = tuple(size for size in OFFERED_CHUNKS if size <= collective.num_bytes) or OFFERED_CHUNKS[:1]
    return ConfigSpace(
        tuple(Subspace(protocol=protocol, num_channels=CHANNELS, chunk_bytes=chunks) for protocol in PROTOCOLS)
    )
