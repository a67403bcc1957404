"""The collectives of a job: how long, how exposed, how fast, what they waited for.

Waiting against moving. An NCCL kernel starts when its own rank is ready and ends when the bytes are there, so its
duration contains the wait for the last peer. Over the ranks that ran the same call, the shortest duration is the one
that waited least: it is taken as the time that moves bytes, the rest of every other rank's duration as waiting
(TraceLens's "implicit sync" rule). Which calls are the same on several ranks, `peers.py` tells.

Bus bandwidth is nccl-tests' busbw: wire bytes of a ring over time (`Collective.wire_bytes`), the time being the moving
time where several ranks are given, the whole duration otherwise.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.analysis.measures import Occupation
from lagom_overlap.analysis.peers import CallName, Peers
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.trace.gpu_trace import NS_PER_S, UNKNOWN, CommCall, GpuTrace, Int64, KnobReach

_MIN_RANKS: Final = 2
"""A rank alone sends nothing: there is no rate to tell."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class CollectiveKey:
    """What makes two calls one row: the same operation, communicator, size and launch."""

    op: str
    communicator: str
    num_bytes: int
    num_channels: int
    num_threads: int
    num_ranks: int
    reach: KnobReach
    algorithm: str = ""
    protocol: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """All finished calls of one key over all ranks; times in ns summed over ranks and calls.

    Calls whose duration is not known are counted, and in no time and no bandwidth.
    `exposed_ns` is each call's own time without concurrent computation: calls that are exposed at once each count it.
    `waiting_ns` is None where no call could be matched with its peers; `busbw_bytes_per_s` None where the bytes or the
    number of ranks are unknown.
    """

    key: CollectiveKey
    kind: CollectiveKind | None
    count: int
    total_ns: int
    exposed_ns: int
    waiting_ns: int | None
    median_ns: float
    min_ns: int
    busbw_bytes_per_s: float | None


def key_of(call: CommCall) -> CollectiveKey:
    """The row that a call belongs to."""
    return CollectiveKey(
        op=call.op,
        communicator=call.communicator,
        num_bytes=call.num_bytes,
        num_channels=call.num_channels,
        num_threads=call.num_threads,
        num_ranks=call.num_ranks,
        reach=call.reach,
        algorithm=call.algorithm,
        protocol=call.protocol,
    )


def exposed_of_calls(trace: GpuTrace, occupation: Occupation) -> Int64:
    """Each call's time without concurrent computation; 0 for a call without a timeline."""
    rows = np.array([call.event for call in trace.calls], dtype=np.int64)
    exposed = np.zeros(len(rows), dtype=np.int64)
    timed = rows != UNKNOWN
    start, end = trace.events.start_ns[rows[timed]], trace.events.end_ns[rows[timed]]
    exposed[timed] = end - start - occupation.compute.within(start, end)
    return exposed


def waiting_of_calls(traces: Sequence[GpuTrace], peers: Peers) -> tuple[tuple[int | None, ...], ...]:
    """For every rank and call, the part of its duration that waited for peers; None where no peer is known."""
    shortest: dict[CallName, int] = {}
    for trace, names in zip(traces, peers.names, strict=True):
        for call, name in zip(trace.calls, names, strict=True):
            if name is not None:
                shortest[name] = min(shortest.get(name, call.duration_ns), call.duration_ns)
    return tuple(
        tuple(
            None if name is None else call.duration_ns - shortest[name]
            for call, name in zip(trace.calls, names, strict=True)
        )
        for trace, names in zip(traces, peers.names, strict=True)
    )


def _busbw(key: CollectiveKey, kind: CollectiveKind | None, count: int, moving_ns: int) -> float | None:
    if kind is None or key.num_bytes < 1 or key.num_ranks < _MIN_RANKS or moving_ns < 1:
        return None
    wire = Collective(kind=kind, num_bytes=key.num_bytes, num_ranks=key.num_ranks).wire_bytes
    return wire * count * NS_PER_S / moving_ns


def collective_rows(
    traces: Sequence[GpuTrace],
    exposed: Sequence[Int64],
    waiting: Sequence[tuple[int | None, ...]],
) -> tuple[CollectiveRow, ...]:
    """One row per key, the longest in total first."""
    calls: dict[CollectiveKey, list[tuple[CommCall, int, int | None]]] = defaultdict(list)
    for trace, bare, waited in zip(traces, exposed, waiting, strict=True):
        for call, exposed_ns, waiting_ns in zip(trace.calls, bare.tolist(), waited, strict=True):
            if call.is_finished:
                calls[key_of(call)].append((call, exposed_ns, waiting_ns))
    rows = [_row(key, own_calls) for key, own_calls in calls.items()]
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.key)))


def _row(key: CollectiveKey, calls: list[tuple[CommCall, int, int | None]]) -> CollectiveRow:
    durations = [call.duration_ns for call, _, _ in calls if call.duration_ns] or [0]
    total_ns = sum(durations)
    waits = [wait for _, _, wait in calls if wait is not None]
    waiting_ns = sum(waits) if waits else None  # a call without known peers counts as moving bytes all the time
    kind = calls[0][0].kind
    return CollectiveRow(
        key=key,
        kind=kind,
        count=len(calls),
        total_ns=total_ns,
        exposed_ns=sum(bare for _, bare, _ in calls),
        waiting_ns=waiting_ns,
        median_ns=float(np.median(durations)),
        min_ns=min(durations),
        busbw_bytes_per_s=_busbw(key, kind, len(durations), total_ns - (waiting_ns or 0)),
    )


def unreachable_ns(rows: Sequence[CollectiveRow]) -> int:
    """Communication that no knob of NCCL reaches."""
    return sum(row.total_ns for row in rows if row.key.reach is KnobReach.NONE)
