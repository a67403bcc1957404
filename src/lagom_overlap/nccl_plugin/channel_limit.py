"""The limit on channels: never more than NCCL's own choice was seen to run with.

NCCL tells a tuner neither a communicator's channels nor its release. In most places NCCL caps a larger number, so 24
and 64 are the same setting on a communicator with 24; in others it trusts the number and crashes: CollNet, and the
grouped broadcasts that NCCL 2.29 and 2.30 run as an uneven all-gather (`allgatherv_sched.cc`; PyTorch's `all_gather`
into tensors of different sizes). The channels that a call's default ran with certainly exist, but on this communicator
only: another one of its role may have fewer, NVLS may have more, and another run may set another NCCL_MAX_NCHANNELS. So
under those two releases an all-gather that may be uneven keeps NCCL's channels (`may_be_uneven`), unless
NCCL_ALLGATHERV_ENABLE=0 disables that path.
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
"""For processes in which every call is ours: no all-gather is uneven, so channels may be set for all of them."""
_WITH_UNEVEN: Final = ((2, 29), (2, 31))
"""The first release that runs uneven all-gathers that way, and the first that caps their channels."""


def runs_uneven_gathers(nccl: NcclVersion, environment: Mapping[str, str]) -> bool:
    """Whether this NCCL indexes its channels by what a tuner says of an uneven all-gather."""
    try:
        is_off = int(environment.get(UNEVEN_VARIABLE, "1") or "1", 0) == 0
    except ValueError:
        is_off = False
    first, capped = _WITH_UNEVEN
    return first <= nccl[:2] < capped and not is_off


def may_be_uneven(kind: CollectiveKind, offered: Collection[Implementation], num_nodes: int) -> bool:
    """Whether a call may be an uneven all-gather, by the plug-in's rule: NCCL never offers NVLS for one."""
    if kind is not CollectiveKind.ALL_GATHER:
        return False
    return num_nodes != 1 or all(algorithm is not Algorithm.NVLS for algorithm, _ in offered)


def channels_within(grid: int) -> tuple[int, ...]:
    """The channel counts to try for a call whose default ran with `grid`: powers of two, midpoints, and `grid`."""
    if grid < 1:
        raise ValueError(f"grid is {grid}, must be positive")
    between = (3 * count // 2 for count in CHANNELS if count > 1)
    return (*sorted(count for count in {*CHANNELS, *between} if count < grid), grid)


def most_channels(rows: Iterable[tuple[ConfigKey, CommConfig]]) -> dict[CommunicatorId, int]:
    """The most channels that any row asks for, by communicator: its limit, if each row stays within what was seen.

    A pure function of the rows, because the limit decides what runs: it must be the same on all ranks.
    """
    most: dict[CommunicatorId, int] = {}
    for key, config in rows:
        if config.num_channels is not None:
            most[key.communicator] = max(config.num_channels, most.get(key.communicator, 0))
    return most
