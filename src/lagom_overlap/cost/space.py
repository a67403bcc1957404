"""What may be tried for one collective in the simulator: NCCL's choices, cut down to what a job allows.

The first subspace is that of the untouched default. Threads stay with NCCL unless a job names them (the paper's
section 3.2: their effect is negligible). Of transports copy engines are modelled, where a job asks for them: one more
subspace, of one configuration, for the collectives that they carry. The others keep the transport of their channels,
which no configuration names.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

from lagom_overlap.collective import (
    Algorithm,
    Collective,
    CollectiveKind,
    CommConfig,
    ConfigSpace,
    Protocol,
    SpaceLimits,
    Subspace,
    Transport,
    chunk_bytes_of_slice,
)
from lagom_overlap.cost.nccl.choice import MAX_THREADS, WARP
from lagom_overlap.cost.nccl.copy_engine import copy_engine_available
from lagom_overlap.cost.nccl.machines import on_topology
from lagom_overlap.cost.nccl_algorithms import algorithms_of, largest_chunk_bytes, most_channels, protocols_of
from lagom_overlap.cost.profile import Collectives
from lagom_overlap.errors import SpaceError
from lagom_overlap.hardware import Cluster
from lagom_overlap.units import KIB, MIB

_T = TypeVar("_T")

NO_LIMITS: Final = SpaceLimits()

NUM_CHANNELS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Powers of two up to NCCL's MAXCHANNELS of today, where the communicator has as many."""
PAPER_SLICES: Final = (684 * KIB, 1366 * KIB)
"""The slices that the Lagom paper reports (section 4.3)."""
CHUNK_BYTES: Final = tuple(
    sorted({*(32 * KIB << i for i in range(6)), 2 * MIB, *(chunk_bytes_of_slice(size) for size in PAPER_SLICES)})
)
"""32 KiB to 1 MiB by doubling, the chunks of the paper's slices (1366 and 1368 KiB), 2 MiB."""
MIN_THREADS: Final = 2 * WARP
"""Whole warps, from two to NCCL_MAX_NTHREADS."""


def max_threads(algorithm: Algorithm | None, protocol: Protocol) -> int:
    """The most threads of a block: 640, of which a Simple ring leaves a warp to synchronisation (608)."""
    return 608 if algorithm is Algorithm.RING and protocol is Protocol.SIMPLE else MAX_THREADS


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) if value is not None else "none" for value in values)


def _chosen(knob: str, asked: Sequence[_T] | None, offered: Sequence[_T], what: str) -> list[_T]:
    """What is offered and asked for, in the order offered."""
    if asked is None:
        return list(offered)
    chosen = [value for value in offered if value in asked]
    if not chosen:
        raise SpaceError(f"{knob} allows only {_listed(asked)}, but {what} has {_listed(offered)}")
    return chosen


def _channels(asked: Sequence[int] | None, default: int, num_sms: int, gpu: str) -> tuple[int, ...]:
    values = sorted(set(asked)) if asked is not None else sorted({*NUM_CHANNELS, default})
    values = values if asked is not None else [count for count in values if count < num_sms]
    for value in values:
        if not 1 <= value < num_sms:
            raise SpaceError(f"num_channels allows {value}; on {gpu} (simulated) it must lie in 1..{num_sms - 1}")
    if not values:
        raise SpaceError("num_channels allows no value")
    return tuple(values)


def _threads(asked: Sequence[int] | None) -> tuple[int, ...] | None:
    if asked is None:
        return None
    for value in asked:
        if not MIN_THREADS <= value <= MAX_THREADS or value % WARP:
            raise SpaceError(
                f"num_threads allows {value}; it must be a multiple of {WARP} in {MIN_THREADS}..{MAX_THREADS}"
            )
    return tuple(sorted(set(asked)))


def _chunks(asked: Sequence[int] | None, kind: CollectiveKind) -> tuple[int, ...]:
    if asked is None:
        return CHUNK_BYTES
    for value in asked:
        if not 1 <= value <= 2 * MIB:
            raise SpaceError(f"chunk_bytes allows {value}; for {kind} (simulated) it must lie in 1..{2 * MIB}")
    return tuple(sorted(set(asked)))


def _channel_transport(cluster: Cluster) -> Transport:
    """How channels cross between two GPUs of a node: through host memory where the FIFO lies there, else directly."""
    return Transport.SHM if cluster.intra.host_fifo else Transport.P2P


def _check_transports(collective: Collective, cluster: Cluster, transports: Sequence[Transport]) -> None:
    """Refuses transports that are not there, and copy engines alone where they cannot carry the collective.

    Raises:
        SpaceError: so.
    """
    offered = (_channel_transport(cluster), Transport.COPY_ENGINE)
    if not transports or not set(transports) <= set(offered):
        raise SpaceError(
            f"transports allows {_listed(transports) or 'no value'}, "
            f"but {cluster.name!r} (simulated) has {_listed(offered)}"
        )
    if set(transports) == {Transport.COPY_ENGINE} and not _has_copy_engine(collective, cluster):
        raise SpaceError(
            f"transports allows only {Transport.COPY_ENGINE}, which does not carry {collective.kind} of "
            f"{collective.num_ranks} ranks on {cluster.name!r}: all-gathers and all-to-alls of one node's NVLink"
        )


def _has_copy_engine(collective: Collective, cluster: Cluster) -> bool:
    return copy_engine_available(collective.kind, on_topology(collective, cluster)[1])


def _ways(
    collective: Collective,
    cluster: Cluster,
    collectives: Collectives,
    default: CommConfig,
    limits: SpaceLimits,
) -> list[tuple[Algorithm | None, Protocol]]:
    """Algorithms and protocols that are offered and asked for, the default's first."""
    kind = collective.kind
    own = algorithms_of(collective, cluster, collectives)
    algorithms = list(own) if own == (None,) else _chosen("algorithms", limits.algorithms, own, kind)
    wires_of = {way: protocols_of(collective, way, cluster, collectives) for way in algorithms}
    offered = list(dict.fromkeys(wire for way in algorithms for wire in wires_of[way]))
    wires = _chosen("protocols", limits.protocols, offered, f"{kind} over {cluster.intra.kind}")
    ways = [(way, wire) for way in algorithms for wire in wires if wire in wires_of[way]]
    return sorted(ways, key=lambda way: way != (default.algorithm, default.protocol))


def collective_space(
    collective: Collective,
    cluster: Cluster,
    collectives: Collectives,
    limits: SpaceLimits,
    *,
    default: CommConfig,
) -> ConfigSpace:
    """The space of a collective on a cluster within the limits given.

    `default` is what the engine does untouched: its channels and chunk are among a knob's own values. A limit on
    algorithms does not touch point-to-point collectives, which have none; copy engines next to channels touch only what
    they carry. A chunk or thread count that a protocol
    cannot take is left out of its subspaces; a subspace without values is dropped.

    Raises:
        SpaceError: if a value can never be set, or nothing is left.
    """
    copied: tuple[Subspace, ...] = ()
    if limits.transports is not None:
        _check_transports(collective, cluster, limits.transports)
        if Transport.COPY_ENGINE in limits.transports and _has_copy_engine(collective, cluster):
            copied = (Subspace(transport=Transport.COPY_ENGINE),)
        if _channel_transport(cluster) not in limits.transports:
            return ConfigSpace(copied)
    kind, intra = collective.kind, cluster.intra.kind
    ways = _ways(collective, cluster, collectives, default, limits)
    channels = _channels(limits.num_channels, default.num_channels or 1, cluster.gpu.num_sms, cluster.gpu.name)
    threads = _threads(limits.num_threads)
    chunks = _chunks(limits.chunk_bytes, kind)
    subspaces = []
    for way, wire in ways:
        largest = largest_chunk_bytes(kind, way, wire, intra)
        fitting = {size for size in chunks if size <= largest}
        if limits.chunk_bytes is None:
            fitting.add(largest)
            fitting |= (
                {default.chunk_bytes or largest} if (way, wire) == (default.algorithm, default.protocol) else set()
            )
        # More than the communicator has would run as what it has; a job that names them is taken at its word.
        most = most_channels(collective, way, cluster, collectives)
        open_channels = channels if limits.num_channels is not None else tuple(n for n in channels if n <= most)
        warps = None if threads is None else tuple(n for n in threads if n <= max_threads(way, wire))
        if fitting and warps != ():
            subspaces.append(
                Subspace(
                    algorithm=way,
                    protocol=wire,
                    num_channels=open_channels,
                    num_threads=warps or (None,),
                    chunk_bytes=tuple(sorted(fitting)),
                )
            )
    if not subspaces:
        sizes = max(largest_chunk_bytes(kind, way, wire, intra) for way, wire in ways)
        most = max(max_threads(way, wire) for way, wire in ways)
        raise SpaceError(
            f"nothing is left to try for {kind}: with {_listed([way for way, _ in ways])} and "
            f"{_listed([wire for _, wire in ways])} a chunk has at most {sizes} bytes (allowed: {_listed(chunks)}), "
            f"a block at most {most} threads (allowed: {_listed(threads) if threads else 'any'})"
        )
    return ConfigSpace((*subspaces, *copied))
