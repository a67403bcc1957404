"""The place of each call of a trace in its step, as the plug-in counts it in a running job (`collective/sites.py`).

At run time a call is known by its communicator's sequence of calls of 1 MiB and more. The same sequence is in a trace,
step by step. Where most steps of all ranks have the same one, it is the communicator's cycle, and a call of such a step
has a place in it; a call of another step (cut off by the profiler, an evaluation) has none. A cycle in which every kind
and size comes more than once gives no places either: the plug-in could begin in its middle and never learn of it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.collective.size_class import is_small
from lagom_overlap.trace.gpu_trace import UNKNOWN, CommCall, GpuTrace

_MAJORITY: Final = 0.5
"""Of a window's steps that must agree on the order of calls: otherwise no order is the step's."""

Role = tuple[str, int]
"""A communicator's name and number of ranks: what it has in common with its like on other ranks."""
CallCycle = tuple[tuple[CollectiveKind, int], ...]
"""Kind and bytes of the calls of a step, in the order of issue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlaces:
    """The cycles of a job's communicators, and by trace and call its place among the calls of its kind and size.

    `of_calls` has None for a call whose place is not known. A communicator without a cycle is not in `cycles`.
    """

    cycles: Mapping[Role, CallCycle]
    of_calls: tuple[tuple[int | None, ...], ...]


def _key(call: CommCall) -> tuple[CollectiveKind, int]:
    assert call.kind is not None
    return call.kind, call.num_bytes


def _sequences(trace: GpuTrace, windows: Sequence[tuple[int, int]]) -> list[tuple[Role, list[int]]]:
    """For every step and communicator, its calls of 1 MiB and more in the order of issue."""
    by_role: dict[Role, list[int]] = defaultdict(list)
    for at, call in enumerate(trace.calls):
        if call.event != UNKNOWN and call.kind is not None and not is_small(call.num_bytes):
            by_role[call.communicator, call.num_ranks].append(at)
    sequences = []
    for role, calls in by_role.items():
        calls.sort(key=lambda at: (int(trace.events.start_ns[trace.calls[at].event]), at))
        starts = np.array([trace.events.start_ns[trace.calls[at].event] for at in calls], dtype=np.int64)
        for start, end in windows:
            first, last = np.searchsorted(starts, (start, end))
            sequences.append((role, calls[first:last]))
    return sequences


def call_places(traces: Sequence[GpuTrace], windows: Sequence[Sequence[tuple[int, int]]]) -> CallPlaces:
    """The places of all calls; `windows` are start and end (ns) of each trace's steps on the GPU."""
    sequences = [_sequences(trace, window) for trace, window in zip(traces, windows, strict=True)]
    votes: dict[Role, Counter[CallCycle]] = defaultdict(Counter)
    for trace, sequence in zip(traces, sequences, strict=True):
        for role, calls in sequence:
            votes[role][tuple(_key(trace.calls[at]) for at in calls)] += 1
    cycles = {}
    for role, window in votes.items():
        cycle, count = window.most_common(1)[0]
        if count > _MAJORITY * window.total() and 1 in Counter(cycle).values():
            cycles[role] = cycle
    places: list[list[int | None]] = [[None] * len(trace.calls) for trace in traces]
    for trace, sequence, mine in zip(traces, sequences, places, strict=True):
        for role, calls in sequence:
            if cycles.get(role) != tuple(_key(trace.calls[at]) for at in calls):
                continue
            seen: Counter[tuple[CollectiveKind, int]] = Counter()
            for at in calls:
                mine[at] = seen[_key(trace.calls[at])]
                seen[_key(trace.calls[at])] += 1
    return CallPlaces(cycles=cycles, of_calls=tuple(map(tuple, places)))
