"""Launches that block: the CPU hangs in a call that puts a kernel or a collective on a stream.

A launch only queues a kernel. It takes long where the queue is full (CUDA holds about a thousand launches: the CPU is
far ahead, the GPU has work, and nothing is lost), where the kernel runs for the first time and its module is loaded, or
where something else holds the driver; a collective's call also where its communicator is made first. Then the GPU may
run dry: time of such a call in which nothing runs on the GPU is what it costs.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.analysis.intervals import Intervals
from lagom_overlap.analysis.measures import Occupation
from lagom_overlap.trace.gpu_trace import NO_TIME, GpuTrace, Int64, SlowLaunch

_FULL: Final = 1000
"""CUDA's queue of launches holds 1,024; a few may have begun since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingLaunches:
    """The slow launches of a rank, of those within its GPU's time.

    `blocked_ns` is the time within any of them, `idle_ns` what of it the GPU did nothing. The `idle_*_ns` split the
    latter by cause: calls of collectives, kernels that run for the first time, anything else. `num_full` found the
    queue full. `longest` is None where there are none.
    """

    num: int = 0
    num_full: int = 0
    blocked_ns: int = 0
    idle_ns: int = 0
    idle_collective_ns: int = 0
    idle_first_ns: int = 0
    longest: SlowLaunch | None = None

    @property
    def idle_other_ns(self) -> int:
        """The idle time that neither a collective's call nor a first run explains."""
        return self.idle_ns - self.idle_collective_ns - self.idle_first_ns


def blocking_launches(trace: GpuTrace, occupation: Occupation) -> BlockingLaunches:
    """What a rank's slow launches cost."""
    events = trace.events
    if not len(events) or not trace.slow_launches:
        return BlockingLaunches()
    begin, end = int(events.start_ns[0]), int(events.end_ns.max())
    calls = [call for call in trace.slow_launches if call.start_ns < end and call.end_ns > begin]
    if not calls:
        return BlockingLaunches()
    first_runs = _first_runs(trace)
    full = _queued(trace, np.array([call.start_ns for call in calls], dtype=np.int64)) >= _FULL
    idle = occupation.busy.gaps(begin, end)
    collective = _union([call for call in calls if call.is_collective])
    first = _union([call for call in calls if call.correlation in first_runs])
    blocked = _union(calls).clip(begin, end)
    blocked_idle = blocked.intersect(idle)
    by_collective = blocked_idle.intersect(collective)
    return BlockingLaunches(
        num=len(calls),
        num_full=int(np.count_nonzero(full)),
        blocked_ns=blocked.length_ns,
        idle_ns=blocked_idle.length_ns,
        idle_collective_ns=by_collective.length_ns,
        idle_first_ns=blocked_idle.intersect(first).length_ns - by_collective.intersect(first).length_ns,
        longest=max(calls, key=lambda call: call.end_ns - call.start_ns),
    )


def _union(calls: list[SlowLaunch]) -> Intervals:
    return Intervals.union(
        np.array([call.start_ns for call in calls], dtype=np.int64),
        np.array([call.end_ns for call in calls], dtype=np.int64),
    )


def _first_runs(trace: GpuTrace) -> frozenset[int]:
    """The correlations of the first run of every kernel in the trace."""
    _, first = np.unique(trace.events.name, return_index=True)
    return frozenset(trace.events.correlation[first].tolist())


def _queued(trace: GpuTrace, at_ns: Int64) -> Int64:
    """How many launched events had not begun at each time."""
    known = trace.events.launch_ns != NO_TIME
    launched, begun = np.sort(trace.events.launch_ns[known]), np.sort(trace.events.start_ns[known])
    queued: Int64 = np.searchsorted(launched, at_ns, side="left") - np.searchsorted(begun, at_ns, side="right")
    return queued
