"""The time of a collective on a real link: NCCL's choice and latencies, a link described by two measured numbers.

    here             symbol   unit   meaning
    bytes_per_s      B        B/s    what a Simple ring carries past each rank ("bus bandwidth" of nccl-tests)
    latency_scale    s        -      Simple latencies relative to NCCL's table
    fixed_s          L_f      s      latency of LL and LL128: as in NCCL's table
    scaled_s         L_s      s      latency of Simple in NCCL's table
    wire_bytes       W        B      bytes past each rank, counted at the Simple ring's efficiency

    seconds = L_f + s L_s + W / B

W follows NCCL's model of bandwidth, so that a link's B serves every algorithm and protocol: W = bytes x (Simple ring's
search bandwidth) / (the algorithm's bandwidth). Four departures, where measurements contradict the model
(`data/wire.toml` holds their constants and sources):

- Simple is slower to start than the table says (A100: about 30 us for 2 to 8 GPUs), LL and LL128 are not: one scale;
- LL128 carries less on Ampere;
- NVLS works in loops of chunks: one loop is exposed, and small chunks pay;
- two pairs of GPUs bridged by NVLink meet over PCIe. A ring uses each meeting in one direction per channel (3/2 S over
  four GPUs), a chain of trees only once up and once down (S): there the tree is 1.5 times as fast, less its 0.92.

NCCL's correction of trees by size is for its choice only; measured times do not show it (4 A40, 128 MiB to 5.5 GB).
The channels and threads do not enter: `cost.communication` says what fewer of them cost.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

import msgspec

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.cost.nccl.bandwidth import bytes_per_s, num_steps
from lagom_overlap.cost.nccl.choice import choose
from lagom_overlap.cost.nccl.chunk import nvls_chunk_bytes
from lagom_overlap.cost.nccl.constants import Constants, load_constants
from lagom_overlap.cost.nccl.latency import latency_s
from lagom_overlap.cost.nccl.point_to_point import choose_point_to_point, point_to_point_terms
from lagom_overlap.cost.nccl.topology import GpuGeneration, Topology

_TREE_SHARE: Final = 0.92
"""tuning.cc: what trees carry of a Simple ring's rate."""
_NCCL_LL128_SHARE: Final = 0.92
"""tuning.cc: what LL128 rings carry of it."""


@dataclass(frozen=True, slots=True)
class FittedLink:
    """A link as measured: what a Simple ring carries past each rank, and Simple latencies relative to NCCL's table."""

    bytes_per_s: float
    latency_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < float("inf"):
            raise ValueError(f"link: bytes_per_s is {self.bytes_per_s}, must be positive and finite")
        if not 0 <= self.latency_scale < float("inf"):
            raise ValueError(f"link: latency_scale is {self.latency_scale}, must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTerms:
    """The terms of a collective's time that do not depend on the link's two numbers."""

    fixed_s: float
    scaled_s: float
    wire_bytes: float

    def seconds(self, link: FittedLink) -> float:
        """The time on a link."""
        return self.fixed_s + link.latency_scale * self.scaled_s + self.wire_bytes / link.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nvls:
    exposed_loops: float
    overhead_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _WireConstants:
    ll128_share: Mapping[GpuGeneration, float]
    nvls: _Nvls


@cache
def _wire_constants() -> _WireConstants:
    text = (resources.files(__package__) / "data" / "wire.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _WireConstants)


def wire_terms(
    collective: Collective,
    topology: Topology,
    algorithm: Algorithm | None = None,
    protocol: Protocol | None = None,
    chunk_bytes: float | None = None,
) -> WireTerms:
    """The terms of a collective under an algorithm and protocol, both NCCL's own choice if not given.

    `chunk_bytes` is read by NVLS alone; None: NCCL's own.

    Raises:
        ValueError: if only one of the two is given, NCCL has no such way, or the ranks are not the topology's.
    """
    if collective.kind.traits.is_point_to_point:
        chosen = protocol or choose_point_to_point(collective, topology).config.protocol
        assert chosen is not None
        latency, wire = point_to_point_terms(collective, chosen, topology)
        return _terms(latency, wire, chosen)
    if algorithm is None and protocol is None:
        config = choose(collective, topology).config
        algorithm, protocol = config.algorithm, config.protocol
    if algorithm is None or protocol is None:
        raise ValueError(f"algorithm is {algorithm} and protocol {protocol}: give both or neither")
    constants = load_constants()
    rate = _rate(collective, topology, constants, (algorithm, protocol), chunk_bytes)
    latency = latency_s(collective.kind, algorithm, protocol, topology, constants)
    nodes, passes = topology.num_nodes, collective.kind.traits.passes
    # No algorithm spares a node what it must send: NCCL's search believes so of NVLS trees behind few network cards.
    least = passes * (nodes - 1) / nodes * collective.num_bytes
    return _terms(latency, max(least, collective.num_bytes * topology.ring_bytes_per_s / rate), protocol)


def _terms(latency: float, wire_bytes: float, protocol: Protocol) -> WireTerms:
    simple = protocol is Protocol.SIMPLE
    return WireTerms(fixed_s=0.0 if simple else latency, scaled_s=latency if simple else 0.0, wire_bytes=wire_bytes)


def _rate(
    collective: Collective,
    topology: Topology,
    constants: Constants,
    way: tuple[Algorithm, Protocol],
    chunk_bytes: float | None,
) -> float:
    """NCCL's bytes of the whole tensor per second, corrected by what was measured."""
    kind, num_bytes = collective.kind, collective.num_bytes
    algorithm, protocol = way
    rate = bytes_per_s(kind, algorithm, protocol, topology, constants)
    if rate == 0.0:
        raise ValueError(f"NCCL has no {algorithm} with {protocol} for {kind} on {topology.name!r}")
    own = _wire_constants()
    if algorithm is Algorithm.RING and protocol is Protocol.LL128:
        rate *= own.ll128_share[topology.generation] / _NCCL_LL128_SHARE
    elif algorithm is Algorithm.NVLS:
        channels = topology.num_nvls_channels
        chunk = chunk_bytes or nvls_chunk_bytes(num_bytes, channels, topology.ranks_per_node)
        loop = channels * topology.ranks_per_node * chunk
        rate /= (1 + own.nvls.exposed_loops * loop / num_bytes) * (1 + own.nvls.overhead_bytes / chunk)
    elif algorithm is Algorithm.TREE and protocol is Protocol.SIMPLE and topology.bridged_pairs:
        ring = bytes_per_s(kind, Algorithm.RING, Protocol.SIMPLE, topology, constants)
        per_byte = num_steps(CollectiveKind.ALL_REDUCE, topology.num_ranks) / topology.num_ranks
        rate = _TREE_SHARE * ring * per_byte
    return rate
