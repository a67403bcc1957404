"""What gloo can be asked for: channels and slices; needs no torch, so that a controller can use it.

Channels are slices in flight. `chunk_bytes` is a slice's share of the whole message (the `num_bytes` of the
collective), so the number of slices is ceil(num_bytes / chunk_bytes). gloo has no algorithm, protocol, transport or
thread count to choose per call: those knobs are None.

The floor of a slice is 512 KiB: below it a slice costs 2 to 3 ms of latency (measured with torch 2.13 on two cores,
spec of the CPU engine, section 5), so such settings only waste measurements.
"""

from typing import Final

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace, Subspace
from lagom_overlap.errors import BackendError, SpaceError
from lagom_overlap.units import KIB, format_bytes

ELEMENT_BYTES: Final = 4
"""Everything is fp32."""
MIN_SLICE_BYTES: Final = 512 * KIB
CHANNELS: Final = (1, 2, 4, 8)
"""The channel counts that a search is offered; the last is the most that the engine opens."""
KINDS: Final = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)
LACKING: Final = ("algorithm", "protocol", "transport", "num_threads")
"""Knobs that gloo does not have."""


def check_collective(collective: Collective) -> None:
    """Refuses what the engine cannot run.

    Raises:
        BackendError: for another kind, or a size that is not a whole number of fp32 elements in equal parts.
    """
    if collective.kind not in KINDS:
        raise BackendError(f"gloo cannot run {collective.kind} here; it can run {', '.join(KINDS)}")
    parts = 1 if collective.kind is CollectiveKind.ALL_REDUCE else collective.num_ranks
    unit = ELEMENT_BYTES * parts
    if collective.num_bytes % unit:
        raise BackendError(
            f"{collective.kind} of {collective.num_bytes} bytes over {collective.num_ranks} ranks: gloo moves fp32 "
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
            raise SpaceError(f"{knob} is {value}, but gloo has no such knob: leave it out")
    if config.num_channels is not None and config.num_channels > CHANNELS[-1]:
        raise SpaceError(f"num_channels is {config.num_channels}, gloo offers 1 to {CHANNELS[-1]}")
    if config.chunk_bytes is not None and config.chunk_bytes < MIN_SLICE_BYTES:
        raise SpaceError(
            f"chunk_bytes is {config.chunk_bytes} ({format_bytes(config.chunk_bytes)}), on gloo at least "
            f"{MIN_SLICE_BYTES} ({format_bytes(MIN_SLICE_BYTES)})"
        )


def whole_message(collective: Collective) -> CommConfig:
    """The engine's own default: the whole message as one slice on one channel."""
    return CommConfig(num_channels=1, chunk_bytes=max(MIN_SLICE_BYTES, collective.num_bytes))


def gloo_space(collective: Collective) -> ConfigSpace:
    """Channels 1, 2, 4, 8; slices from 512 KiB, doubling, up to a quarter of the message.

    The largest slice still leaves four to keep in flight, so that the upper corner is a setting of its own and not
    the whole message (`whole_message`) under another name.
    """
    check_collective(collective)
    slices = [MIN_SLICE_BYTES]
    while slices[-1] * 2 <= collective.num_bytes // 4:
        slices.append(slices[-1] * 2)
    return ConfigSpace((Subspace(num_channels=CHANNELS, chunk_bytes=tuple(slices)),))
