"""HolisticTraceAnalysis's figures (MIT, release 0.5.0), for comparison with reports that use them.

Its conventions, found by running it and reading its output:
- GPU events are kernels, copies and sets; communication is what matches `^nccl.*Kernel`, memory `^Memcpy|^Memset`, all
  else computes, copies between GPUs and foreign collectives included;
- start = ceil(ts), end = floor(ts + dur) in whole microseconds (events shorter than that may end before they start);
- with more than one profiler step only events launched before the last step begins are kept, and those without a known
  launch are dropped;
- overlap = |union(comm) n union(compute)| / |union(comm)|; idle = span - |union(all)|; non_compute = span - idle - compute.

The rounding understates overlap and idle of nanosecond traces; our own figures are exact.
"""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.analysis.intervals import Intervals
from lagom_overlap.trace.gpu_trace import NO_TIME, GpuTrace, Int64

_COMM: Final = re.compile(r"^nccl.*Kernel")
_MEMORY: Final = re.compile(r"^Memcpy|^Memset")
_US: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HtaFigures:
    """What HTA prints for a rank, in microseconds (whole unless `rounded` is off) and per cent."""

    overlap_pct: float | None
    idle_us: float
    compute_us: float
    non_compute_us: float
    span_us: float
    comm_us: float
    overlap_us: float


def _kept(trace: GpuTrace) -> Int64:
    events = trace.events
    if len({step.number for step in trace.steps}) < 2:
        return np.arange(len(events))
    last_ns = max(step.start_ns for step in trace.steps)
    return np.flatnonzero((events.launch_ns != NO_TIME) & (events.launch_ns < last_ns))


def hta_figures(trace: GpuTrace, *, rounded: bool = True) -> HtaFigures:
    """HTA's overlap and temporal breakdown of one rank."""
    events = trace.events
    rows = _kept(trace)
    start, end = events.start_ns[rows], events.end_ns[rows]
    if rounded:
        start, end = -(-start // _US) * _US, end // _US * _US
    codes = np.array(
        [0 if _COMM.match(name) else 1 if _MEMORY.match(name) else 2 for name in events.names], dtype=np.int64
    )[events.name[rows]]
    comm, compute = (Intervals.union(start[codes == code], end[codes == code]) for code in (0, 2))
    overlap_ns = comm.intersect(compute).length_ns
    span_ns = int(end.max() - start.min()) if len(rows) else 0
    idle_ns = span_ns - Intervals.union(start, end).length_ns
    return HtaFigures(
        overlap_pct=100 * overlap_ns / comm.length_ns if comm.length_ns else None,
        idle_us=idle_ns / _US,
        compute_us=compute.length_ns / _US,
        non_compute_us=(span_ns - idle_ns - compute.length_ns) / _US,
        span_us=span_ns / _US,
        comm_us=comm.length_ns / _US,
        overlap_us=overlap_ns / _US,
    )
