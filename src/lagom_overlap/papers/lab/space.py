"""What the worker engine can be asked for; needs no torch, so that a controller can use it.

A channel is a worker thread with connections of its own. `chunk_bytes` is a chunk's share of the whole message, as on
gloo. The protocol is how a thread waits for the wire, from the one that takes the core most to the one that leaves it:
LL spins, LL128 yields the core after each look, Simple blocks in the kernel. The names are NCCL's for the same ladder
of latency against cost; nothing else of NCCL's protocols is meant.
"""

from typing import Final

from lagom_overlap.collective import Collective, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.engines.cpu_limits import check_fp32_collective, check_knobs
from lagom_overlap.units import KIB, MIB

CHANNELS: Final = (1, 2, 4, 8)
"""The channel counts that a search is offered; the last is the most that the engine opens."""
MIN_CHUNK_BYTES: Final = 64 * KIB
"""A quarter of the least that a search is offered. Chosen."""
OFFERED_CHUNKS: Final = (256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB)
"""What a search is offered. Chosen, not measured."""
PROTOCOLS: Final = (Protocol.SIMPLE, Protocol.LL128, Protocol.LL)
"""Block, yield, spin: in the order of the C library's wait modes."""
LACKING: Final = ("algorithm", "transport", "num_threads")
DEFAULT: Final = CommConfig(protocol=Protocol.LL128, num_channels=8, chunk_bytes=2 * MIB)
"""What an untouched call runs with: the Lagom paper's default of 8 channels and 2 MiB, waiting by yielding."""


def check_collective(collective: Collective) -> None:
    """See `cpu_limits.check_fp32_collective`."""
    check_fp32_collective(collective, "workers")


def check_config(config: CommConfig) -> None:
    """See `cpu_limits.check_knobs`."""
    check_knobs(config, "workers", lacking=LACKING, most_channels=CHANNELS[-1], least_chunk_bytes=MIN_CHUNK_BYTES)


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
