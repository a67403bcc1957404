"""NCCL Inspector's JSON lines: collectives and point-to-point calls without a timeline.

One object per line (NCCL plugins/profiler/inspector): `header` {id, rank, n_ranks, nnodes, comm_name} with `coll_perf`
{coll, coll_sn, coll_msg_size_bytes, coll_exec_time_us, and in newer releases coll_algo, coll_proto, coll_n_channels},
or `p2p_perf` with the same fields and `p2p_peer`, or `dump_stats`, which counts what was lost.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.fields import to_int, to_ns
from lagom_overlap.trace.files import ByteStream
from lagom_overlap.trace.gpu_trace import UNKNOWN, CommCall, GpuTrace, empty_events
from lagom_overlap.trace.names import kind_of, op_of, reach_of_kind
from lagom_overlap.units import MIB, format_bytes

_MAX_LINE: Final = 16 * MIB
"""Chosen: a line is one collective, some hundred bytes."""
_BLOCK: Final = 4 * MIB
"""Bytes that are read at once."""
_MAX_WORD: Final = 40
"""Characters of an algorithm's or protocol's name; NCCL's have at most a dozen."""
NO_TIMELINE: Final = "holds collectives without a timeline: nothing is known about computation, overlap or exposure"


class _InspectorHeader(msgspec.Struct):
    id: Any = ""
    rank: Any = None
    n_ranks: Any = None
    comm_name: Any = None


class _InspectorPerf(msgspec.Struct):
    coll: Any = ""
    coll_sn: Any = None
    coll_msg_size_bytes: Any = None
    coll_exec_time_us: Any = None
    coll_algo: Any = None
    coll_proto: Any = None
    coll_n_channels: Any = None
    event_trace_ts: Any = None


class _InspectorP2p(msgspec.Struct):
    p2p: Any = ""
    p2p_sn: Any = None
    p2p_msg_size_bytes: Any = None
    p2p_exec_time_us: Any = None
    event_trace_ts: Any = None


class _InspectorStats(msgspec.Struct):
    coll_dropped_total: Any = None
    p2p_dropped_total: Any = None


class _InspectorLine(msgspec.Struct):
    header: _InspectorHeader | None = None
    coll_perf: _InspectorPerf | None = None
    p2p_perf: _InspectorP2p | None = None
    dump_stats: _InspectorStats | None = None


_LINE: Final = msgspec.json.Decoder(_InspectorLine)


def _lines(stream: ByteStream, prefix: bytes) -> Iterator[tuple[int, bytes]]:
    """(byte position, line) of every line that is not blank."""
    at, data = 0, prefix
    while True:
        more = stream.read(_BLOCK)
        data += more
        *whole, data = data.split(b"\n")
        for line in whole if more else [*whole, data]:
            if line.strip():
                yield at, line
            at += len(line) + 1
        if not more:
            return
        if len(data) > _MAX_LINE:
            raise TraceError(f"{stream.name}: byte {at}: a line of more than {format_bytes(_MAX_LINE)}")


def _channels(perf: _InspectorPerf | _InspectorP2p) -> int:
    """The channels that ran: as stated, or those that the verbose form times one by one."""
    stated = max(0, to_int(getattr(perf, "coll_n_channels", None)))
    events = perf.event_trace_ts.get("kernel_events") if type(perf.event_trace_ts) is dict else None
    if stated or type(events) is not list:
        return stated
    return len(
        {event["channel_id"] for event in events if type(event) is dict and type(event.get("channel_id")) is int}
    )


def _word(value: Any) -> str:
    return value if type(value) is str and len(value) <= _MAX_WORD else ""


def _call(header: _InspectorHeader, perf: _InspectorPerf | _InspectorP2p) -> CommCall:
    comm = header.comm_name
    communicator = comm if type(comm) is str and comm else f"comm {header.id}"
    kind: CollectiveKind | None
    if isinstance(perf, _InspectorP2p):
        kind, op, sequence = CollectiveKind.SEND_RECV, CollectiveKind.SEND_RECV.value, to_int(perf.p2p_sn)
        size, time_us = perf.p2p_msg_size_bytes, perf.p2p_exec_time_us
    else:
        words = str(perf.coll)
        kind, op, sequence = kind_of(words), op_of(words), to_int(perf.coll_sn)
        size, time_us = perf.coll_msg_size_bytes, perf.coll_exec_time_us
    return CommCall(
        event=UNKNOWN,
        op=op,
        kind=kind,
        communicator=communicator,
        reach=reach_of_kind(kind),
        duration_ns=max(0, to_ns(time_us) or 0),
        num_ranks=max(0, to_int(header.n_ranks)),
        num_bytes=max(0, to_int(size)),
        num_channels=_channels(perf),
        algorithm=_word(getattr(perf, "coll_algo", "")),
        protocol=_word(getattr(perf, "coll_proto", "")),
        sequence=sequence if sequence >= 0 else None,
    )


def _losses(stats: dict[tuple[int, str], _InspectorStats], calls: dict[int, list[CommCall]], rank: int) -> list[str]:
    """A line where the inspector lost calls of a rank: it counts all so far, so a communicator's last count tells."""
    lost = _num_lost([stat for (of_rank, _), stat in stats.items() if of_rank == rank])
    if not lost:
        return []
    kept = len(calls.get(rank, []))
    return [
        f"the inspector lost {lost} calls of {kept + lost}: {kept + lost} ran, {kept} are here; sums and counts are of "
        "these, medians and bandwidths may still hold"
    ]


def _num_lost(stats: Iterable[_InspectorStats]) -> int:
    """Calls that the inspector says it lost, by the last count of each communicator."""
    return sum(max(0, to_int(stat.coll_dropped_total)) + max(0, to_int(stat.p2p_dropped_total)) for stat in stats)


def read_inspector(stream: ByteStream, prefix: bytes) -> tuple[GpuTrace, ...]:
    """One trace for every rank in the file, without a timeline.

    Raises:
        TraceError: if more lines are broken than are the inspector's; of fewer it warns.
    """
    calls: dict[int, list[CommCall]] = {}
    stats: dict[tuple[int, str], _InspectorStats] = {}
    warnings = [NO_TIMELINE]
    broken: list[tuple[int, Exception]] = []
    num_whole = 0
    for at, line in _lines(stream, prefix):
        try:
            row = _LINE.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            broken.append((at, error))
            continue
        num_whole += 1
        if row.header is None:
            continue
        rank = max(0, to_int(row.header.rank))
        if row.dump_stats is not None:
            stats[rank, str(row.header.id)] = row.dump_stats
        for perf in (row.coll_perf, row.p2p_perf):
            if perf is not None:
                calls.setdefault(rank, []).append(_call(row.header, perf))
    if len(broken) > max(1, num_whole):
        raise TraceError(f"{stream.name}: broken JSON in the line at byte {broken[0][0]}: {broken[0][1]}")
    if broken:  # a crash cuts the last line; a job that is started again, or writes its log there, writes on behind it
        which = f"the line at byte {broken[0][0]} is broken and was"
        if len(broken) > 1:
            which = f"{len(broken)} broken lines, the first at byte {broken[0][0]}, were"
        warnings.append(f"{which} left out: their calls are in no figure")
    if not calls:
        lost = _num_lost(stats.values())
        why = (
            f"the inspector lost all {lost} that ran; a smaller NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS may "
            "lose less"
            if lost
            else "NCCL Inspector writes header and coll_perf or p2p_perf on each line"
        )
        raise TraceError(f"{stream.name}: no call in it; {why}")
    return tuple(
        GpuTrace(
            file=stream.name,
            format="NCCL Inspector",
            rank=rank,
            events=empty_events(),
            calls=tuple(rank_calls),
            warnings=(*warnings, *_losses(stats, calls, rank)),
        )
        for rank, rank_calls in sorted(calls.items())
    )
