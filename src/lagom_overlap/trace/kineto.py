"""PyTorch's profiler traces (Kineto JSON), CUDA and ROCm, old field names and new.

Source of the fields: kineto libkineto/include/MetadataFieldCatalog.h and output_json.cpp. A GPU event is a complete
event of category kernel, gpu_memcpy or gpu_memset; it carries `correlation`, which the launching CPU call
(cuda_runtime, cuda_driver and their HIP equals) shares. NCCL's fields stand on the kernel itself since torch 2.2;
before, the collective is known from the `nccl:*` or `record_param_comms` CPU event around the launch, and its bytes
from that event's `Input Dims`.
"""

import logging
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.chrome_events import Args, Event, EventReader
from lagom_overlap.trace.event_columns import MAX_NAME, EventColumns, join, launches_of
from lagom_overlap.trace.fields import num_elements, to_int, to_ns, to_ranks, to_triple
from lagom_overlap.trace.files import Stream
from lagom_overlap.trace.gpu_trace import (
    NO_TIME,
    ROLE_CODES,
    UNKNOWN,
    CommCall,
    GpuEvents,
    GpuTrace,
    Int64,
    MarkedEvent,
    Role,
    Step,
)
from lagom_overlap.trace.names import (
    dtype_bytes,
    function_name,
    is_communication,
    kind_of,
    op_of,
    reach_of,
    whole_bytes,
)

_log = logging.getLogger(__name__)

_CPU, _LAUNCH, _KERNEL, _COPY, _SET, _OTHER = range(6)
_GPU: Final = frozenset({_KERNEL, _COPY, _SET})
_CATEGORIES: Final = {
    **dict.fromkeys(("cpu_op", "Operator", "user_annotation", "cpu_instant_event"), _CPU),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime", "runtime"), _LAUNCH),
    **dict.fromkeys(("kernel", "Kernel"), _KERNEL),
    **dict.fromkeys(("gpu_memcpy", "Memcpy"), _COPY),
    **dict.fromkeys(("gpu_memset", "Memset"), _SET),
}
_NO_ARGS: Final = Args()
_TELLING: Final = ("nccl:", "record_param_comms", "ProfilerStep", "FSDP::", "DistributedDataParallel")
_STEP: Final = re.compile(r"ProfilerStep\s?#\s?(\d+)")
_RANK_IN_NAME: Final = re.compile(r"(?:rank|worker)[_\-]?(\d+)", re.IGNORECASE)
_NO_DESCRIPTION: Final = ("", "undefined", "None")
_COMPUTE, _COMM, _MEMORY = (ROLE_CODES[role] for role in (Role.COMPUTE, Role.COMM, Role.MEMORY))
_MAX_COMM_OP_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class _CommOp:
    """A CPU event around the launch of a collective."""

    start_ns: int
    end_ns: int
    name: str
    args: Args


def _kept(args: Args) -> Args:
    """The arguments with copies of what would hold the whole block of the file in memory."""
    args.input_dims, args.input_type = args.input_dims.copy(), args.input_type.copy()
    return args


@dataclass(slots=True)
class _Builder:
    """Everything that is kept of a file while its events pass by."""

    pattern: re.Pattern[str] | None
    columns: EventColumns = field(default_factory=EventColumns)
    roles: dict[str, int] = field(default_factory=dict)
    comm_args: dict[int, Args] = field(default_factory=dict)
    launches: "array[int]" = field(default_factory=lambda: array("q"))
    shape_external: "array[int]" = field(default_factory=lambda: array("q"))
    shape_of: "array[int]" = field(default_factory=lambda: array("q"))
    shapes: dict[bytes, int] = field(default_factory=dict)
    threads: dict[object, int] = field(default_factory=dict)
    comm_ops: defaultdict[int, list[_CommOp]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[int, Step] = field(default_factory=dict)
    frameworks: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    marked: list[tuple[str, int, int, int]] = field(default_factory=list)

    def take(self, events: Iterable[Event]) -> None:
        """Keeps what matters of some events."""
        kinds, takers = (
            _CATEGORIES,
            (self._take_cpu, self._take_launch, self._take_kernel, self._take_copy, self._take_set),
        )
        for event in events:
            if event.ph != "X":
                continue
            category = event.cat
            kind = kinds.get(category, _OTHER) if type(category) is str else None
            if kind is None:
                continue
            args = event.args
            if kind != _OTHER:
                takers[kind](event, args or _NO_ARGS)
            if kind not in _GPU and args is not None and args.stream is not None:
                self._take_marked(event, args)

    @property
    def call_correlation(self) -> Int64:
        """The launches' correlations, in the order of the file."""
        return np.frombuffer(self.launches, dtype=np.int64)[0::3].copy()

    @property
    def call_ns(self) -> Int64:
        """The launches' times."""
        return np.frombuffer(self.launches, dtype=np.int64)[1::3].copy()

    def _thread(self, event: Event) -> int:
        key = (event.pid, event.tid) if not isinstance(event.tid, list | dict) else None
        try:
            return self.threads.setdefault(key, len(self.threads))
        except TypeError:
            return UNKNOWN

    def _take_marked(self, event: Event, args: Args) -> None:
        start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
        if to_int(args.stream) >= 0 and start_ns is not None and length_ns is not None and length_ns >= 0:
            self.marked.append((str(event.name)[:MAX_NAME], start_ns, start_ns + length_ns, to_int(args.correlation)))

    def marked_events(self) -> tuple[MarkedEvent, ...]:
        """The events off the GPU that carry a stream number."""
        launch = launches_of(
            np.array([row[3] for row in self.marked], dtype=np.int64),
            self.call_correlation,
            self.call_ns,
        )
        return tuple(
            MarkedEvent(name=name, start_ns=start, end_ns=end, launch_ns=int(at))
            for (name, start, end, _), at in zip(self.marked, launch, strict=True)
        )

    def _take_launch(self, event: Event, args: Args) -> None:
        correlation = to_int(args.correlation)
        if correlation > 0 and (start_ns := to_ns(event.ts)) is not None:
            self.launches.extend((correlation, start_ns, self._thread(event)))

    def _take_cpu(self, event: Event, args: Args) -> None:
        name = event.name
        if type(name) is not str:
            return
        if name.startswith(_TELLING):
            self._take_telling(event, name)
        dims = bytes(args.input_dims)
        if len(dims) > 2:
            external = to_int(args.external_id if args.external_id is not None else args.external_id_old)
            if external > 0:
                self.shape_external.append(external)
                self.shape_of.append(self.shapes.setdefault(dims, len(self.shapes)))

    def _take_kernel(self, event: Event, args: Args) -> None:
        self._take_gpu(event, args, 0)

    def _take_copy(self, event: Event, args: Args) -> None:
        self._take_gpu(event, args, 1)

    def _take_set(self, event: Event, args: Args) -> None:
        self._take_gpu(event, args, 2)

    def _take_telling(self, event: Event, name: str) -> None:
        """A CPU event whose name says what it is; almost none does, so the others are passed over at once."""
        if name.startswith(("nccl:", "record_param_comms")):
            self._take_comm_op(event, name)
        elif name.startswith("ProfilerStep"):
            self._take_step(event, name)
        else:
            self.frameworks.add("FSDP" if name.startswith("FSDP::") else "DDP")

    def _take_step(self, event: Event, name: str) -> None:
        found = _STEP.match(name)
        start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
        if found is None or start_ns is None or length_ns is None or length_ns < 0 or len(found[1]) > 15:
            return
        number = int(found[1])
        if number not in self.steps:
            self.steps[number] = Step(number=number, start_ns=start_ns, end_ns=start_ns + length_ns)

    def _take_comm_op(self, event: Event, name: str) -> None:
        start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
        if start_ns is not None and length_ns is not None and length_ns >= 0:
            op = _CommOp(start_ns, start_ns + length_ns, name, _kept(event.args or Args()))
            self.comm_ops[self._thread(event)].append(op)

    def _take_gpu(self, event: Event, args: Args, memory_op: int) -> None:
        start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
        name = (event.name if type(event.name) is str else str(event.name))[:MAX_NAME]
        if start_ns is None or length_ns is None:
            self.dropped["without a start or duration"] += 1
            return
        if length_ns < 0:
            self.dropped["with a negative duration"] += 1
            return
        named = type(args.collective_name) is str and args.collective_name != ""
        role = self._role(name, memory_op)
        if named and memory_op == 0:
            role = _COMM
        external = to_int(args.external_id if args.external_id is not None else args.external_id_old)
        number = self.columns.add(
            start_ns=start_ns,
            end_ns=start_ns + length_ns,
            name=name,
            device=to_int(args.device),
            stream=to_int(args.stream if args.stream is not None else event.tid),
            role=role,
            memory_op=memory_op,
            correlation=to_int(args.correlation),
            external_id=external,
            grid=to_triple(args.grid),
            block=to_triple(args.block),
            num_bytes=max(0, to_int(args.bytes)),
        )
        if role == _COMM:
            self.comm_args[number] = _kept(args)

    def _role(self, name: str, memory_op: int) -> int:
        role = self.roles.get(name)
        if role is None:
            communicates = is_communication(name, self.pattern)
            role = _COMM if communicates else _MEMORY if memory_op else _COMPUTE
            self.roles[name] = role
        return role

    def shape_column(self) -> Int64:
        """The shape of the CPU operator behind each GPU event, by "External id"; old traces repeat `correlation`."""
        external = self.columns.column("external_id")
        shape = np.full(len(external), UNKNOWN, dtype=np.int64)
        found = join(np.asarray(self.shape_external, dtype=np.int64), external)
        known = (found != UNKNOWN) & (external != self.columns.column("correlation"))
        shape[known] = np.asarray(self.shape_of, dtype=np.int64)[found[known]]
        return shape

    def comm_op_of(self, thread: int, at_ns: int) -> tuple[_CommOp, ...]:
        """The CPU events of collectives on this thread around this time, the innermost first."""
        ops = self.comm_ops.get(thread, [])
        low, high = 0, len(ops)
        while low < high:
            middle = (low + high) // 2
            if ops[middle].start_ns <= at_ns:
                low = middle + 1
            else:
                high = middle
        return tuple(op for op in reversed(ops[max(0, low - _MAX_COMM_OP_DEPTH) : low]) if at_ns <= op.end_ns)

    def index_comm_ops(self) -> None:
        """Puts the CPU events of collectives in order of start."""
        for ops in self.comm_ops.values():
            ops.sort(key=lambda op: (op.start_ns, -op.end_ns))

    def calls(self, events: GpuEvents, added: Int64, world_size: int | None) -> tuple[CommCall, ...]:
        """The collectives among the events of one device."""
        rows = np.flatnonzero(events.role == _COMM)
        correlation = self.columns.column("correlation")[added[rows]]
        call = join(self.call_correlation, correlation)
        groups = _Communicators()
        return tuple(
            self._call(events, int(row), self.comm_args[int(added[row])], int(at), groups, world_size)
            for row, at in zip(rows, call, strict=True)
        )

    def _call(  # noqa: PLR0917
        self, events: GpuEvents, row: int, args: Args, call: int, groups: "_Communicators", world_size: int | None
    ) -> CommCall:
        kernel = events.names[int(events.name[row])]
        words = args.collective_name if type(args.collective_name) is str else ""
        fallback: tuple[_CommOp, ...] = ()
        if not words and call != UNKNOWN:
            fallback = self.comm_op_of(self.launches[3 * call + 2], self.launches[3 * call + 1])
            words = next((op.name for op in fallback if op.name.startswith("nccl:")), "")
            with_fields = next((op.args for op in fallback if type(op.args.collective_name) is str), None)
            if with_fields is not None:
                args, words = with_fields, with_fields.collective_name or words
        op, kind = op_of(words), kind_of(words)
        if op == "unknown":
            op, kind = op_of(function_name(kernel)), kind_of(function_name(kernel))
        ranks = to_ranks(args.pg_ranks)
        num_ranks = max(0, to_int(args.group_size)) or len(ranks) or (world_size or 0)
        dtype, num_bytes = _bytes_of(kind, args, fallback, num_ranks)
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


def _bytes_of(kind: CollectiveKind | None, args: Args, around: tuple[_CommOp, ...], num_ranks: int) -> tuple[str, int]:
    """(type of the elements, bytes of the whole tensor), from NCCL's fields or from the CPU event's `Input Dims`."""
    dtype = args.dtype if type(args.dtype) is str else ""
    size = dtype_bytes(dtype)
    given = (max(0, to_int(args.in_nelems)) * size, max(0, to_int(args.out_nelems)) * size)
    if any(given):
        return dtype, whole_bytes(kind, *given, num_ranks)
    for op in around:
        dims = bytes(op.args.input_dims)
        if not op.name.startswith("nccl:") or len(dims) <= 2:
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
    """Names for communicators: the framework's description, with the group's own name where two share one."""

    described: dict[str, str] = field(default_factory=dict)

    def name_of(self, args: Args, stream: str) -> str:
        name = args.pg_name if type(args.pg_name) is str else ""
        description = args.pg_description if type(args.pg_description) is str else ""
        if description in _NO_DESCRIPTION:
            return f"pg {name}" if name else stream
        owner = self.described.setdefault(description, name)
        return description if owner == name else f"{description} (pg {name})"


def _device_of(properties: Any, device: int) -> tuple[str, int | None]:
    if type(properties) is not list:
        return "", None
    rows = [row for row in properties if type(row) is dict]
    row = next((row for row in rows if row.get("id") == device), rows[0] if rows else {})
    sms = to_int(row.get("numSms"))
    name = row.get("name")
    return name if type(name) is str else "", sms if sms > 0 else None


def read_kineto(
    stream: Stream, prefix: bytes, pattern: re.Pattern[str] | None = None, *, block_bytes: int | None = None
) -> tuple[GpuTrace, ...]:
    """The traces in one Kineto file: one, or one for every device that ran kernels.

    Raises:
        TraceError: if the file is no trace, or its JSON is broken.
    """
    reader = EventReader(stream, prefix) if block_bytes is None else EventReader(stream, prefix, block_bytes)
    builder = _Builder(pattern)
    num_events = 0
    for events in reader.blocks():
        num_events += len(events)
        builder.take(events)
    warnings = list(reader.warnings)
    if stream.was_cut:
        warnings.append("the packed file ends early: the job may have crashed while writing it")
    warnings.extend(f"{count} GPU events {why} were dropped" for why, count in sorted(builder.dropped.items()))
    if not len(builder.columns):
        cut = f" ({'; '.join(warnings)})" if warnings else ""
        raise TraceError(
            f"{stream.name}: no GPU event among {num_events} events{cut}; "
            "record with ProfilerActivity.CUDA, also on ROCm"
        )
    builder.index_comm_ops()
    info = reader.header.distributed_info if type(reader.header.distributed_info) is dict else {}
    rank, world = to_int(info.get("rank")), to_int(info.get("world_size"))
    named = _RANK_IN_NAME.search(stream.name)
    if rank < 0 and named is not None and len(named[1]) < 8:
        rank = int(named[1])
    launch = launches_of(
        builder.columns.column("correlation"),
        builder.call_correlation,
        builder.call_ns,
    )
    shape = builder.shape_column()
    devices = builder.columns.devices()
    version = info.get("nccl_version")
    found = []
    for device in devices:
        built, added = builder.columns.build(launch, shape, device=device if len(devices) > 1 else None)
        gpu_name, num_sms = _device_of(reader.header.device_properties, device)
        early = int(np.count_nonzero((built.launch_ns != NO_TIME) & (built.launch_ns > built.start_ns)))
        more = [f"{early} GPU events start before their launch: the clocks of CPU and GPU disagree"] if early else []
        found.append(
            GpuTrace(
                file=stream.name if len(devices) == 1 else f"{stream.name} (gpu {device})",
                format="Kineto",
                rank=rank if rank >= 0 else None,
                events=built,
                calls=builder.calls(built, added, world if world > 1 else None),
                steps=tuple(sorted(builder.steps.values(), key=lambda step: step.start_ns)),
                base_ns=max(0, to_int(reader.header.base_time)),
                world_size=world if world > 0 else None,
                gpu_name=gpu_name,
                num_sms=num_sms,
                nccl_version=version if type(version) is str else "",
                frameworks=frozenset(builder.frameworks),
                marked=builder.marked_events(),
                warnings=(*warnings, *more),
            )
        )
    return tuple(found)
