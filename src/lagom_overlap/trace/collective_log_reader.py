"""Files that hold collectives without a timeline: NCCL Inspector's JSON lines, PyTorch's flight recorder as JSON.

Inspector (NCCL plugins/profiler/inspector): one object per line, `header` {id, rank, n_ranks, nnodes, comm_name} and
`coll_perf` {coll, coll_sn, coll_msg_size_bytes, coll_exec_time_us}. Flight recorder (FlightRecorder.hpp, version 2.x):
`entries` with profiling_name, sizes, types, times in ns, `pg_config` by group.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.event_columns import MAX_NS
from lagom_overlap.trace.fields import num_elements, to_int, to_ns, to_ranks
from lagom_overlap.trace.files import ByteStream
from lagom_overlap.trace.gpu_trace import UNKNOWN, CommCall, GpuTrace, KnobReach, empty_events
from lagom_overlap.trace.names import GLOO_PREFIX, dtype_bytes, kind_of, op_of, reach_of_kind, whole_bytes
from lagom_overlap.units import GIB, MIB, format_bytes

_MAX_FLIGHT: Final = 1 * GIB
_MAX_LINE: Final = 16 * MIB
_BLOCK: Final = 4 * MIB
_RANK_IN_NAME: Final = re.compile(r"(?<!nccl)(?<!\d)(\d+)(?:\.json)?(?:\.gz)?$")
"""A dump named after PyTorch's engine (`nccl2.json`) says nothing of a rank."""
_OWN_ENGINE: Final = "nccl2:"
_WHERE_ENTRIES_ARE: Final = (
    "PyTorch 2.15 keeps those of its own engine apart, where _dump_nccl_trace_json does not look: "
    "torch._C._distributed_c10d._dump_fr_trace_json(backend='nccl2')"
)
_NO_TIMELINE: Final = "holds collectives without a timeline: nothing is known about computation, overlap or exposure"


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


class _InspectorLine(msgspec.Struct):
    header: _InspectorHeader | None = None
    coll_perf: _InspectorPerf | None = None


class _FlightEntry(msgspec.Struct):
    process_group: Any = None
    collective_seq_id: Any = None
    profiling_name: Any = ""
    input_sizes: Any = None
    input_dtypes: Any = None
    output_sizes: Any = None
    output_dtypes: Any = None
    time_discovered_started_ns: Any = None
    time_discovered_completed_ns: Any = None
    duration_ms: Any = None


class _FlightGroup(msgspec.Struct):
    name: Any = ""
    desc: Any = ""
    ranks: Any = None


class _Flight(msgspec.Struct):
    entries: list[_FlightEntry] = msgspec.field(default_factory=list)
    pg_config: Any = None
    rank: Any = None


_LINE: Final = msgspec.json.Decoder(_InspectorLine)
_FLIGHT: Final = msgspec.json.Decoder(_Flight)


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


def read_inspector(stream: ByteStream, prefix: bytes) -> tuple[GpuTrace, ...]:
    """One trace for every rank in the file, without a timeline.

    Raises:
        TraceError: if a line in the middle is not the inspector's; a broken last line is a warning.
    """
    calls: dict[int, list[CommCall]] = {}
    warnings = [_NO_TIMELINE]
    broken: tuple[int, Exception] | None = None
    for at, line in _lines(stream, prefix):
        if broken is not None:
            raise TraceError(f"{stream.name}: broken JSON in the line at byte {broken[0]}: {broken[1]}")
        try:
            row = _LINE.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            broken = (at, error)
            continue
        if row.header is None or row.coll_perf is None:
            continue
        kind = kind_of(str(row.coll_perf.coll))
        num_bytes = max(0, to_int(row.coll_perf.coll_msg_size_bytes))
        sequence = to_int(row.coll_perf.coll_sn)
        comm = row.header.comm_name
        call = CommCall(
            event=UNKNOWN,
            op=op_of(str(row.coll_perf.coll)),
            kind=kind,
            communicator=comm if type(comm) is str and comm else f"comm {row.header.id}",
            reach=reach_of_kind(kind),
            duration_ns=max(0, to_ns(row.coll_perf.coll_exec_time_us) or 0),
            num_ranks=max(0, to_int(row.header.n_ranks)),
            num_bytes=num_bytes,
            sequence=sequence if sequence >= 0 else None,
        )
        calls.setdefault(max(0, to_int(row.header.rank)), []).append(call)
    if broken is not None:
        warnings.append(f"the line at byte {broken[0]} is broken and was left out: the file may have been cut")
    if not calls:
        raise TraceError(f"{stream.name}: no collective in it; NCCL Inspector writes header and coll_perf on each line")
    return tuple(
        GpuTrace(
            file=stream.name,
            format="NCCL Inspector",
            rank=rank,
            events=empty_events(),
            calls=tuple(held),
            warnings=tuple(warnings),
        )
        for rank, held in sorted(calls.items())
    )


def _tensor_bytes(sizes: Any, dtypes: Any) -> int:
    if type(sizes) is not list or type(dtypes) is not list:
        return 0
    return sum(num_elements(shape) * dtype_bytes(str(dtype)) for shape, dtype in zip(sizes, dtypes, strict=False))


def _groups(config: Any) -> dict[str, _FlightGroup]:
    if type(config) is not dict:
        return {}
    found: dict[str, _FlightGroup] = {}
    for name, value in config.items():
        try:
            found[str(name)] = msgspec.convert(value, _FlightGroup)
        except msgspec.ValidationError:
            continue
    return found


def _flight_call(entry: _FlightEntry, groups: dict[str, _FlightGroup]) -> CommCall | None:
    words = str(entry.profiling_name)
    kind = kind_of(words)
    owner = entry.process_group if type(entry.process_group) is list else [entry.process_group]
    name = str(owner[0]) if owner else ""
    group = groups.get(name, _FlightGroup())
    description = str(owner[1]) if len(owner) > 1 else str(group.desc)
    started, ended = to_int(entry.time_discovered_started_ns), to_int(entry.time_discovered_completed_ns)
    duration_ns = max(0, ended - started) if started > 0 and ended > 0 else 0
    if isinstance(entry.duration_ms, float | int) and 0 <= entry.duration_ms * 1_000_000 < MAX_NS:
        duration_ns = round(entry.duration_ms * 1_000_000)
    ranks = to_ranks(group.ranks)
    sequence = to_int(entry.collective_seq_id)
    inputs = _tensor_bytes(entry.input_sizes, entry.input_dtypes)
    outputs = _tensor_bytes(entry.output_sizes, entry.output_dtypes)
    return CommCall(
        event=UNKNOWN,
        op=op_of(words),
        kind=kind,
        communicator=description if description not in ("", "undefined") else f"pg {name}",
        reach=KnobReach.NONE if words.startswith(GLOO_PREFIX) else reach_of_kind(kind),
        duration_ns=duration_ns,
        ranks=ranks,
        num_ranks=len(ranks),
        num_bytes=whole_bytes(kind, inputs, outputs, len(ranks)),
        dtype=str(entry.input_dtypes[0]) if type(entry.input_dtypes) is list and entry.input_dtypes else "",
        sequence=sequence if sequence >= 0 else None,
    )


def read_flight_recorder(stream: ByteStream, prefix: bytes) -> tuple[GpuTrace, ...]:
    """The collectives that a rank's flight recorder kept, without a timeline.

    Raises:
        TraceError: if the file is too large, or not the flight recorder's JSON.
    """
    data = prefix + stream.read(_MAX_FLIGHT)
    if len(data) >= _MAX_FLIGHT:
        raise TraceError(f"{stream.name}: refused, a flight recorder dump of more than {format_bytes(_MAX_FLIGHT)}")
    try:
        flight = _FLIGHT.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{stream.name}: broken flight recorder dump: {error}") from error
    groups = _groups(flight.pg_config)
    calls = tuple(call for call in (_flight_call(entry, groups) for entry in flight.entries) if call is not None)
    if not calls:
        raise TraceError(f"{stream.name}: a flight recorder dump without entries. {_WHERE_ENTRIES_ARE}")
    rank = to_int(flight.rank)
    named = _RANK_IN_NAME.search(stream.name)
    if rank < 0 and named is not None and len(named[1]) < 8:
        rank = int(named[1])
    warnings = [_NO_TIMELINE]
    if not any(call.duration_ns for call in calls):
        is_own = any(str(entry.profiling_name).startswith(_OWN_ENGINE) for entry in flight.entries)
        how = "PyTorch 2.15's own engine records none, TORCH_DIST_USE_NCCL2=0 with TORCH_NCCL_ENABLE_TIMING=1 does"
        warnings.append(
            f"no collective has a duration; {how if is_own else 'set TORCH_NCCL_ENABLE_TIMING=1 to record them'}"
        )
    return (
        GpuTrace(
            file=stream.name,
            format="flight recorder",
            rank=rank if rank >= 0 else None,
            events=empty_events(),
            calls=calls,
            warnings=tuple(warnings),
        ),
    )
