"""A profiled step's trace -> when each collective was issued, ran, and was waited for by the computation.

What waits for what is not told by times: a wait that is hidden leaves no gap, and the same step must have the same
joins under every setting. It is told by Kineto's synchronisation events ("Stream Wait Event"), which PyTorch records
with `enable_cuda_sync_events`, in the host's order (`launch_order`). The places of issues and joins in that order are
kept with the times: the shape of a step must not depend on its timing.

The computation is the stream with the most kernel time that is not NCCL's. A collective on that stream itself
(`async_op=False` on the current stream) is joined where it is issued. Tested on traces written by hand; FSDP2's
steps on an H100 were told apart.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from lagom_overlap.collective import CollectiveKind, ConfigKey
from lagom_overlap.online.routes.base import CallRecord, StepRecord
from lagom_overlap.online.routes.launch_order import (
    Computation,
    LaunchedCollective,
    computation_of,
    is_ordered,
    joins_of,
    launched,
)
from lagom_overlap.trace.gpu_trace import COLUMNS, NO_TIME, NS_PER_S, GpuTrace, KnobReach


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """A collective in reach of a route: what it was, and times in seconds since the step's first GPU event.

    `num_bytes` is 0 where the trace does not say; `joined_s` is None where the computation never waited for it.
    `issue_place` and `join_place` are the host's order (correlation ids).
    """

    kind: CollectiveKind
    num_bytes: int
    num_ranks: int
    num_channels: int
    issued_s: float
    begun_s: float
    ended_s: float
    joined_s: float | None
    resumed_s: float | None
    issue_place: int
    join_place: int | None


class StepTimer(Protocol):
    """What times a step's kernels."""

    def begin(self) -> None:
        """The measured step begins."""

    def mark_end(self) -> None:
        """The step's work is issued, unless it is said again or large calls follow; never waits."""

    def end(self) -> tuple[float, tuple[TimedCall, ...] | None]:
        """The step's length in seconds and its calls in the order of launch; None where they could not be told."""


def timed_calls(trace: GpuTrace, reaches: Collection[KnobReach] = (KnobReach.TUNER,)) -> tuple[TimedCall, ...] | None:
    """The collectives of a step that are in reach, in the order in which the host launched them.

    None if the trace holds no computation, or collectives on other streams and no waits: then nothing can be said of
    joins. None, too, where the host's order is not told (`is_ordered`).
    """
    comms = launched(trace)
    computation = computation_of(trace)
    if computation is None or not is_ordered(trace, comms, computation):
        return None
    if not trace.waits and any(comm.stream != computation.stream for comm in comms):
        return None
    origin_ns = int(trace.events.start_ns[0])
    joins = joins_of(comms, trace.waits, computation.stream)
    return tuple(
        _timed(comm, comm.call.kind, computation, joins.get(comm.correlation), origin_ns)
        for comm in comms
        if comm.call.kind is not None and comm.call.reach in reaches
    )


def ended(trace: GpuTrace, least_bytes: int) -> GpuTrace:
    """The step without what the host launched after its last mark (`trace.steps`): data, checkpoints.

    Collectives of `least_bytes` and more belong to the step wherever the optimizer's work ends, with all up to their
    joins: a gather of updated parameters comes after the last update.
    """
    if not trace.steps:
        return trace
    events, mark_ns = trace.events, max(step.start_ns for step in trace.steps)
    later = events.correlation[(events.launch_ns != NO_TIME) & (events.launch_ns >= mark_ns)]
    if not len(later):
        return trace
    comms, computation = launched(trace), computation_of(trace)
    joins = {} if computation is None else joins_of(comms, trace.waits, computation.stream)
    own = [comm.correlation for comm in comms if not 0 < comm.call.num_bytes < least_bytes]
    bound = max(
        [int(later.min()), *(place + 1 for place in own), *(joins[place] + 1 for place in own if place in joins)]
    )
    kept = events.correlation < bound
    if kept.all() or not kept.any():
        return trace
    rows = np.flatnonzero(kept)
    place_of = {int(row): place for place, row in enumerate(rows)}
    columns = {name: getattr(events, name)[rows] for name in COLUMNS}
    calls = tuple(replace(call, event=place_of[call.event]) for call in trace.calls if call.event in place_of)
    waits = tuple(wait for wait in trace.waits if wait.correlation < bound)
    return replace(trace, events=replace(events, **columns), calls=calls, waits=waits)


def step_length_s(trace: GpuTrace) -> float:
    """From the first GPU event of a step to the end of its last: the clock and the origin of its calls' times."""
    return int(trace.events.end_ns.max() - trace.events.start_ns[0]) / NS_PER_S


def step_record(
    keys: Sequence[ConfigKey], duration_s: float, timed: Sequence[TimedCall] | None, least_bytes: int = 0
) -> StepRecord:
    """The calls of `least_bytes` and more with their times, if the kernels are as many, of the same kinds and sizes.

    Smaller calls are no part of the step: a loss that is summed every tenth step must not make every tenth step another
    one. Kernels of unknown size are told by the whole sequence. Of like calls in a group NCCL asks once, with the
    bytes of all: one key for several kernels, which begins with the first of them and ends with the last. It asks about
    each of calls so unlike in size that one kernel runs them under settings of their own: all have the kernel's times.
    """
    large = [key for key in keys if key.num_bytes >= least_bytes]
    if timed is not None:
        some = [call for call in timed if call.num_bytes >= least_bytes]
        grouped = _grouped(large, timed, least_bytes)
        for known_by, calls in ((large, some), (keys, timed), (large, grouped), (keys, _shared(keys, timed))):
            if len(known_by) == len(calls) and all(_is_same(k, c) for k, c in zip(known_by, calls, strict=True)):
                pairs = [(k, c) for k, c in zip(known_by, calls, strict=True) if k.num_bytes >= least_bytes]
                return StepRecord(duration_s=duration_s, calls=tuple(_record(k, c) for k, c in pairs))
    untimed = tuple(CallRecord(key=key, issued_s=0.0, begun_s=0.0, ended_s=0.0) for key in large)
    return StepRecord(duration_s=duration_s, calls=untimed, is_timed=False)


def _grouped(keys: Sequence[ConfigKey], timed: Sequence[TimedCall], least_bytes: int) -> Sequence[TimedCall]:
    """The calls with those that make up a key as one, without small ones between; none where they cannot be told."""
    groups, at = list[TimedCall](), 0
    for key in keys:
        while at < len(timed) and timed[at].kind != key.kind and timed[at].num_bytes < least_bytes:
            at += 1
        end, num_bytes = at, 0
        while end < len(timed) and timed[end].kind == key.kind and num_bytes < key.num_bytes:
            num_bytes += timed[end].num_bytes
            end += 1
        if num_bytes != key.num_bytes or end == at:
            return []
        groups.append(_as_one(timed[at:end]))
        at = end
    return [] if any(call.num_bytes >= least_bytes for call in timed[at:]) else groups


def _shared(keys: Sequence[ConfigKey], timed: Sequence[TimedCall]) -> Sequence[TimedCall]:
    """A call for each key, where kernels run several that are as large as they together; none where that is not so."""
    shared, at = list[TimedCall](), 0
    for call in timed:
        end, num_bytes = at, 0
        while end < len(keys) and keys[end].kind == call.kind and num_bytes < call.num_bytes:
            num_bytes += keys[end].num_bytes
            end += 1
        if num_bytes != call.num_bytes or end == at:
            return []
        shared += _in_parts(call, [key.num_bytes for key in keys[at:end]])
        at = end
    return shared if at == len(keys) else []


def _in_parts(call: TimedCall, num_bytes: Sequence[int]) -> Iterator[TimedCall]:
    """One kernel's calls, one after another and each as long as its bytes: so their times and waits add up to its."""
    begun_s, joined_s, num_done = call.begun_s, call.joined_s, 0
    for each in num_bytes:
        num_done += each
        ended_s = call.begun_s + (call.ended_s - call.begun_s) * (num_done / call.num_bytes)
        resumed_s = None if joined_s is None else max(joined_s, ended_s)
        yield replace(call, num_bytes=each, begun_s=begun_s, ended_s=ended_s, joined_s=joined_s, resumed_s=resumed_s)
        begun_s, joined_s = ended_s, resumed_s


def _as_one(calls: Sequence[TimedCall]) -> TimedCall:
    """Calls of one group: issued with the first, waited for with the last that anybody waits for."""
    joined = [call for call in calls if call.joined_s is not None and call.resumed_s is not None]
    last = max(joined, key=lambda call: call.join_place or 0, default=calls[0])
    ended_s = max(call.ended_s for call in calls)
    return replace(
        calls[0],
        num_bytes=sum(call.num_bytes for call in calls),
        num_channels=max(call.num_channels for call in calls),
        begun_s=min(call.begun_s for call in calls),
        ended_s=ended_s,
        joined_s=last.joined_s,
        resumed_s=None if last.resumed_s is None else max(last.resumed_s, ended_s),
        join_place=last.join_place,
    )


def _record(key: ConfigKey, call: TimedCall) -> CallRecord:
    return CallRecord(
        key=key,
        issued_s=call.issued_s,
        begun_s=call.begun_s,
        ended_s=call.ended_s,
        joined_s=call.joined_s,
        resumed_s=call.resumed_s,
        num_channels=call.num_channels,
        issue_place=call.issue_place,
        join_place=call.join_place,
    )


def _timed(
    comm: LaunchedCollective, kind: CollectiveKind, computation: Computation, join: int | None, origin_ns: int
) -> TimedCall:
    """Times of one collective against the computation's stream."""
    issued_ns = min(computation.reached_ns(comm.correlation, origin_ns), comm.start_ns)
    joined_ns = resumed_ns = None
    if join is not None:
        joined_ns = computation.reached_ns(join, origin_ns)
        resumed_ns = max(joined_ns, comm.end_ns)
    return TimedCall(
        kind=kind,
        num_bytes=comm.call.num_bytes,
        num_ranks=comm.call.num_ranks,
        num_channels=comm.call.num_channels,
        issued_s=(issued_ns - origin_ns) / NS_PER_S,
        begun_s=(comm.start_ns - origin_ns) / NS_PER_S,
        ended_s=(comm.end_ns - origin_ns) / NS_PER_S,
        joined_s=None if joined_ns is None else (joined_ns - origin_ns) / NS_PER_S,
        resumed_s=None if resumed_ns is None else (resumed_ns - origin_ns) / NS_PER_S,
        issue_place=comm.correlation,
        join_place=join,
    )


def _is_same(key: ConfigKey, call: TimedCall) -> bool:
    return key.kind == call.kind and call.num_bytes in (0, key.num_bytes)
