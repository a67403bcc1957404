"""The constants of NCCL's tuning model, as data: `data/constants.toml`, each table with its place in NCCL's source.

They are facts about one version (2.30.7); `data/releases.toml` holds where older ones differ. Where a release differs
by a formula, `bandwidth.py` and `latency.py` look at `Constants.release`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec

from lagom_overlap.collective import Algorithm, Protocol
from lagom_overlap.cost.nccl.topology import CpuVendor, GpuGeneration
from lagom_overlap.hardware import LinkKind

PerProtocol = tuple[float, float, float]
"""LL, LL128, Simple."""
PerScale = tuple[float, float, float]
"""One node, two nodes, four or more."""


class ChannelLimit(StrEnum):
    """What a channel's bandwidth is bounded for."""

    RING_LL128 = "ring_ll128"
    TREE_LL128 = "tree_ll128"
    TREE = "tree"
    NVLS_TREE = "nvls_tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlLimit:
    """The most that LL carries (B/s): by GPU generation on one node, by CPU vendor (`amd` or `other`) on several."""

    one_node: Mapping[GpuGeneration, float]
    two_nodes: Mapping[str, float]
    more_nodes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCorrection:
    """Factors on a tree's bandwidth per power of two from 64 B on."""

    ll: tuple[float, ...]
    ll128: tuple[float, ...]
    simple: tuple[float, ...]

    def of(self, protocol: Protocol, num_bytes: int) -> float:
        """The factor at a size; 1 below 64 B and from 512 MiB on."""
        octave = (num_bytes >> 6).bit_length() - 1
        table = {Protocol.LL: self.ll, Protocol.LL128: self.ll128, Protocol.SIMPLE: self.simple}[protocol]
        return table[octave] if 0 <= octave < len(table) - 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """NCCL's tables in one release."""

    version: str
    base_latency_s: Mapping[Algorithm, PerProtocol]
    hop_latency_s: Mapping[LinkKind, Mapping[Algorithm, PerProtocol]]
    network_overhead_s: Mapping[CpuVendor, float]
    ll_max_bytes_per_s: LlLimit
    channel_max_bytes_per_s: Mapping[ChannelLimit, Mapping[GpuGeneration, PerScale]]
    nvls_efficiency: Mapping[GpuGeneration, float]
    tree_correction: TreeCorrection

    @property
    def release(self) -> int:
        """NCCL's version code: 23007 for 2.30.7."""
        return release_code(self.version)

    def base_s(self, algorithm: Algorithm, protocol: Protocol) -> float:
        """The latency before the first hop."""
        return self.base_latency_s[algorithm][_PROTOCOLS.index(protocol)]

    def hop_s(self, link: LinkKind, algorithm: Algorithm, protocol: Protocol) -> float:
        """The latency of a hop over that kind of link."""
        return self.hop_latency_s[link][algorithm][_PROTOCOLS.index(protocol)]

    def ll_max(self, generation: GpuGeneration, vendor: CpuVendor, num_nodes: int) -> float:
        """The most that LL carries on all channels (B/s)."""
        if num_nodes == 1:
            return self.ll_max_bytes_per_s.one_node[generation]
        table = self.ll_max_bytes_per_s.two_nodes if num_nodes == 2 else self.ll_max_bytes_per_s.more_nodes
        return table["amd" if vendor is CpuVendor.AMD else "other"]

    def channel_max(self, limit: ChannelLimit, generation: GpuGeneration, num_nodes: int) -> float:
        """The most that one channel carries (B/s)."""
        return self.channel_max_bytes_per_s[limit][generation][min(num_nodes, 3) - 1]


_PROTOCOLS = (Protocol.LL, Protocol.LL128, Protocol.SIMPLE)


NEWEST_RELEASE: Final = "2.30.7"


def release_code(release: str) -> int:
    """NCCL's version code of a release such as "2.30.7".

    Raises:
        ValueError: if it is not two or three numbers from 2.18 on.
    """
    parts = release.split(".")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
        raise ValueError(f"NCCL release {release!r}: must be like 2.30.7")
    major, minor, patch = (*(int(part) for part in parts), 0)[:3]
    code = major * 10000 + minor * 100 + patch
    if code < 21800:
        raise ValueError(f"NCCL release {release!r}: the model knows 2.18 and later")
    return code


@cache
def load_constants(release: str = NEWEST_RELEASE) -> Constants:
    """The constants of an NCCL release; those after 2.30.7 are taken to have its tables.

    Raises:
        ValueError: if the release is not a version, or older than 2.18.
    """
    code = release_code(release)
    folder = resources.files(__package__) / "data"
    tables = tomllib.loads((folder / "constants.toml").read_text(encoding="utf-8"))
    older = tomllib.loads((folder / "releases.toml").read_text(encoding="utf-8"))["release"]
    for entry in sorted(older, key=lambda entry: -entry["before"]):
        if code < entry.pop("before"):
            _merge(tables, entry)
    return msgspec.convert(tables | {"version": release}, Constants)


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict):
            _merge(into[key], value)
        else:
            into[key] = value
