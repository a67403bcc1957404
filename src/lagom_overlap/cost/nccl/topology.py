"""What NCCL's graph search found on a set of GPUs: the rings, trees and NVLS graphs that its tuning model reads.

A search yields, per algorithm, a number of search channels, a speed per channel inside and between nodes, and the worst
path used. NCCL then makes two compute channels of each search channel (connect.cc), which `Topology.num_channels` does.
Presets are in `data/topologies.toml`; `derived_graphs.py` derives those of machines with an NVSwitch.
"""

import tomllib
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec

from lagom_overlap.errors import UnknownNameError
from lagom_overlap.nccl_plugin.table_layout import MAX_CHANNELS

WIDE_CHANNEL_BYTES_PER_S: Final = 45e9
"""connect.cc: above it, GPUs since Hopper on several nodes get four compute channels per search channel."""


class GpuGeneration(StrEnum):
    """GPU generations that NCCL's tables tell apart."""

    VOLTA = "volta"
    AMPERE = "ampere"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"


class CpuVendor(StrEnum):
    """CPU vendors that NCCL's tables tell apart."""

    INTEL = "intel"
    AMD = "amd"
    OTHER = "other"


class PathType(IntEnum):
    """The worst part of a path, nearest first (NCCL's numbering, graph.h); TOML names them in lower case."""

    LOC = 0
    NVL = 1
    NVB = 2
    C2C = 3
    PIX = 4
    PXB = 5
    P2C = 6
    PXN = 7
    PHB = 8
    SYS = 9
    NET = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One algorithm's search channels: their number, speeds and worst paths.

    `same_channels` says that all channels visit the GPUs in the same order; `inter_latency_s` is the network's own.
    """

    num_channels: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    intra_type: PathType
    inter_type: PathType = PathType.PIX
    same_channels: bool = False
    inter_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_channels < 1:
            raise ValueError(f"graph: num_channels is {self.num_channels}, must be at least 1")
        for field in ("intra_bytes_per_s", "inter_bytes_per_s"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise ValueError(f"graph: {field} is {value}, must be positive and finite")
        if not 0 <= self.inter_latency_s < float("inf"):
            raise ValueError(f"graph: inter_latency_s is {self.inter_latency_s}, must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Equal nodes of equal GPUs as NCCL's tuning model sees them.

    `compute_capability` is 10 major + minor. `fallback_tree` says that the search settled for its simplest tree (all of
    a node's network traffic through one GPU). `bridged_pairs` says that GPUs are joined by NVLink in pairs only and
    that pairs meet over PCIe: NCCL's model does not read it, `wire.py` does.
    """

    name: str
    compute_capability: int
    cpu_vendor: CpuVendor
    num_nodes: int
    num_ranks: int
    ring: Graph
    tree: Graph
    nvls: Graph | None = None
    fallback_tree: bool = False
    bridged_pairs: bool = False

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.num_ranks < 2 or self.num_ranks % self.num_nodes:
            raise ValueError(
                f"topology {self.name!r}: {self.num_ranks} ranks on {self.num_nodes} nodes; "
                "there must be at least 2 ranks, equally many per node"
            )
        if self.compute_capability < 60:
            raise ValueError(f"topology {self.name!r}: compute_capability is {self.compute_capability}, at least 60")

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.num_ranks // self.num_nodes

    @property
    def generation(self) -> GpuGeneration:
        """The row of NCCL's tables."""
        for least, generation in (
            (100, GpuGeneration.BLACKWELL),
            (90, GpuGeneration.HOPPER),
            (80, GpuGeneration.AMPERE),
        ):
            if self.compute_capability >= least:
                return generation
        return GpuGeneration.VOLTA

    @property
    def num_channels(self) -> int:
        """Compute channels: two per search channel, four where few wide channels cross nodes (connect.cc)."""
        channels = min(MAX_CHANNELS, 2 * min(self.ring.num_channels, self.tree.num_channels))
        wide = self.ring.intra_bytes_per_s > WIDE_CHANNEL_BYTES_PER_S
        if self.compute_capability >= 90 and self.num_nodes > 1 and wide and channels < 16:
            channels *= 2
        return channels

    @property
    def num_nvls_channels(self) -> int:
        """Channels of NVLS and NVLS tree: 16 on Hopper, 24 or (several nodes) 32 on Blackwell, 0 without (nvls.cc)."""
        if self.nvls is None:
            return 0
        if self.compute_capability < 100:
            return 16
        return 32 if self.num_nodes > 1 else 24

    @property
    def ring_bytes_per_s(self) -> float:
        """What the ring's channels carry past each rank together."""
        speed = self.ring.intra_bytes_per_s if self.num_nodes <= 2 else self.ring.inter_bytes_per_s
        return self.ring.num_channels * speed

    def with_ring_of(self, bytes_per_s: float) -> "Topology":
        """The same graphs with speeds such that the ring carries that much: NCCL's own are steps of a table."""
        ratio = bytes_per_s / self.ring_bytes_per_s

        def scaled(graph: Graph) -> Graph:
            intra, inter = ratio * graph.intra_bytes_per_s, ratio * graph.inter_bytes_per_s
            return replace(graph, intra_bytes_per_s=intra, inter_bytes_per_s=inter)

        nvls = None if self.nvls is None else scaled(self.nvls)
        return replace(self, ring=scaled(self.ring), tree=scaled(self.tree), nvls=nvls)

    def with_nodes(self, num_nodes: int) -> "Topology":
        """The same machines, more or fewer of them; NCCL's search looks at one node and whether there are others.

        Raises:
            ValueError: if that would turn one node into several or back: the graphs would be others.
        """
        if num_nodes != self.num_nodes and min(num_nodes, self.num_nodes) == 1:
            raise ValueError(f"topology {self.name!r} has {self.num_nodes} nodes; with {num_nodes} its graphs differ")
        return replace(self, num_nodes=num_nodes, num_ranks=num_nodes * self.ranks_per_node)


def _numbered(entry: dict[str, Any]) -> dict[str, Any]:
    """A graph's table with its path types as numbers; other values as they are."""
    return {key: PathType[value.upper()].value if key.endswith("_type") else value for key, value in entry.items()}


@cache
def _presets() -> dict[str, Topology]:
    text = (resources.files(__package__) / "data" / "topologies.toml").read_text(encoding="utf-8")
    named = {
        name: {
            "name": name,
            **{key: _numbered(part) if isinstance(part, dict) else part for key, part in entry.items()},
        }
        for name, entry in tomllib.loads(text).items()
    }
    return msgspec.convert(named, dict[str, Topology])


def topology_names() -> list[str]:
    """The names that `load_topology` knows, sorted."""
    return sorted(_presets())


def load_topology(name: str) -> Topology:
    """The topology preset of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    if name not in _presets():
        raise UnknownNameError.among("NCCL topology", name, topology_names())
    return _presets()[name]
