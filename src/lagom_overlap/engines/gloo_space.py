"""What gloo can be asked for: channels and slices; needs no torch, so that a controller can use it.

Channels are slices in flight. `chunk_bytes` is a slice's share of the whole message (the `num_bytes` of the
collective), so the number of slices is ceil(num_bytes / chunk_bytes). gloo has no algorithm, protocol, transport or
thread count to choose per call: those knobs are None.

The floor of a slice is 512 KiB: below it a slice costs 2 to 3 ms of latency (measured with torch 2.13 on two cores,
spec of the CPU engine, section 5), so such settings only waste measurements.
"""

from typing import Final

from lagom_overlap.collective import Collective, CommConfig, ConfigSpace, Subspace
from lagom_overlap.engines.cpu_limits import check_fp32_collective, check_knobs
from lagom_overlap.units import KIB

MIN_SLICE_BYTES: Final = 512 * KIB
"""Measured: a smaller slice costs 2 to 3 ms (see above)."""
CHANNELS: Final = (1, 2, 4, 8)
"""The channel counts that a search is offered; the last is the most that the engine opens."""
LACKING: Final = ("algorithm", "protocol", "transport", "num_threads")
"""Knobs that gloo does not have."""


def check_collective(collective: Collective) -> None:
    """See `cpu_limits.check_fp32_collective`."""
    check_fp32_collective(collective, "gloo")


def check_config(config: CommConfig) -> None:
    """See `cpu_limits.check_knobs`."""
    check_knobs(config, "gloo", lacking=LACKING, most_channels=CHANNELS[-1], least_chunk_bytes=MIN_SLICE_BYTES)


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
    return ConfigSpace((Subspace(num_channels=CHANNELS, chunk_bytes=tuple(slices)),), whole_message(collective))
