"""What may be tried for one collective in the simulator: NCCL's choices, cut down to what a job allows.

The first subspace is the one of the untouched default. Threads stay with NCCL unless a job names them (the paper's
section 3.2: their effect is negligible). Transport is not modelled.
"""

from collections.abc import Sequence
from itertools import product
from typing import Final, TypeVar

from lagom_overlap.collective import (
    Algorithm,
    Collective,
    CollectiveKind,
    ConfigSpace,
    Protocol,
    Subspace,
    Transport,
    chunk_bytes_of_slice,
)
from lagom_overlap.cost.communication import algorithms_of, default_chunk_bytes, protocols_of
from lagom_overlap.errors import SpaceError
from lagom_overlap.hardware import Cluster
from lagom_overlap.units import KIB, MIB

_T = TypeVar("_T")

NUM_CHANNELS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Powers of two up to NCCL's MAXCHANNELS of today; 2.18 allows 32, AutoCCL's fork 128."""
PAPER_SLICES: Final = (684 * KIB, 1366 * KIB)
"""The slices that the Lagom paper reports (section 4.3)."""
CHUNK_BYTES: Final = tuple(
    sorted({*(32 * KIB << i for i in range(6)), 2 * MIB, *(chunk_bytes_of_slice(size) for size in PAPER_SLICES)})
)
"""32 KiB to 1 MiB by doubling, the chunks of the paper's slices (1366 and 1368 KiB), 2 MiB."""
THREAD_STEP: Final = 32
MIN_THREADS: Final = 64
NCCL_MAX_THREADS: Final = 640


def max_threads(algorithm: Algorithm | None, protocol: Protocol) -> int:
    """The most threads of a block: 640, but Simple keeps a warp for synchronisation: 608 in a ring, 512 in a tree."""
    if protocol is not Protocol.SIMPLE:
        return NCCL_MAX_THREADS
    return 512 if algorithm is Algorithm.TREE else 608


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


def _channels(asked: Sequence[int] | None, num_sms: int, gpu: str) -> tuple[int, ...]:
    values = sorted(set(asked)) if asked is not None else [count for count in NUM_CHANNELS if count < num_sms]
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
        if not MIN_THREADS <= value <= NCCL_MAX_THREADS or value % THREAD_STEP:
            raise SpaceError(
                f"num_threads allows {value}; "
                f"it must be a multiple of {THREAD_STEP} in {MIN_THREADS}..{NCCL_MAX_THREADS}"
            )
    return tuple(sorted(set(asked)))


def _chunks(asked: Sequence[int] | None, kind: CollectiveKind) -> tuple[int, ...]:
    if asked is None:
        return CHUNK_BYTES
    for value in asked:
        if not 1 <= value <= 2 * MIB:
            raise SpaceError(f"chunk_bytes allows {value}; for {kind} (simulated) it must lie in 1..{2 * MIB}")
    return tuple(sorted(set(asked)))


def collective_space(
    collective: Collective,
    cluster: Cluster,
    *,
    algorithms: Sequence[Algorithm] | None = None,
    protocols: Sequence[Protocol] | None = None,
    transports: Sequence[Transport] | None = None,
    num_channels: Sequence[int] | None = None,
    num_threads: Sequence[int] | None = None,
    chunk_bytes: Sequence[int] | None = None,
) -> ConfigSpace:
    """The space of a collective on a cluster within the limits given; None leaves a knob's own values.

    A limit on algorithms does not touch point-to-point collectives, which have none. A chunk or thread count that a
    protocol cannot take is left out of its subspaces; a subspace without values is dropped.

    Raises:
        SpaceError: if a value can never be set, or nothing is left.
    """
    kind, intra = collective.kind, cluster.intra.kind
    if transports is not None:
        raise SpaceError(f"transports allows {_listed(transports)}, but the simulated engine has no transport knob")
    own = algorithms_of(kind)
    ways = list(own) if own == (None,) else _chosen("algorithms", algorithms, own, kind)
    wires = _chosen("protocols", protocols, protocols_of(kind, intra), f"{kind} over {intra}")
    channels = _channels(num_channels, cluster.gpu.num_sms, cluster.gpu.name)
    threads = _threads(num_threads)
    chunks = _chunks(chunk_bytes, kind)
    subspaces = []
    for way, wire in product(ways, wires):
        largest = default_chunk_bytes(kind, way, wire, intra)
        fitting = tuple(size for size in chunks if size <= largest)
        if chunk_bytes is None and largest not in fitting:
            fitting += (largest,)
        warps = None if threads is None else tuple(n for n in threads if n <= max_threads(way, wire))
        if fitting and warps != ():
            subspaces.append(
                Subspace(
                    algorithm=way,
                    protocol=wire,
                    num_channels=channels,
                    num_threads=warps or (None,),
                    chunk_bytes=fitting,
                )
            )
    if not subspaces:
        sizes = max(default_chunk_bytes(kind, way, wire, intra) for way, wire in product(ways, wires))
        most = max(max_threads(way, wire) for way, wire in product(ways, wires))
        raise SpaceError(
            f"nothing is left to try for {kind}: with {_listed(ways)} and {_listed(wires)} a chunk has at most "
            f"{sizes} bytes (allowed: {_listed(chunks)}), a block at most {most} threads (allowed: "
            f"{_listed(threads) if threads else 'any'})"
        )
    return ConfigSpace(tuple(subspaces))
