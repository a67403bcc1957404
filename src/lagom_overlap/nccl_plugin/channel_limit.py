"""How many channels may be asked for: never more than NCCL's own choice was seen to run with.

A tuner is told neither a communicator's channels nor NCCL's release. NCCL cuts a larger number down in most places, so
that 24 and 64 are one setting where a communicator has 24; in others it trusts the number and crashes: CollNet, and the
grouped broadcasts that NCCL 2.29 and 2.30 run as an uneven all-gather (`allgatherv_sched.cc`; PyTorch's `all_gather`
into tensors of different sizes). What a call's default was seen to run with is there for certain.
"""

from collections.abc import Iterable

from lagom_overlap.collective import CommConfig, CommunicatorId, ConfigKey
from lagom_overlap.nccl_plugin.space import CHANNELS


def channels_within(grid: int) -> tuple[int, ...]:
    """The numbers of channels to try for a call whose default ran with `grid`."""
    if grid < 1:
        raise ValueError(f"grid is {grid}, must be positive")
    return (*(count for count in CHANNELS if count < grid), grid)


def most_channels(rows: Iterable[tuple[ConfigKey, CommConfig]]) -> dict[CommunicatorId, int]:
    """The most that any row asks for on each communicator: its limit, if each row keeps within what was seen.

    A pure function of the rows, because the limit decides what runs: it must be the same on all ranks.
    """
    most: dict[CommunicatorId, int] = {}
    for key, config in rows:
        if config.num_channels is not None:
            most[key.communicator] = max(config.num_channels, most.get(key.communicator, 0))
    return most
