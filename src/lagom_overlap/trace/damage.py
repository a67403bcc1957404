"""What profilers get wrong in a GPU's timeline: stray times, durations that run over what follows, lost kernels.

A stream runs one kernel after the other. Where a kernel's recorded end lies behind the whole of a later kernel of its
stream, its duration is wrong (roctracer and rocprofiler write such): it is taken to have run as long as its equals do
in the median, at most until the next kernel of its stream. Kernels of one CUDA graph share a correlation and do run at
once, so they are left alone; so is a kernel that is only begun before the end of the one before (programmatic
dependent launch).
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from lagom_overlap.trace.gpu_trace import (
    NO_TIME,
    NS_PER_S,
    UNKNOWN,
    Bools,
    GpuEvents,
    Int64,
    ProfilerStep,
    only_rows,
)
from lagom_overlap.units import format_seconds

JUMP_NS: Final = 10 * NS_PER_S
"""No training step waits as long for anything: a clock jumped. Chosen, not measured."""
JUMP_RATIO: Final = 10
"""The gap must also be so many times as long as all the rest."""
_MOST_STRAYS: Final = 0.05
"""Of more events than this share, apart from the others in time, either part may be the right one: a clock jumped."""
_FEW: Final = 8
"""Fewer are taken for damage even in a short trace, of which they are a larger share."""
_MOST_OVER: Final = 0.2
"""Where more kernels than this share end after later ones, what is called a stream does not run one after the other."""
_DAY_NS: Final = 86_400 * NS_PER_S
"""A kernel does not start a day after its launch: one of the two times is damaged."""
_MAX_NAME: Final = 60
"""Characters of a kernel's name in a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """The events without what cannot be, the rows of the recorded ones that they are, and a line for each finding."""

    events: GpuEvents
    rows: Int64
    warnings: tuple[str, ...]


def mend(events: GpuEvents) -> Mended:
    """The events with stray times left out, and with durations that run over later kernels of their stream cut."""
    kept = np.flatnonzero(~_strays(events))
    warnings = []
    if len(kept) < len(events):
        num = len(events) - len(kept)
        warnings.append(
            f"{num} GPU event{'s' if num > 1 else ''} with a time of 0 or far from all others "
            f"{'were' if num > 1 else 'was'} dropped: no figure counts {'them' if num > 1 else 'it'}"
        )
        events = only_rows(events, kept)
    launched = (events.launch_ns != NO_TIME) & (np.abs(events.start_ns - events.launch_ns) <= _DAY_NS)
    events = replace(events, launch_ns=np.where(launched, events.launch_ns, NO_TIME))
    end_ns = _right_ends(events)
    wrong = np.flatnonzero(end_ns != events.end_ns)
    if len(wrong):
        excess_ns = int((events.end_ns[wrong] - end_ns[wrong]).sum())
        longest = int(wrong[np.argmax(events.end_ns[wrong] - end_ns[wrong])])
        name = events.names[int(events.name[longest])]
        several = len(wrong) > 1
        shown = name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
        warnings.append(
            f"{len(wrong)} kernel{'s end' if several else ' ends'} after later ones of its stream, which cannot be: "
            f"counted as long as equal ones, or until the next one, {format_seconds(excess_ns / NS_PER_S)} less in all "
            f"({'the longest: ' if several else ''}{shown})"
        )
        events = replace(events, end_ns=end_ns)
    return Mended(events=events, rows=kept, warnings=tuple(warnings))


def _strays(events: GpuEvents) -> Bools:
    """Which events have a time that is none: 0 where others begin much later, or far from nearly all of them."""
    start = events.start_ns
    stray = np.zeros(len(events), dtype=np.bool_)
    real = start[start != 0]
    if len(real) and len(real) < len(start):
        # A kernel of no length at 0 was never timed, also where times count from the profiler's start.
        stray |= (start == 0) & ((events.end_ns == 0) | bool(np.abs(real).min() > JUMP_NS))
    while (left := np.flatnonzero(~stray)).size > 1:
        reach = np.maximum.accumulate(events.end_ns[left])
        gaps = start[left][1:] - reach[:-1]
        at = int(np.argmax(gaps))
        rest_ns = int(reach[-1] - start[left][0]) - int(gaps[at])
        few, where = min((at + 1, left[: at + 1]), (len(left) - at - 1, left[at + 1 :]), key=lambda part: part[0])
        if gaps[at] <= JUMP_NS or few > max(1, _MOST_STRAYS * len(events)) or 2 * few >= len(left):
            break
        if gaps[at] <= JUMP_RATIO * rest_ns:
            break
        stray[where] = True
    return stray


def _right_ends(events: GpuEvents) -> Int64:
    """The ends, those of kernels that run over a whole later kernel of their stream put right."""
    end = events.end_ns.copy()
    correlated, count = np.unique(events.correlation, return_counts=True)
    in_graph = np.isin(events.correlation, correlated[(count > 1) & (correlated != UNKNOWN)])
    alone = (events.memory_op == 0) & ~in_graph & (events.end_ns > events.start_ns)
    for stream in np.unique(events.stream):
        if events.streams[int(stream)] == f"stream {UNKNOWN}":
            continue
        rows = np.flatnonzero(alone & (events.stream == stream))
        if len(rows) < 2:
            continue
        soonest = np.minimum.accumulate(events.end_ns[rows][::-1])[::-1]
        begins_later = events.start_ns[rows][1:] > events.start_ns[rows][:-1]
        is_over = np.append((events.end_ns[rows][:-1] > soonest[1:]) & begins_later, [False])
        if np.count_nonzero(is_over) > max(_FEW, _MOST_OVER * len(rows)):
            continue
        for row in rows[is_over].tolist():
            limit = int(events.start_ns[rows[np.searchsorted(events.start_ns[rows], events.start_ns[row], "right")]])
            equal = rows[
                (events.name[rows] == events.name[row])
                & np.all(events.grid[rows] == events.grid[row], axis=1)
                & ~is_over
            ]
            usual = int(np.median(events.end_ns[equal] - events.start_ns[equal])) if len(equal) else _DAY_NS
            end[row] = min(limit, int(events.start_ns[row]) + usual)
    return end


def lost_launches(steps: tuple[ProfilerStep, ...], lost_ns: tuple[int, ...], num_launches: int) -> tuple[str, ...]:
    """A line where kernels are missing that the CPU launched; of a launch into a graph being captured there is none."""
    if not lost_ns:
        return ()
    within = {step.number for step in steps for at in lost_ns if step.start_ns <= at < step.end_ns}
    where = ""
    if within and len(within) < len(steps):
        where = f", in step{'s' if len(within) > 1 else ''} {', '.join(map(str, sorted(within)[:5]))}"
    return (
        f"{len(lost_ns)} of {num_launches} kernel launches have no GPU event{where}: the profiler dropped kernels, or "
        "a graph was captured; computation and communication that they stand for is missing in the figures",
    )
