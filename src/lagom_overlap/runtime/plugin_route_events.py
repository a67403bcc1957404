"""A profiled step's GPU events -> when each collective was issued, ran, and was waited for by the computation.

What waits for what is not told by times: a wait that is hidden leaves no gap, and the same step must have the same
joins under every setting. It is told by Kineto's synchronisation events ("Stream Wait Event", cat `cuda_sync`; fields
from libkineto's output_json.cpp), which PyTorch records with `enable_cuda_sync_events`. Kernels and waits are put into
the order of the host, by correlation id; what a stream has waited for passes on to whoever waits for that stream, so
FSDP2's copy-out stream between a collective and the computation is no join of its own.

The computation is the stream with the most kernel time that is not NCCL's. Never tried on a GPU: tested on traces
written by hand.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lagom_overlap.collective import CollectiveKind, ConfigKey
from lagom_overlap.runtime.route import CallRecord, StepRecord
from lagom_overlap.trace.gpu_trace import Reach
from lagom_overlap.trace.names import dtype_bytes, function_name, is_communication, kind_of, reach_of, whole_bytes
from lagom_overlap.units import US

WAIT_NAME: Final = "Stream Wait Event"
_KERNEL_CATEGORIES: Final = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """A collective in reach of a route: what it was, and times in seconds since the step's first GPU event.

    `num_bytes` is 0 where the trace does not say; `joined_s` is None where the computation never waited for it.
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


@dataclass(frozen=True, slots=True)
class _Kernel:
    correlation: int
    stream: int
    start_us: float
    end_us: float
    name: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Wait:
    """Stream `stream` waits for what `waited_for` had been given up to correlation `recorded`."""

    correlation: int
    stream: int
    waited_for: int
    recorded: int


def timed_calls(events: Iterable[Any], reaches: Collection[Reach] = (Reach.TUNER,)) -> tuple[TimedCall, ...] | None:
    """The collectives of a step that are in reach, in the order in which the host launched them.

    None if the events hold no computation, or no waits: then nothing can be said of joins.
    """
    kernels, waits = _read(events)
    comms = [kernel for kernel in kernels if is_communication(kernel.name)]
    stream = _compute_stream(kernels, {kernel.stream for kernel in comms})
    if stream is None or (comms and not waits):
        return None
    origin = min(kernel.start_us for kernel in kernels)
    computation = [kernel for kernel in kernels if kernel.stream == stream]
    joins = _joins(comms, waits, stream)
    return tuple(
        _call(kernel, kind, computation, joins.get(kernel.correlation), origin)
        for kernel in comms
        if (kind := _kind(kernel)) is not None and reach_of(kernel.name, kind) in reaches
    )


def step_record(keys: Sequence[ConfigKey], duration_s: float, timed: Sequence[TimedCall] | None) -> StepRecord:
    """The calls with their times, if the kernels are as many, of the same kinds and sizes; untimed otherwise."""
    if timed is None or len(keys) != len(timed) or any(not _is_same(k, t) for k, t in zip(keys, timed, strict=True)):
        calls = tuple(CallRecord(key=key, issued_s=0.0, begun_s=0.0, ended_s=0.0) for key in keys)
        return StepRecord(duration_s=duration_s, calls=calls, is_timed=False)
    calls = tuple(
        CallRecord(
            key=key,
            issued_s=call.issued_s,
            begun_s=call.begun_s,
            ended_s=call.ended_s,
            joined_s=call.joined_s,
            resumed_s=call.resumed_s,
            num_channels=call.num_channels,
        )
        for key, call in zip(keys, timed, strict=True)
    )
    return StepRecord(duration_s=duration_s, calls=calls)


def _read(events: Iterable[Any]) -> tuple[list[_Kernel], list[_Wait]]:
    """Kernels, copies and waits in the host's order; what is incomplete is left out."""
    kernels, waits = list[_Kernel](), list[_Wait]()
    for event in events:
        if type(event) is not dict or type(args := event.get("args")) is not dict:
            continue
        category, correlation, stream = event.get("cat"), args.get("correlation"), args.get("stream")
        if type(correlation) is not int or type(stream) is not int:
            continue
        if category in _KERNEL_CATEGORIES and type(event.get("ts")) in (int, float):
            end = event["ts"] + (event.get("dur") or 0)
            kernels.append(_Kernel(correlation, stream, event["ts"], end, str(event.get("name", "")), args))
        elif category == "cuda_sync" and event.get("name") == WAIT_NAME:
            waited_for, recorded = args.get("wait_on_stream"), args.get("wait_on_cuda_event_record_corr_id")
            if type(waited_for) is int and type(recorded) is int:
                waits.append(_Wait(correlation, stream, waited_for, recorded))
    return sorted(kernels, key=lambda k: k.correlation), sorted(waits, key=lambda w: w.correlation)


def _compute_stream(kernels: Sequence[_Kernel], others: set[int]) -> int | None:
    busy_us: dict[int, float] = defaultdict(float)
    for kernel in kernels:
        if kernel.stream not in others:
            busy_us[kernel.stream] += kernel.end_us - kernel.start_us
    return max(busy_us, key=lambda stream: (busy_us[stream], -stream)) if busy_us else None


def _joins(comms: Sequence[_Kernel], waits: Sequence[_Wait], compute: int) -> dict[int, int]:
    """Correlation of a collective -> correlation of the wait with which the computation first depends on it."""
    # What each stream depends on: the collective, and since which point of the host's order.
    known: dict[int, dict[int, int]] = defaultdict(dict)
    order = [(kernel.correlation, kernel) for kernel in comms] + [(wait.correlation, wait) for wait in waits]
    for _, item in sorted(order, key=lambda pair: pair[0]):
        if isinstance(item, _Kernel):
            known[item.stream][item.correlation] = item.correlation
            continue
        for comm, since in known[item.waited_for].items():
            if since <= item.recorded:
                known[item.stream].setdefault(comm, item.correlation)
    return {comm: since for comm, since in known[compute].items() if comm != since}


def _kind(kernel: _Kernel) -> CollectiveKind | None:
    words = kernel.args.get("Collective name")
    found = kind_of(words) if type(words) is str else None
    return found or kind_of(function_name(kernel.name))


def _call(
    kernel: _Kernel, kind: CollectiveKind, computation: Sequence[_Kernel], join: int | None, origin_us: float
) -> TimedCall:
    """Times of one collective against the computation's stream."""
    issued_us = max((k.end_us for k in computation if k.correlation < kernel.correlation), default=origin_us)
    joined_us = resumed_us = None
    if join is not None:
        joined_us = max((k.end_us for k in computation if k.correlation < join), default=origin_us)
        resumed_us = max(joined_us, kernel.end_us)
    size = dtype_bytes(str(kernel.args.get("dtype", "")))
    ranks = _count(kernel.args.get("Group size"))
    given = (_count(kernel.args.get("In msg nelems")) * size, _count(kernel.args.get("Out msg nelems")) * size)
    return TimedCall(
        kind=kind,
        num_bytes=whole_bytes(kind, *given, ranks),
        num_ranks=ranks,
        num_channels=_grid(kernel.args.get("grid")),
        issued_s=(min(issued_us, kernel.start_us) - origin_us) * US,
        begun_s=(kernel.start_us - origin_us) * US,
        ended_s=(kernel.end_us - origin_us) * US,
        joined_s=None if joined_us is None else (joined_us - origin_us) * US,
        resumed_s=None if resumed_us is None else (resumed_us - origin_us) * US,
    )


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _grid(value: Any) -> int:
    return value[0] if type(value) is list and value and type(value[0]) is int else 0


def _is_same(key: ConfigKey, call: TimedCall) -> bool:
    return key.kind == call.kind and call.num_bytes in (0, key.num_bytes)
