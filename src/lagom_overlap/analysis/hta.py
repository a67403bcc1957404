"""HolisticTraceAnalysis's figures (MIT, release 0.5.0), for comparison with reports that use them.

Its conventions, found by running it and reading its output:
- a GPU event is whatever carries a stream number: kernels, copies, sets, but also Triton's CPU operators;
- communication is what matches `^nccl.*Kernel`, memory `^Memcpy|^Memset|^dma`; all else computes, copies between GPUs
  and foreign collectives included, unless its name contains "Sync" or "Memcpy";
- start = ceil(ts), end = floor(ts + dur) in whole microseconds, in float64; an event within one microsecond ends 1 us
  before it starts, and where nothing else runs it takes that off the time in which something does;
- with more than one profiler step only events launched before the last step begins are kept, and those without a known
  launch are dropped; a step marked on the GPU's timeline counts as one of the CPU's, so that the last may begin later;
- overlap = |union(comm) n union(compute)| / |union(comm)|; idle = span - |union(all)|; non_compute = span - idle -
  compute.

The rounding understates overlap and overstates idle time of nanosecond traces; our own figures are exact.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from lagom_overlap.analysis.intervals import Intervals
from lagom_overlap.trace.gpu_trace import NO_TIME, NS_PER_US, GpuTrace, Int64


class HtaKind(StrEnum):
    """What an event is by its name."""

    COMM = "comm"
    MEMORY = "memory"
    COMPUTE = "compute"
    OTHER = "other"


_KINDS: Final = (
    (re.compile(r"^nccl.*Kernel"), HtaKind.COMM),
    (re.compile(r"^Memcpy|^Memset|^dma"), HtaKind.MEMORY),
    (re.compile(r".*Memcpy|.*Sync"), HtaKind.OTHER),
)


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


def hta_kind(name: str) -> HtaKind:
    """What an event of this name is to HTA."""
    return next((kind for pattern, kind in _KINDS if pattern.match(name)), HtaKind.COMPUTE)


def _rounded(start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
    """Start and end in whole microseconds as HTA rounds them, back in nanoseconds; whole starts are left alone."""
    if not np.any(start_ns % NS_PER_US):
        return start_ns, end_ns
    start_us, length_us = start_ns // NS_PER_US + start_ns % NS_PER_US / NS_PER_US, (end_ns - start_ns) / NS_PER_US
    start = np.ceil(start_us).astype(np.int64) * NS_PER_US
    return start, np.floor(start_us + length_us).astype(np.int64) * NS_PER_US


def _busy_ns(start: Int64, end: Int64) -> int:
    """The time in which something runs, as HTA adds it up: pieces below 0 count, too."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    begins, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], begins[1:] > reach[:-1]))
    return int(reach[np.append(opens[1:], True)].sum() - begins[opens].sum())


def hta_figures(trace: GpuTrace, *, rounded: bool = True) -> HtaFigures:
    """HTA's overlap and temporal breakdown of one rank; `rounded=False` is its HTA_DISABLE_NS_ROUNDING=1."""
    events, marked = trace.events, trace.marked
    start = np.concatenate((events.start_ns, np.array([m.start_ns for m in marked], dtype=np.int64)))
    end = np.concatenate((events.end_ns, np.array([m.end_ns for m in marked], dtype=np.int64)))
    launch = np.concatenate((events.launch_ns, np.array([m.launch_ns for m in marked], dtype=np.int64)))
    order = {kind: code for code, kind in enumerate(HtaKind)}
    of_name = np.array([order[hta_kind(name)] for name in events.names], dtype=np.int64)
    codes = np.concatenate((of_name[events.name], np.array([order[hta_kind(m.name)] for m in marked], dtype=np.int64)))
    if len({step.number for step in trace.steps}) > 1:
        last_ns = max(*(step.start_ns for step in trace.steps), *trace.gpu_step_ns)
        kept = (launch != NO_TIME) & (launch < last_ns)
        start, end, codes = start[kept], end[kept], codes[kept]
    if rounded:
        start, end = _rounded(start, end)
    of_kind = [codes == order[kind] for kind in (HtaKind.COMM, HtaKind.COMPUTE)]
    comm, compute = (Intervals.union(start[rows], end[rows]) for rows in of_kind)
    comm_ns, compute_ns = (_busy_ns(start[rows], end[rows]) for rows in of_kind)
    overlap_ns = comm.intersect(compute).length_ns
    span_ns = int(end.max() - start.min()) if len(start) else 0
    idle_ns = span_ns - _busy_ns(start, end)
    return HtaFigures(
        overlap_pct=100 * overlap_ns / comm_ns if comm_ns else None,
        idle_us=idle_ns / NS_PER_US,
        compute_us=compute_ns / NS_PER_US,
        non_compute_us=(span_ns - idle_ns - compute_ns) / NS_PER_US,
        span_us=span_ns / NS_PER_US,
        comm_us=comm_ns / NS_PER_US,
        overlap_us=overlap_ns / NS_PER_US,
    )
