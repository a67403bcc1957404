"""Which release of NCCL lets which knob be set, and by which route.

Sources: NCCL's sources at v2.17.1 to v2.30.7 and the headers of 2.31.2 and 2.32.3 (docs/formats_plugin.md says what was
read where); the NCCL that a PyTorch wheel pins is from its package metadata.
The plug-in was tried on an H100 with 2.30.7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

NcclVersion: TypeAlias = tuple[int, int, int]


class RouteName(StrEnum):
    """A way from a setting to a collective of a running job on NCCL."""

    PLUGIN = "plugin"
    SIBLING = "sibling"
    COLL_CONFIG = "coll_config"


class Knob(StrEnum):
    """What may be set of a collective, as a support matrix speaks of it."""

    ALGORITHM = "algorithm"
    PROTOCOL = "protocol"
    CHANNELS = "channels"
    CHUNK = "chunk"
    THREADS = "threads"
    ALL_TO_ALL_CHANNELS = "channels of all-to-all"


class Settable(StrEnum):
    """How far a knob can be set."""

    YES = "yes"
    LOWER = "lower only"
    PARTLY = "partly"
    NO = "-"


@dataclass(frozen=True, slots=True)
class Support:
    """How far a route sets a knob, and what to know."""

    reach: Settable
    note: str = ""


NO: Final = Support(Settable.NO)
NCCL_OF_TORCH: Final[Mapping[str, NcclVersion]] = MappingProxyType(
    {"2.11": (2, 28, 9), "2.12": (2, 29, 7), "2.13": (2, 29, 7), "2.14": (2, 30, 7), "2.15": (2, 30, 7)}
)
"""What the CUDA wheels of PyTorch bring (of 2.14, from 2.14.1 on)."""
_TUNER_VERSIONS: Final = (
    ((2, 32, 6), 7),
    ((2, 30, 3), 6),
    ((2, 28, 0), 5),
    ((2, 24, 0), 4),
    ((2, 22, 0), 3),
    ((2, 21, 0), 2),
)
"""The first releases of NCCL with each version of the tuner interface (`src/plugin/tuner`), newest first."""


def tuner_version(nccl: NcclVersion) -> int | None:
    """The newest version of the tuner interface that a release takes and our plug-in has; None: none."""
    return next((version for since, version in _TUNER_VERSIONS if nccl >= since), None)


def support_of(nccl: NcclVersion) -> Mapping[RouteName, Mapping[Knob, Support]]:
    """What each route can set under a release; a knob that is not named cannot be set."""
    return MappingProxyType(
        {
            RouteName.PLUGIN: _plugin(nccl),
            RouteName.SIBLING: _sibling(nccl),
            RouteName.COLL_CONFIG: _coll_config(nccl),
        }
    )


def best_route(nccl: NcclVersion, knob: Knob) -> RouteName | None:
    """The route to use for a knob under a release: the plug-in before siblings; None if none of ours reaches it.

    The configuration per call (`coll_config`) is not among them: PyTorch passes none to NCCL.
    """
    routes = support_of(nccl)
    for route in (RouteName.PLUGIN, RouteName.SIBLING):
        if routes[route].get(knob, NO).reach is not Settable.NO:
            return route
    return None


def _plugin(nccl: NcclVersion) -> dict[Knob, Support]:
    version = tuner_version(nccl)
    if version is None:
        return {}
    way = Support(Settable.YES) if version > 2 else Support(Settable.PARTLY, "no LL128, no PAT, both together only")
    channels = (
        Support(Settable.LOWER, "below NCCL's own choice for the size") if nccl >= (2, 31, 0) else Support(Settable.YES)
    )
    reach = {Knob.ALGORITHM: way, Knob.PROTOCOL: way, Knob.CHANNELS: channels}
    if version >= 6:
        reach[Knob.CHUNK] = Support(Settable.LOWER, "rings and trees have the largest chunk of their buffer by default")
    return reach


def _sibling(nccl: NcclVersion) -> dict[Knob, Support]:
    if nccl < (2, 17, 0):
        return {}
    reach = {
        Knob.CHANNELS: Support(Settable.LOWER, "a cap per communicator; few values, each with buffers of its own"),
        Knob.ALL_TO_ALL_CHANNELS: Support(Settable.LOWER, "the same cap, rounded up to a power of two"),
    }
    if nccl >= (2, 30, 3):
        reach[Knob.THREADS] = Support(
            Settable.PARTLY, "rings only, with NCCL_NO_CACHE=NCCL_NTHREADS,NCCL_LL128_NTHREADS"
        )
    return reach


def _coll_config(nccl: NcclVersion) -> dict[Knob, Support]:
    if nccl < (2, 31, 2):
        return {}
    note = "not through PyTorch, which passes no configuration; no route of ours"
    return {knob: Support(Settable.PARTLY, note) for knob in (Knob.ALGORITHM, Knob.PROTOCOL, Knob.CHANNELS)}
