"""How many channels may be asked for: never more than NCCL's own choice was seen to run with.

A tuner is told neither a communicator's channels nor NCCL's release. NCCL cuts a larger number down in most places, so
that 24 and 64 are one setting where a communicator has 24; in others it trusts the number and crashes: CollNet, and the
grouped broadcasts that NCCL 2.29 and 2.30 run as an uneven all-gather (`allgatherv_sched.cc`; PyTorch's `all_gather`
into tensors of different sizes). What a call's default was seen to run with is there for certain, on this communicator:
another one of its role may have fewer, NVLS may have more than the rest, and another run another NCCL_MAX_NCHANNELS. So
under those two releases an all-gather that may be an uneven one is left NCCL's channels (`may_be_uneven`), unless
NCCL_ALLGATHERV_ENABLE=0 takes that path away.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, CommunicatorId, ConfigKey
from lagom_overlap.nccl_plugin.record_log import Implementation
from lagom_overlap.nccl_plugin.space import CHANNELS
from lagom_overlap.nccl_plugin.support import NcclVersion

UNEVEN_VARIABLE: Final = "NCCL_ALLGATHERV_ENABLE"
EVEN_GATHERS_ONLY: Final = MappingProxyType({UNEVEN_VARIABLE: "0"})
"""For processes whose every call is ours: no gather is uneven, so that all of them may be given channels."""
_WITH_UNEVEN: Final = ((2, 29), (2, 31))
"""The first release that runs uneven gathers so, and the first that caps them."""


def runs_uneven_gathers(nccl: NcclVersion, environment: Mapping[str, str]) -> bool:
    """Whether this NCCL indexes its channels by what a tuner says of an uneven all-gather."""
    try:
        is_off = int(environment.get(UNEVEN_VARIABLE, "1") or "1", 0) == 0
    except ValueError:
        is_off = False
    first, capped = _WITH_UNEVEN
    return first <= nccl[:2] < capped and not is_off


def may_be_uneven(kind: CollectiveKind, offered: Collection[Implementation], num_nodes: int) -> bool:
    """Whether a call may be an uneven all-gather, as the plug-in tells it: nothing of one is offered NVLS."""
    if kind is not CollectiveKind.ALL_GATHER:
        return False
    return num_nodes != 1 or all(algorithm is not Algorithm.NVLS for algorithm, _ in offered)


def channels_within(grid: int) -> tuple[int, ...]:
    """The numbers of channels to try for a call whose default ran with `grid`: doublings, those between, and `grid`."""
    if grid < 1:
        raise ValueError(f"grid is {grid}, must be positive")
    between = (3 * count // 2 for count in CHANNELS if count > 1)
    return (*sorted(count for count in {*CHANNELS, *between} if count < grid), grid)


def most_channels(rows: Iterable[tuple[ConfigKey, CommConfig]]) -> dict[CommunicatorId, int]:
    """The most that any row asks for on each communicator: its limit, if each row keeps within what was seen.

    A pure function of the rows, because the limit decides what runs: it must be the same on all ranks.
    """
    most: dict[CommunicatorId, int] = {}
    for key, config in rows:
        if config.num_channels is not None:
            most[key.communicator] = max(config.num_channels, most.get(key.communicator, 0))
    return most
