"""PyTorch's profiler traces (Kineto JSON), CUDA and ROCm, old field names and new.

Source of the fields: kineto libkineto/include/MetadataFieldCatalog.h and output_json.cpp. What is kept while the events
pass by is in `kineto_events.py`; here it becomes traces. NCCL's fields stand on the kernel itself since torch 2.2;
before, the collective is known from the `nccl:*` or `record_param_comms` CPU event around the launch, and its bytes
from that event's `Input Dims`.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.chrome_reader import EventReader
from lagom_overlap.trace.damage import lost_launches, mend
from lagom_overlap.trace.event_columns import join, launches_of
from lagom_overlap.trace.fields import num_elements, to_int, to_ranks
from lagom_overlap.trace.files import ByteStream
from lagom_overlap.trace.gpu_trace import (
    EMULATED_GPU,
    NO_TIME,
    RANK_IN_NAME,
    ROLE_CODES,
    UNKNOWN,
    CommCall,
    EventRole,
    GpuEvents,
    GpuTrace,
    Int64,
)
from lagom_overlap.trace.kineto_events import KinetoEvents, LaunchedComm
from lagom_overlap.trace.merged import MergedTracesError
from lagom_overlap.trace.names import NCCL_PREFIXES, dtype_bytes, function_name, kind_of, op_of, reach_of, whole_bytes
from lagom_overlap.trace.usual_events import CollectiveArgs


class NoGpuEventError(TraceError):
    """A trace of the CPU alone."""


_FEW_AT_END: Final = 2
"""Launches at the end whose kernels a profiler that was stopped does not see."""
_MANY_AT_END: Final = 0.1
"""Of all launches: as many as make a step torn (`analysis.findings`)."""
_MAX_WORD: Final = 40
"""Characters of a category in a message."""
_NO_DESCRIPTION: Final = ("", "undefined", "None")


def _calls(kineto: KinetoEvents, events: GpuEvents, added: Int64, world_size: int | None) -> tuple[CommCall, ...]:
    """The collectives among the events of one device."""
    rows = np.flatnonzero(events.role == ROLE_CODES[EventRole.COMM])
    correlation = kineto.columns.column("correlation")[added[rows]]
    call = join(kineto.call_correlation, correlation)
    groups = _Communicators()
    return tuple(
        _call(kineto, events, int(row), kineto.comm_args[int(added[row])], int(at), groups, world_size)
        for row, at in zip(rows, call, strict=True)
    )


def _call(  # noqa: PLR0917
    kineto: KinetoEvents,
    events: GpuEvents,
    row: int,
    args: CollectiveArgs,
    call: int,
    groups: "_Communicators",
    world_size: int | None,
) -> CommCall:
    kernel = events.names[int(events.name[row])]
    words = args.collective_name if type(args.collective_name) is str else ""
    fallback: tuple[LaunchedComm, ...] = ()
    if not words and call != UNKNOWN:
        fallback = kineto.comm_ops_around(call)
        words = next((op.name for op in fallback if op.name.startswith(NCCL_PREFIXES)), "")
        with_fields = next((op.args for op in fallback if type(op.args.collective_name) is str), None)
        if with_fields is not None:
            args, words = with_fields, with_fields.collective_name or words
    op, kind = op_of(words), kind_of(words)
    if op == "unknown":
        op, kind = op_of(function_name(kernel)), kind_of(function_name(kernel))
    ranks = to_ranks(args.pg_ranks)
    num_ranks = max(0, to_int(args.group_size)) or len(ranks) or (world_size or 0)
    dtype, num_bytes = _bytes_of(kind, args, fallback, num_ranks)
    if kind is CollectiveKind.ALL_GATHER and kind_of(function_name(kernel)) is CollectiveKind.BROADCAST:
        # Into a list: a broadcast of each rank's share (ProcessGroupNCCL2), to NCCL and its tuner no all-gather.
        op, kind, num_bytes = "broadcast", CollectiveKind.BROADCAST, num_bytes // max(1, num_ranks)
    sequence = to_int(args.seq)
    return CommCall(
        event=row,
        op=op,
        kind=kind,
        communicator=groups.name_of(args, events.streams[int(events.stream[row])]),
        reach=reach_of(kernel, kind),
        duration_ns=int(events.end_ns[row] - events.start_ns[row]),
        ranks=ranks,
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        num_channels=int(events.grid[row].prod()),
        num_threads=int(events.block[row].prod()),
        dtype=dtype,
        sequence=sequence if sequence >= 0 else None,
    )


def _bytes_of(
    kind: CollectiveKind | None, args: CollectiveArgs, around: tuple[LaunchedComm, ...], num_ranks: int
) -> tuple[str, int]:
    """(type of the elements, bytes of the whole tensor), from NCCL's fields or from the CPU event's `Input Dims`."""
    dtype = args.dtype if type(args.dtype) is str else ""
    size = dtype_bytes(dtype)
    given = (max(0, to_int(args.in_nelems)) * size, max(0, to_int(args.out_nelems)) * size)
    if any(given):
        return dtype, whole_bytes(kind, *given, num_ranks)
    for op in around:
        dims = bytes(op.args.input_dims)
        if not op.name.startswith(NCCL_PREFIXES) or len(dims) <= 2:
            continue
        try:
            shapes, types = msgspec.json.decode(dims), msgspec.json.decode(op.args.input_type)
        except msgspec.MsgspecError:
            continue
        if type(shapes) is not list or type(types) is not list:
            continue
        sizes = [
            num_elements(shape) * dtype_bytes(kind_)
            for shape, kind_ in zip(shapes, types, strict=False)
            if type(kind_) is str
        ]
        if any(sizes):
            return str(types[0]), whole_bytes(kind, sum(sizes), 0, num_ranks)
    return dtype, 0


@dataclass(slots=True)
class _Communicators:
    """Names for communicators: the framework's description, with the group's own name where two share one.

    Torch 2.15 may leave that name empty; then the stream tells the group, as each has its own.
    """

    described: dict[str, str] = field(default_factory=dict)

    def name_of(self, args: CollectiveArgs, stream: str) -> str:
        name = args.pg_name if type(args.pg_name) is str else ""
        description = args.pg_description if type(args.pg_description) is str else ""
        own = f"pg {name}" if name else stream
        if description in _NO_DESCRIPTION:
            return own
        owner = self.described.setdefault(description, own)
        return description if owner == own else f"{description} ({own})"


def _device_of(properties: Any, device: int) -> tuple[str, int | None]:
    if type(properties) is not list:
        return "", None
    rows = [row for row in properties if type(row) is dict]
    row = next((row for row in rows if row.get("id") == device), rows[0] if rows else {})
    sms = to_int(row.get("numSms"))
    name = row.get("name")
    return name if type(name) is str else "", sms if sms > 0 else None


def _num_gpus(properties: Any) -> int:
    return len(properties) if type(properties) is list else 0


def _lost_launches(kineto: KinetoEvents) -> tuple[tuple[int, ...], int]:
    """(times of launches of kernels that are not in the file, launches of kernels in all).

    What was launched after the last kernel began may not have run before the profiler stopped. PyTorch's waits for the
    GPU first, so where that is much of all launches it was lost, or cut off in the middle of a step, which is as bad.
    """
    launches = np.unique(np.frombuffer(kineto.kernel_launches, dtype=np.int64))
    seen = kineto.columns.column("correlation")
    if not np.any(seen != UNKNOWN):  # a writer that left them out: nothing tells which kernel a launch is of
        return (), len(launches)
    at_ns = launches_of(launches, kineto.call_correlation, kineto.call_ns)
    last_ns = int(kineto.columns.column("start_ns").max()) if len(seen) else 0
    lost = ~np.isin(launches, seen) & (at_ns != NO_TIME)
    if np.count_nonzero(lost & (at_ns >= last_ns)) <= max(_FEW_AT_END, _MANY_AT_END * len(launches)):
        lost &= at_ns < last_ns
    return tuple(np.sort(at_ns[lost]).tolist()), len(launches)


def read_kineto(
    stream: ByteStream,
    prefix: bytes,
    pattern: re.Pattern[str] | None = None,
    *,
    block_bytes: int | None = None,
    as_recorded: bool = False,
    process: tuple[str, int | None, frozenset[Hashable]] | None = None,
) -> tuple[GpuTrace, ...]:
    """The traces in one Kineto file: one, or one for every device that ran kernels.

    What cannot be is left out or put right (`damage.py`) unless the events are wanted as recorded. Of a file into which
    several processes were merged, `process` is the one to read: name, rank, values of `pid`.

    Raises:
        NoGpuEventError: if nothing ran on a GPU.
        MergedTracesError: if the file holds several processes and none was asked for.
        TraceError: if the file is no trace, or its JSON is broken.
    """
    reader = EventReader(stream, prefix) if block_bytes is None else EventReader(stream, prefix, block_bytes)
    builder = KinetoEvents(pattern, only=None if process is None else process[2])
    for events in reader.blocks(builder.take_usual):
        builder.take(events)
    warnings = list(reader.warnings)
    if stream.was_cut:
        warnings.append("the packed file ends early: the job may have crashed while writing it")
    warnings.extend(f"{count} GPU events {why} were dropped" for why, count in sorted(builder.dropped.items()))
    if not len(builder.columns):
        for category, num in builder.num_foreign.most_common(1):
            raise TraceError(
                f"{stream.name}: its {num} device events are of category {category[:_MAX_WORD]!r}, which is another "
                "accelerator's and not read; kernel, gpu_memcpy and gpu_memset are"
            )
        cut = f" ({'; '.join(warnings)})" if warnings else ""
        how = (
            'its events are pairs of begin and end ("ph": "B"), and only complete ones ("ph": "X") are read'
            if 4 * builder.num_begun > builder.num_events
            else "record with ProfilerActivity.CUDA, also on ROCm"
        )
        raise NoGpuEventError(f"{stream.name}: no GPU event among {builder.num_events} events{cut}; {how}")
    if process is None and (merged := builder.processes(stream.name)):
        raise MergedTracesError(f"{stream.name}: holds the traces of {len(merged)} processes", merged)
    name = stream.name if process is None else f"{stream.name} ({process[0]})"
    builder.index_comm_ops()
    info = reader.header.distributed_info if type(reader.header.distributed_info) is dict else {}
    rank, world = to_int(info.get("rank")), to_int(info.get("world_size"))
    if process is not None:  # what stands around the events is one of the processes', nobody knows whose
        rank, world = (UNKNOWN, UNKNOWN) if process[1] is None else (process[1], world)
        warnings.append("several processes were merged into the file; each counts as a trace of its own")
    named = RANK_IN_NAME.search(stream.name) if process is None else None
    if rank < 0 and named is not None and len(named[1]) < 8:
        rank = int(named[1])
    launch = launches_of(
        builder.columns.column("correlation"),
        builder.call_correlation,
        builder.call_ns,
    )
    shape = builder.shape_column()
    devices = builder.columns.devices()
    steps, repeated = builder.marks.marked_steps(as_recorded=as_recorded)
    warnings.extend(repeated)
    lost_ns, num_launches = _lost_launches(builder)
    version = info.get("nccl_version")
    slow_launches = builder.slow_calls()
    traces = []
    for device in devices:
        built, added = builder.columns.build(launch, shape, device=device if len(devices) > 1 else None)
        gpu_name, num_sms = _device_of(reader.header.device_properties, device)
        if not as_recorded:
            mended = mend(built)
            built, added = mended.events, added[mended.rows]
        early = int(np.count_nonzero((built.launch_ns != NO_TIME) & (built.launch_ns > built.start_ns)))
        more = [] if as_recorded else list(mended.warnings)
        more += lost_launches(steps, lost_ns, num_launches)
        if early and not gpu_name.endswith(EMULATED_GPU):
            more.append(f"{early} GPU events start before their launch: the clocks of CPU and GPU disagree")
        traces.append(
            GpuTrace(
                file=name if len(devices) == 1 else f"{name} (gpu {device})",
                format="Kineto",
                rank=rank if rank >= 0 else None,
                events=built,
                calls=_calls(builder, built, added, world if world > 1 else None),
                steps=steps,
                world_size=world if world > 0 else None,
                gpu_name=gpu_name,
                num_sms=num_sms,
                nccl_version=version if type(version) is str else "",
                frameworks=frozenset(builder.frameworks),
                marked=builder.marked_events(),
                waits=tuple(sorted(builder.waits, key=lambda wait: wait.correlation)),
                num_gpus=_num_gpus(reader.header.device_properties),
                phases=builder.marks.phases(),
                lost_launch_ns=lost_ns,
                is_torn=reader.is_torn,
                gpu_step_ns=tuple(builder.marks.gpu_step_ns),
                slow_launches=slow_launches,
                warnings=(*warnings, *more),
            )
        )
    return tuple(traces)
