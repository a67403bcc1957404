"""What NCCL does untouched: the algorithm, protocol, channels and threads that its tuning model prefers for a size.

Source: NCCL 2.30.7, src/graph/tuning.cc (time), src/enqueue.cc (choice, channels, threads).

    time = latency + bytes / bandwidth                        for every algorithm and protocol that is available
    choice = the least time; on a tie the first in NCCL's numbering

Channels are given up one by one while a channel's threads would have less than a threshold of bytes each, then threads
are halved. `num_bytes` is what NCCL's tuner counts: the whole tensor (`Collective.num_bytes`). The channels are the
choice of the tuning model; at launch each gets a least traffic, which may leave some out (`launched_channels`).
Registered buffers and plug-ins change them, too.

Point-to-point has no tuning model in NCCL; see `point_to_point.py`.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol
from lagom_overlap.cost.nccl.bandwidth import bytes_per_s
from lagom_overlap.cost.nccl.chunk import default_chunk_bytes
from lagom_overlap.cost.nccl.constants import Constants, load_constants
from lagom_overlap.cost.nccl.latency import latency_s
from lagom_overlap.cost.nccl.topology import Topology
from lagom_overlap.units import KIB

PLATEAU_BYTES: Final = 64
"""tuning.cc: Simple rings over nodes are slower from that many bytes per channel and rank on..."""
PLATEAU: Final = 1.4
"""...by this factor on their latency..."""
OLD_PLATEAU: Final = 1.9
"""...or by this one before Ampere."""
WARP: Final = 32
"""Threads of a warp."""
MAX_THREADS: Final = 640
"""NCCL_MAX_NTHREADS (device.h, 2.30.7)."""
SLOW_RING_BYTES_PER_S: Final = 12e9
"""tuning.cc: Simple rings whose search channels carry no more in all use 256 threads instead of 512."""

LEAST_TRAFFIC_BYTES: Final = 32 * KIB
"""enqueue.cc: of a channel in a launch, from 2.29 on; half of it from 2.23 on."""

_MODELLED: Final = (Algorithm.TREE, Algorithm.RING, Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.PAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One algorithm and protocol in NCCL's table: its latency, bandwidth (whole tensor) and time at a size."""

    algorithm: Algorithm
    protocol: Protocol
    latency_s: float
    bytes_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class NcclChoice:
    """What NCCL runs, with every knob set, and the time that its model expects."""

    config: CommConfig
    seconds: float


def candidates(collective: Collective, topology: Topology, constants: Constants | None = None) -> tuple[Candidate, ...]:
    """NCCL's table for a collective: every available algorithm and protocol, in NCCL's order.

    Raises:
        ValueError: if the collective is point-to-point or its ranks are not the topology's.
    """
    _check(collective, topology)
    table = (
        _default_table(collective.kind, topology) if constants is None else _table(collective.kind, topology, constants)
    )
    tables = constants or load_constants()
    return tuple(replace(plain, seconds=_seconds(plain, collective, topology, tables)) for plain in table)


@lru_cache(maxsize=1024)
def _default_table(kind: CollectiveKind, topology: Topology) -> tuple[Candidate, ...]:
    return _table(kind, topology, load_constants())


def _table(kind: CollectiveKind, topology: Topology, constants: Constants) -> tuple[Candidate, ...]:
    """What does not depend on the size; the seconds are not known yet."""
    choices = []
    for algorithm, protocol in product(_MODELLED, Protocol):
        rate = bytes_per_s(kind, algorithm, protocol, topology, constants)
        if rate > 0.0:
            latency = latency_s(kind, algorithm, protocol, topology, constants)
            choices.append(
                Candidate(algorithm=algorithm, protocol=protocol, latency_s=latency, bytes_per_s=rate, seconds=math.inf)
            )
    assert choices, f"a ring of Simple is always there: {kind} on {topology.name}"
    return tuple(choices)


def choose(collective: Collective, topology: Topology, constants: Constants | None = None) -> NcclChoice:
    """NCCL's default for a collective on a topology.

    Raises:
        ValueError: if the collective is point-to-point or its ranks are not the topology's.
    """
    best = min(candidates(collective, topology, constants), key=lambda candidate: candidate.seconds)
    release = (constants or load_constants()).release
    channels, threads = channels_and_threads(collective.num_bytes, best.algorithm, best.protocol, topology, release)
    config = CommConfig(
        algorithm=best.algorithm,
        protocol=best.protocol,
        num_channels=channels,
        num_threads=threads,
        chunk_bytes=default_chunk_bytes(collective, best.algorithm, best.protocol, channels, topology),
    )
    return NcclChoice(config, best.seconds)


def channels_and_threads(
    num_bytes: int, algorithm: Algorithm, protocol: Protocol, topology: Topology, release: int = 23007
) -> tuple[int, int]:
    """NCCL's channels and threads for a size under an algorithm and protocol (enqueue.cc)."""
    if algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE):
        return topology.num_nvls_channels, MAX_THREADS
    threads = most = max_threads(algorithm, protocol, topology, release)
    per_thread = thread_threshold_bytes(algorithm, protocol, topology.num_ranks)
    channels = min(topology.num_channels, max(1, num_bytes // (most * per_thread)))
    while num_bytes < channels * threads * per_thread and threads % 128 == 0:
        threads //= 2
    if algorithm is not Algorithm.RING and release >= 22200:
        return channels, MAX_THREADS
    if protocol is Protocol.SIMPLE and algorithm is Algorithm.TREE:
        threads += 4 * WARP
    elif protocol is Protocol.SIMPLE:
        threads += WARP
    return channels, max(threads, 3 * WARP)


def launched_channels(
    collective: Collective, algorithm: Algorithm, protocol: Protocol, channels: int, release: int = 23007
) -> int:
    """How many of the chosen channels a launch of this collective alone uses (enqueue.cc, scheduleCollTasksToPlan).

    The traffic is cut into cells, and each channel takes as many whole ones as its share of the traffic, or the least
    traffic of a channel, needs.
    """
    if algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE) or release < 22300:
        return channels
    least = LEAST_TRAFFIC_BYTES if release >= 22900 else LEAST_TRAFFIC_BYTES // 2
    kind, num_ranks = collective.kind, collective.num_ranks
    in_parts = kind.traits.is_in_parts
    num_bytes = max(1, collective.num_bytes // num_ranks) if in_parts else collective.num_bytes
    per_byte = num_ranks if in_parts else 2 if kind is CollectiveKind.ALL_REDUCE else 1
    if protocol is Protocol.LL:
        per_byte *= 4
    cell = _up(_up(least, per_byte), 16) * 16
    num_cells = _up(num_bytes, cell)
    of_channel = min(num_cells, _up(max(least, num_bytes * per_byte // channels), cell * per_byte))
    return max(1, min(channels, _up(num_cells, of_channel)))


def _up(count: int, size: int) -> int:
    return -(-count // size)


def thread_threshold_bytes(algorithm: Algorithm, protocol: Protocol, num_ranks: int) -> int:
    """Bytes per thread below which channels, then threads, are given up."""
    per_thread = 64 if protocol is Protocol.SIMPLE else 8
    return per_thread * num_ranks if protocol is Protocol.LL and algorithm is Algorithm.RING else per_thread


def max_threads(algorithm: Algorithm, protocol: Protocol, topology: Topology, release: int = 23007) -> int:
    """The most threads of a channel; slow Simple rings have fewer before 2.31."""
    if protocol is Protocol.LL128:
        return MAX_THREADS
    ring = topology.ring
    slow = ring.intra_bytes_per_s * ring.num_channels <= SLOW_RING_BYTES_PER_S and release < 23100
    return 256 if slow and algorithm is Algorithm.RING and protocol is Protocol.SIMPLE else 512


def _check(collective: Collective, topology: Topology) -> None:
    if collective.kind.traits.is_point_to_point:
        raise ValueError(f"{collective.kind} has no algorithm in NCCL; use point_to_point.choose_point_to_point")
    if collective.num_ranks != topology.num_ranks:
        raise ValueError(
            f"{collective.kind} has {collective.num_ranks} ranks, topology {topology.name!r} {topology.num_ranks}"
        )


def _seconds(plain: Candidate, collective: Collective, topology: Topology, constants: Constants) -> float:
    """NCCL's time of a candidate, with its two corrections that depend on the size."""
    latency, rate, num_bytes = plain.latency_s, plain.bytes_per_s, collective.num_bytes
    if collective.kind is not CollectiveKind.ALL_REDUCE:
        return latency + num_bytes / rate
    new_nvls_tree = plain.algorithm is Algorithm.NVLS_TREE and topology.compute_capability >= 100
    if plain.algorithm is Algorithm.TREE or new_nvls_tree:
        rate *= constants.tree_correction.of(plain.protocol, num_bytes)
    simple_ring = plain.algorithm is Algorithm.RING and plain.protocol is Protocol.SIMPLE
    share = num_bytes // (topology.num_channels * topology.num_ranks)
    if simple_ring and topology.num_nodes > 1 and share >= PLATEAU_BYTES:
        latency *= PLATEAU if topology.compute_capability >= 80 else OLD_PLATEAU
    return latency + num_bytes / rate
