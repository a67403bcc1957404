"""Everything that is known about a job after its traces were read: what the report shows and advice is drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from lagom_overlap.analysis.call_places import CallPlaces, call_places
from lagom_overlap.analysis.collectives import (
    CollectiveRow,
    collective_rows,
    exposed_of_calls,
    waiting_of_calls,
)
from lagom_overlap.analysis.contention import Contention, contention_of
from lagom_overlap.analysis.hang import Hang, hangs_of
from lagom_overlap.analysis.launches import BlockingLaunches, blocking_launches
from lagom_overlap.analysis.measures import (
    Measures,
    Occupation,
    StepMeasures,
    marked_windows,
    occupation_of,
    step_measures,
    step_of_events,
    whole,
)
from lagom_overlap.analysis.parts import OverlapPart, parts_of
from lagom_overlap.analysis.peers import peers_of
from lagom_overlap.trace.damage import JUMP_NS, JUMP_RATIO
from lagom_overlap.trace.gpu_trace import NS_PER_S, GpuTrace, Int64, only_rows
from lagom_overlap.units import format_percent, format_seconds

_MAX_NAMES: Final = 3
"""Names in a sentence; the others are counted."""
_TORN: Final = 0.1
"""A step that misses this share of its launches is no step."""
_SHOWN: Final = 0.02
"""Launches that block for less of the time are not worth a line."""
_LEAST_STEPS: Final = 0.5
"""A lead-in shorter than this many steps is kept: the figures are then those of the whole trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFindings:
    """One rank: its trace, where its time went, and per call its exposure and waiting (ns, None where unknown)."""

    trace: GpuTrace
    occupation: Occupation
    measures: Measures
    steps: tuple[StepMeasures, ...]
    exposed_ns: Int64
    waiting_ns: tuple[int | None, ...]
    stretched_ns: float
    blocking: BlockingLaunches


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """A job; `places` are those of its calls in a step.

    `hangs` are calls that its ranks never ended, where the files know (flight recorder).
    """

    ranks: tuple[RankFindings, ...]
    rows: tuple[CollectiveRow, ...]
    contention: Contention
    places: CallPlaces
    hangs: tuple[Hang, ...] = ()
    parts: tuple[OverlapPart, ...] = ()
    warnings: tuple[str, ...]

    @property
    def num_windows(self) -> int:
        """Steps over all ranks, at least 1: a sum over the job divided by it is per step of the average rank."""
        return max(1, sum(max(1, len(rank.steps)) for rank in self.ranks))

    @property
    def rank_skew_ns(self) -> float | None:
        """How long a rank's collective waits for the last peer, in the mean; None where no peers are known.

        What `[cost] rank_skew_s` of a job file means: its channels hold their SMs for that long, too.
        """
        waits = [wait for rank in self.ranks for wait in rank.waiting_ns if wait is not None]
        return sum(waits) / len(waits) if waits else None

    @property
    def frameworks(self) -> frozenset[str]:
        """Frameworks that any rank's trace names."""
        return frozenset().union(*(rank.trace.frameworks for rank in self.ranks))


def without_lead_in(trace: GpuTrace) -> GpuTrace:
    """The trace from its first marked step on the GPU on, where half a step or more comes before; a warning says so.

    A program that never waits for its GPU runs ahead of it, often by steps. The profiler then sees the rest of steps
    that began before it did: kernels without a launch, collectives without metadata. Divided by the number of marked
    steps, that work would make each of them look longer than it is.
    """
    if not trace.steps or not len(trace.events):
        return trace
    windows = marked_windows(trace)
    if not windows:
        num = len(trace.steps)
        why = f"none of its {num} marked steps launched a kernel here"
        why = why if num > 1 else "its marked step launched no kernel here"
        return replace(trace, steps=(), warnings=(*trace.warnings, why))
    trace, windows = _without_torn_end(trace, windows)
    num_torn = _num_torn(trace, windows)
    first_ns = windows[num_torn][1]
    lead_ns = first_ns - int(trace.events.start_ns[0])
    if not num_torn and lead_ns < _LEAST_STEPS * (windows[-1][2] - first_ns) / len(windows):
        return trace
    num_left_out = int(np.searchsorted(trace.events.start_ns, first_ns))
    calls = tuple(
        replace(call, event=call.event - num_left_out) if call.event >= 0 else call
        for call in trace.calls
        if not 0 <= call.event < num_left_out
    )
    names = ", ".join(str(window[0]) for window in windows[:num_torn])
    left_out = (
        f"step{'s' if num_torn > 1 else ''} {names} and what ran before are left out: "
        f"{format_percent(_TORN, 0)} or more of their kernels are missing"
        if num_torn
        else f"the GPU was {format_seconds(lead_ns / NS_PER_S)} behind the CPU when the profiler began: what it did "
        "by then, of earlier steps, is left out"
    )
    kept = {window[0] for window in windows[num_torn:]}
    return replace(
        trace,
        steps=tuple(step for step in trace.steps if step.number in kept) if num_torn else trace.steps,
        events=only_rows(trace.events, slice(num_left_out, None)),
        calls=calls,
        warnings=(*trace.warnings, left_out),
    )


_Windows = tuple[tuple[int, int, int], ...]
"""Number, start and end (ns) of every step on the GPU."""


def _without_torn_end(trace: GpuTrace, windows: _Windows) -> tuple[GpuTrace, _Windows]:
    """The trace without its last steps where these miss much of their work, as of a profiler that stopped too early.

    Of a file that ends within an event the last step that has any work misses the rest of it.
    """
    num_torn = _num_torn(trace, windows[::-1])
    ends_within = not num_torn and trace.is_torn and len(windows) > 1
    num_torn = num_torn or int(ends_within)
    if not num_torn:
        return trace, windows
    kept, torn = windows[:-num_torn], windows[-num_torn:]
    end = int(np.searchsorted(trace.events.start_ns, torn[0][1]))
    names = ", ".join(str(window[0]) for window in torn)
    why = "the file ends in it" if ends_within else f"{format_percent(_TORN, 0)} or more of their kernels are missing"
    left_out = f"step{'s' if num_torn > 1 else ''} {names} and what ran after are left out: {why}"
    numbers = {window[0] for window in kept}
    return replace(
        trace,
        steps=tuple(step for step in trace.steps if step.number in numbers),
        events=only_rows(trace.events, slice(None, end)),
        calls=tuple(call for call in trace.calls if call.event < end),
        warnings=(*trace.warnings, left_out),
    ), kept


def _num_torn(trace: GpuTrace, windows: _Windows) -> int:
    """How many steps in a row, from the first given on, miss much of their work, as full buffers of a profiler do."""
    if not trace.lost_launch_ns:
        return 0
    numbers = [step.number for step in trace.steps]
    begins = np.array([step.start_ns for step in trace.steps], dtype=np.int64)
    lost = np.searchsorted(begins, np.array(trace.lost_launch_ns, dtype=np.int64), side="right") - 1
    ran = step_of_events(trace)
    num_torn = 0
    for number, _, _ in windows[:-1]:
        index = numbers.index(number)
        num_lost = int(np.count_nonzero(lost == index))
        if num_lost < _TORN * (num_lost + int(np.count_nonzero(ran == index))):
            break
        num_torn += 1
    return num_torn


def _clock_warning(trace: GpuTrace) -> tuple[str, ...]:
    """A warning where one gap is so much longer than all the rest that a clock has more likely jumped."""
    events = trace.events
    gaps = events.start_ns[1:] - np.maximum.accumulate(events.end_ns)[:-1]
    longest = int(gaps.max()) if len(gaps) else 0
    rest = events.span_ns - int(gaps[gaps > JUMP_NS].sum())
    if longest > JUMP_NS and longest > JUMP_RATIO * rest:
        return (f"{trace.file}: nothing runs for {longest / NS_PER_S:.0f} s in one piece: a clock may have jumped",)
    return ()


def _warnings(traces: Sequence[GpuTrace]) -> tuple[str, ...]:
    warnings: list[str] = []
    for trace in traces:
        warnings.extend(f"{trace.file}: {text}" for text in trace.warnings)
        if not len(trace.events):
            continue
        if not np.any(trace.events.memory_op == 0):
            warnings.append(f"{trace.file}: only copies in it, no kernel: what computes and communicates is not known")
        if not trace.steps:
            warnings.append(f"{trace.file}: no profiler steps; the whole trace counts as one step")
        warnings.extend(_clock_warning(trace))
    if any(trace.is_emulated for trace in traces):
        warnings.append(
            "emulated GPUs, nothing was measured: their times are a cost model's (lagom docs emulate), and the "
            "CPU's another clock's, so that what waited for the CPU is not known"
        )
    worlds = {trace.world_size for trace in traces if trace.world_size}
    gpus = sorted({trace.gpu_name for trace in traces if trace.gpu_name})
    if len(gpus) > 1 or len(worlds) > 1:
        what, named = ("GPUs", gpus) if len(gpus) > 1 else ("numbers of ranks", [str(num) for num in sorted(worlds)])
        warnings.append(f"the traces name different {what} ({', '.join(named)}): they are added up as one job")
    known = {trace.rank for trace in traces if trace.rank is not None}
    if worlds and len(known) < max(worlds):
        warnings.append(
            f"{len(known)} of {max(worlds)} ranks given: one per parallel role suffices for exposure and contention; "
            "waiting for late peers shows only between ranks that are here"
        )
    repeated = sorted(rank for rank in known if sum(trace.rank == rank for trace in traces) > 1)
    if repeated:
        warnings.append(f"rank {repeated[0]} comes more than once: its times are added up")
    unfinished = [call for trace in traces for call in trace.calls if not call.is_finished]
    if unfinished:
        names = list(dict.fromkeys(f"{call.op} number {call.sequence} on {call.communicator}" for call in unfinished))
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        warnings.append(
            f"not ended when recorded, and in no count, time or bandwidth: {len(unfinished)} "
            f"call{'s' if len(unfinished) > 1 else ''}, {', '.join(names[:_MAX_NAMES])}{more}"
        )
    warnings.extend(_untold(traces))
    unsure = sum(call.op == "unknown" for trace in traces for call in trace.calls)
    if unsure:
        warnings.append(f"{unsure} communicating events do not say which collective they are; their op is 'unknown'")
    return tuple(dict.fromkeys(warnings))


def _untold(traces: Sequence[GpuTrace]) -> list[str]:
    """A line where some calls of files without a timeline have no duration; where none has, the reader says so."""
    calls = [call for trace in traces if not len(trace.events) for call in trace.calls if call.is_finished]
    num = sum(not call.duration_ns for call in calls)
    if not 0 < num < len(calls):
        return []
    return [f"{num} of {len(calls)} calls have no duration: they are counted, and are in no time and no bandwidth"]


def _with_timeline(traces: Sequence[GpuTrace]) -> Sequence[GpuTrace]:
    """The traces with a timeline if any has one: the others may hold the same calls, and have no steps to divide by."""
    return [trace for trace in traces if len(trace.events)] or traces


def _untimed(every: Sequence[GpuTrace], used: Sequence[GpuTrace]) -> tuple[str, ...]:
    """A sentence about the files without a timeline that stand next to others with one."""
    left_out = sorted({trace.file for trace in every if not len(trace.events)}) if len(used) < len(every) else []
    if not left_out:
        return ()
    more = f" and {len(left_out) - _MAX_NAMES} more" if len(left_out) > _MAX_NAMES else ""
    return (
        f"{', '.join(left_out[:_MAX_NAMES])}{more}: without a timeline, next to files with one; looked at for hangs "
        "alone, in no figure",
    )


def _far_ahead(ranks: Sequence[RankFindings]) -> tuple[str, ...]:
    """A sentence where launches block because the CPU is far ahead: it looks bad in a viewer, and loses nothing."""
    blocked_ns = sum(rank.blocking.blocked_ns for rank in ranks)
    span_ns = sum(rank.measures.span_ns for rank in ranks)
    num, num_full = (
        sum(counts) for counts in zip(*((r.blocking.num, r.blocking.num_full) for r in ranks), strict=True)
    )
    if 2 * num_full <= num or blocked_ns < _SHOWN * span_ns:
        return ()
    idle_ns = sum(rank.blocking.idle_ns for rank in ranks)
    gpu = f"no work for {format_seconds(idle_ns / NS_PER_S)}" if idle_ns else "work all the time"
    return (
        f"{num_full} launches blocked because the queue of launches was full: the CPU is far ahead of the GPU, waits "
        f"in them {100 * blocked_ns / span_ns:.1f} % of the time, in which the GPU had {gpu}: no figure is wrong",
    )


def analyse(traces: Sequence[GpuTrace], *, seed: int = 0, gpus_per_node: int | None = None) -> Findings:
    """What the traces of a job's ranks say; the same traces and seed give the same findings.

    `gpus_per_node` tells groups within a node from those between nodes; None: as many as a trace lists, else 8.

    Raises:
        ValueError: if no trace is given.
    """
    if not traces:
        raise ValueError("no trace to analyse, at least one is needed")
    every, traces = traces, [without_lead_in(trace) for trace in _with_timeline(traces)]
    occupations = [occupation_of(trace.events, knows_launches=not trace.is_emulated) for trace in traces]
    exposed = [exposed_of_calls(trace, occupied) for trace, occupied in zip(traces, occupations, strict=True)]
    peers = peers_of(traces)
    waiting = waiting_of_calls(traces, peers)
    contention = contention_of(traces, occupations, seed)
    ranks = tuple(
        RankFindings(
            trace=trace,
            occupation=occupation,
            measures=whole(trace.events, occupation),
            steps=step_measures(trace, occupation),
            exposed_ns=bare,
            waiting_ns=waited,
            stretched_ns=stretched,
            blocking=blocking_launches(trace, occupation),
        )
        for trace, occupation, bare, waited, stretched in zip(
            traces, occupations, exposed, waiting, contention.of_rank, strict=True
        )
    )
    return Findings(
        ranks=ranks,
        rows=collective_rows(traces, exposed, waiting),
        contention=contention,
        places=call_places(traces, [[(step.start_ns, step.end_ns) for step in rank.steps] for rank in ranks]),
        hangs=hangs_of(every),
        parts=parts_of(traces, occupations, gpus_per_node),
        warnings=_warnings(traces) + _untimed(every, traces) + peers.warnings + _far_ahead(ranks),
    )
