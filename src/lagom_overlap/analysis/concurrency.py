"""Which collectives run during which kernels of a rank, and for how long."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from lagom_overlap.trace.gpu_trace import UNKNOWN, GpuTrace, Int64

MAX_OVERLAPS: Final = 64
"""At most this many collectives are kept per run, longest overlap first: a damaged trace may show thousands."""
_MAX_PAIRS: Final = 2**18
"""Pairs that are held in memory at once."""


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Pairs of a kernel run and a concurrent collective, run by run, of each run the longest pair first.

    `run` is an index among the runs asked for, `call` among the trace's calls; `shared_ns` is above 0.
    """

    run: Int64
    call: Int64
    shared_ns: Int64

    @property
    def longest(self) -> Int64:
        """The index of each run's first pair."""
        return np.flatnonzero(np.diff(self.run, prepend=UNKNOWN))


def overlaps_of(trace: GpuTrace, rows: Int64) -> Overlaps:
    """The collectives during some kernel runs (rows of the events); of equally long ones the first call comes first."""
    events = trace.events
    timed = np.array([index for index, call in enumerate(trace.calls) if call.event != UNKNOWN], dtype=np.int64)
    comm = np.array([trace.calls[index].event for index in timed.tolist()], dtype=np.int64)
    order = np.argsort(events.start_ns[comm], kind="stable")
    start, end, call = events.start_ns[comm[order]], events.end_ns[comm[order]], timed[order]
    reach = np.maximum.accumulate(end) if len(end) else end
    low = np.searchsorted(reach, events.start_ns[rows], side="right")
    high = np.searchsorted(start, events.end_ns[rows], side="left")
    count = np.maximum(high - low, 0)
    parts = []
    for first, last in _parts(count):
        run = np.repeat(np.arange(first, last), count[first:last])
        before = np.cumsum(count[first:last]) - count[first:last]
        at = np.arange(len(run)) + np.repeat(low[first:last] - before, count[first:last])
        shared = np.minimum(end[at], events.end_ns[rows[run]]) - np.maximum(start[at], events.start_ns[rows[run]])
        near = np.flatnonzero(shared > 0)
        near = near[np.lexsort((call[at[near]], -shared[near], run[near]))]
        new = np.flatnonzero(np.diff(run[near], prepend=UNKNOWN))
        place = np.arange(len(near)) - np.repeat(new, np.diff(new, append=len(near)))
        near = near[place < MAX_OVERLAPS]
        parts.append((run[near], call[at[near]], shared[near]))
    none = np.empty(0, dtype=np.int64)
    return Overlaps(*(np.concatenate(column) for column in zip((none, none, none), *parts, strict=True)))


def _parts(count: Int64) -> list[tuple[int, int]]:
    """Ranges of runs whose pairs together are few enough, at least one run each."""
    ends = np.cumsum(count)
    edges = [0]
    while edges[-1] < len(count):
        done = int(ends[edges[-1] - 1]) if edges[-1] else 0
        edges.append(max(edges[-1] + 1, int(np.searchsorted(ends, done + _MAX_PAIRS, side="right"))))
    return list(pairwise(edges))
