"""What is kept of a Kineto file while its events pass by.

A GPU event is a complete event of category kernel, gpu_memcpy or gpu_memset; it carries `correlation`, which the
launching CPU call (cuda_runtime, cuda_driver and their HIP equals) shares. Events come in blocks, either as Kineto
usually writes them (`take_usual`, by columns) or one by one with every field checked (`take`); the same events give the
same numbers either way.
"""

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np

from lagom_overlap.trace.chrome_reader import NEARLY_US, Args, TraceEvent
from lagom_overlap.trace.event_columns import (
    MAX_EVENT_NS,
    MAX_NAME,
    MAX_NS,
    EventColumns,
    join,
    launches_of,
    stream_name,
)
from lagom_overlap.trace.fields import MAX_GRID, to_int, to_ns, to_triple
from lagom_overlap.trace.gpu_trace import (
    NS_PER_US,
    ROLE_CODES,
    SLOW_COLLECTIVE_NS,
    SLOW_LAUNCH_NS,
    UNKNOWN,
    EventRole,
    Floats,
    Int64,
    MarkedEvent,
    SlowLaunch,
    StreamWait,
)
from lagom_overlap.trace.merged import Processes, processes_of
from lagom_overlap.trace.names import NCCL_PREFIXES, is_communication
from lagom_overlap.trace.step_marks import PHASES, STEP_NAME, StepMarks
from lagom_overlap.trace.usual_events import (
    CPU_TYPES,
    GPU_TYPES,
    LAUNCH_CATEGORIES,
    LAUNCH_TYPES,
    OTHER_TYPES,
    PASSED_TYPES,
    SYNC_TYPES,
    USUAL_EVENTS,
    CollectiveArgs,
    CpuEvent,
    GpuEvent,
    LaunchEvent,
    MarkedArgs,
    OtherEvent,
    SyncArgs,
    SyncEvent,
)

_CPU, _LAUNCH, _KERNEL, _COPY, _SET, _SYNC, _OTHER = range(7)
_GPU: Final = frozenset({_KERNEL, _COPY, _SET})
_CATEGORIES: Final = {
    **dict.fromkeys(("cpu_op", "Operator", "user_annotation", "cpu_instant_event"), _CPU),
    **dict.fromkeys(LAUNCH_CATEGORIES, _LAUNCH),
    **dict.fromkeys(("kernel", "Kernel"), _KERNEL),
    **dict.fromkeys(("gpu_memcpy", "Memcpy"), _COPY),
    **dict.fromkeys(("gpu_memset", "Memset"), _SET),
    "cuda_sync": _SYNC,
}
_NO_ARGS: Final = Args()
_WAIT_NAME: Final = "Stream Wait Event"
_GPU_ANNOTATION: Final = "gpu_user_annotation"
_COLLECTIVE_CALL: Final = "record_param_comms"
_SLOW_US: Final = SLOW_LAUNCH_NS / NS_PER_US
_TELLING: Final = (*NCCL_PREFIXES, _COLLECTIVE_CALL, STEP_NAME, "FSDP::", "DistributedDataParallel", *PHASES)
_LAUNCHES_KERNEL: Final = re.compile(r"launch\w*kernel|kernel\w*launch", re.IGNORECASE)
"""Calls that put one kernel on a stream; graphs, host functions and copies have other names."""
_COMPUTE, _COMM, _MEMORY = (ROLE_CODES[role] for role in (EventRole.COMPUTE, EventRole.COMM, EventRole.MEMORY))
_NUM_ROLES: Final = len(ROLE_CODES)
_MAX_COMM_OP_DEPTH: Final = 8
"""Events around a launch that are looked at, the innermost first. Bounds the computation."""
_NUMBERS: Final = attrgetter("device", "stream", "correlation", "external_id", "external_id_old")
_GEOMETRY: Final = attrgetter("grid", "block")


@dataclass(frozen=True, slots=True)
class LaunchedComm:
    """A CPU event around the launch of a collective."""

    start_ns: int
    end_ns: int
    name: str
    args: CollectiveArgs


def _pid_of(event: TraceEvent) -> Hashable:
    """What the event calls its process; None for what is no name."""
    return event.pid if isinstance(event.pid, int | str) else None


def _pass(_: object) -> None:
    """Keeps nothing."""


def _whole(values: Iterable[int]) -> Int64 | None:
    """Whole numbers as an array; None where one is larger than we take for a number."""
    try:
        numbers = np.frombuffer(array("q", values), dtype=np.int64)
    except OverflowError:
        return None
    return numbers if _all_within(numbers, MAX_NS) else None


def _all_within(values: Int64 | Floats, limit: float) -> bool:
    """Whether all are numbers between -limit and limit; the least int64 has no absolute value, nan is no number."""
    return bool(np.all((-limit < values) & (values < limit)))


def _whole_ns(values: Sequence[int | float]) -> Int64 | None:
    """Microseconds in whole nanoseconds, as `to_ns` has them; None where only `to_ns` can tell."""
    times_us = np.array(values) if values else np.empty(0, dtype=np.int64)
    limit = NEARLY_US if times_us.dtype == np.float64 else MAX_NS // 1000
    if times_us.dtype not in (np.float64, np.int64) or not _all_within(times_us, limit):
        return None
    if times_us.dtype == np.float64:
        held_ns = np.rint(times_us * 1000)
        near_ns = held_ns + np.sign(times_us - held_ns / 1000)
        held_ns = np.where(near_ns / 1000 == times_us, near_ns, held_ns)
    else:
        held_ns = times_us * 1000
    whole_ns: Int64 = held_ns.astype(np.int64, copy=False)
    return whole_ns


@dataclass(slots=True)
class KinetoEvents:
    """Everything that is kept of a file while its events pass by."""

    pattern: re.Pattern[str] | None
    columns: EventColumns = field(default_factory=EventColumns)
    roles: dict[str, int] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    comm_args: dict[int, CollectiveArgs] = field(default_factory=dict)
    launches: "array[int]" = field(default_factory=lambda: array("q"))
    kernel_launches: "array[int]" = field(default_factory=lambda: array("q"))
    launches_kernel: dict[str, bool] = field(default_factory=dict)
    slow_launches: list[SlowLaunch] = field(default_factory=list)
    shape_external: "array[int]" = field(default_factory=lambda: array("q"))
    shape_of: "array[int]" = field(default_factory=lambda: array("q"))
    shapes: dict[bytes, int] = field(default_factory=dict)
    threads: dict[object, int] = field(default_factory=dict)
    comm_ops: defaultdict[int, list[LaunchedComm]] = field(default_factory=lambda: defaultdict(list))
    marks: StepMarks = field(default_factory=StepMarks)
    frameworks: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    marked: list[tuple[str, int, int, int]] = field(default_factory=list)
    waits: list[StreamWait] = field(default_factory=list)
    num_events: int = 0
    num_begun: int = 0
    num_foreign: Counter[str] = field(default_factory=Counter)
    only: frozenset[Hashable] | None = None
    launching_pids: set[Hashable] = field(default_factory=set)
    gpu_pids: dict[Hashable, int] = field(default_factory=dict)
    gpu_pid: "array[int]" = field(default_factory=lambda: array("q"))

    def take_usual(self, block: bytes) -> bool:
        """Keeps what matters of a list of events if all of them are as usual; else nothing of it, and says so."""
        if self.only is not None:
            return False
        try:
            events = USUAL_EVENTS.decode(block)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        gpu: list[GpuEvent] = []
        cpu: list[CpuEvent] = []
        launches: list[LaunchEvent] = []
        others: list[OtherEvent] = []
        syncs: list[SyncEvent] = []
        append: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(GPU_TYPES, gpu.append),
            **dict.fromkeys(CPU_TYPES, cpu.append),
            **dict.fromkeys(LAUNCH_TYPES, launches.append),
            **dict.fromkeys(OTHER_TYPES, others.append),
            **dict.fromkeys(SYNC_TYPES, syncs.append),
            **dict.fromkeys(PASSED_TYPES, _pass),
        }
        for passing in events:
            append[type(passing)](passing)
        columns, calls = self._gpu_columns(gpu), self._launch_columns(launches)
        telling = [event for event in cpu if event.name.startswith(_TELLING)]
        if columns is None or calls is None or _whole_ns([event.ts for event in telling]) is None:
            return False
        first = self.columns.extend(columns)
        pids = self.gpu_pids
        self.gpu_pid.extend([pids.setdefault(event.pid, len(pids)) for event in gpu])
        for at in np.flatnonzero(columns["role"] == _COMM).tolist():
            self.comm_args[first + at] = gpu[at].args.kept()
        self.launches.frombytes(calls.tobytes())
        of_kernels = [
            launch
            for launch in launches
            if launch.args is not None and launch.args.correlation > 0 and self._launches_kernel(launch.name)
        ]
        self.kernel_launches.extend(launch.args.correlation for launch in of_kernels if launch.args is not None)
        self.launching_pids.update([launch.pid for launch in of_kernels])
        self._take_others(launches, others)
        for event in telling:
            self._take_telling(event, event.name)
        self._take_shapes(cpu)
        for sync in syncs:
            if sync.args is not None:
                self._take_sync(sync, sync.args)
        timed: Iterable[CpuEvent | LaunchEvent | OtherEvent] = chain[Any](cpu, launches, others, syncs)
        for passed in timed:
            if passed.args is not None and passed.args.stream is not None:
                self._take_marked(passed, passed.args)
        self.num_events += len(events)
        return True

    def _gpu_columns(self, gpu: Sequence[GpuEvent]) -> dict[str, Int64] | None:
        """The columns of some GPU events; None where one has to be looked at by itself."""
        args = [event.args for event in gpu]
        start_ns, length_ns = _whole_ns([event.ts for event in gpu]), _whole_ns([event.dur for event in gpu])
        numbers = _whole(chain.from_iterable(map(_NUMBERS, args)))
        geometry = _whole(chain.from_iterable(chain.from_iterable(map(_GEOMETRY, args))))
        if start_ns is None or length_ns is None or numbers is None or geometry is None:
            return None
        geometry = geometry.reshape(-1, 6)
        if np.any((length_ns < 0) | (length_ns > MAX_EVENT_NS)) or np.any((geometry < 0) | (geometry >= MAX_GRID)):
            return None
        codes = self._codes(gpu)  # last: it keeps new names
        if codes is None:
            return None
        role = codes % _NUM_ROLES
        memory_op = np.array([event.memory_op for event in gpu], dtype=np.int64)
        named = [at for at, a in enumerate(args) if type(a.collective_name) is str and a.collective_name]
        role[named] = np.where(memory_op[named] == 0, _COMM, role[named])
        device, stream, correlation, external, external_old = numbers.reshape(-1, 5).T
        return {
            "start_ns": start_ns,
            "end_ns": start_ns + length_ns,
            "name": codes // _NUM_ROLES,
            "device": device,
            "stream": stream,
            "role": role,
            "memory_op": memory_op,
            "correlation": correlation,
            "external_id": np.where(external == UNKNOWN, external_old, external),
            "geometry": geometry,
        }

    def _codes(self, gpu: Sequence[GpuEvent]) -> Int64 | None:
        """Each event's name and role in one number; None where a name is longer than is kept."""
        known, names = self.codes, self.columns.names
        codes = [known.get(event.name, UNKNOWN) for event in gpu]
        if UNKNOWN in codes:
            if any(len(event.name) > MAX_NAME for event in gpu):
                return None
            for event in gpu:
                if event.name not in known:
                    number = names.setdefault(event.name, len(names))
                    known[event.name] = number * _NUM_ROLES + self._role(event.name, event.memory_op)
            codes = [known[event.name] for event in gpu]
        return np.array(codes, dtype=np.int64)

    def _launch_columns(self, launches: Sequence[LaunchEvent]) -> Int64 | None:
        """(correlation, start, thread) of the launches that have a correlation, row by row; None as above."""
        correlated = [event for event in launches if event.args is not None and event.args.correlation > 0]
        start_ns = _whole_ns([event.ts for event in correlated])
        correlation = _whole([event.args.correlation for event in correlated if event.args is not None])
        if start_ns is None or correlation is None:
            return None
        threads = self.threads
        thread = [threads.setdefault((event.pid, event.tid), len(threads)) for event in correlated]
        return np.column_stack((correlation, start_ns, np.array(thread, dtype=np.int64)))

    def _take_shapes(self, cpu: Sequence[CpuEvent]) -> None:
        known, last = UNKNOWN, MAX_NS
        shaped = [
            (external, bytes(a.input_dims))
            for event in cpu
            if (a := event.args) is not None
            and len(a.input_dims) > 2
            and 0 < (external := a.external_id if a.external_id != known else a.external_id_old) < last
        ]
        shapes = self.shapes
        self.shape_external.extend([external for external, _ in shaped])
        self.shape_of.extend([shapes.setdefault(dims, len(shapes)) for _, dims in shaped])

    def take(self, events: Sequence[TraceEvent]) -> None:
        """Keeps what matters of some events."""
        self.num_events += len(events)
        kinds, takers = (
            _CATEGORIES,
            (
                self._take_cpu,
                self._take_launch,
                self._take_kernel,
                self._take_copy,
                self._take_set,
                self._take_sync,
            ),
        )
        for event in events:
            if self.only is not None and _pid_of(event) not in self.only:
                continue
            if event.ph != "X":
                self.num_begun += event.ph == "B"
                continue
            category = event.cat
            kind = kinds.get(category, _OTHER) if type(category) is str else None
            if kind is None:
                continue
            args = event.args
            if kind != _OTHER:
                takers[kind](event, args or _NO_ARGS)
            elif category != _GPU_ANNOTATION:
                self.num_foreign.update([category] if args is not None and args.stream is not None else [])
            elif type(event.name) is str and event.name.startswith(STEP_NAME):
                self.marks.take_gpu_step(event)
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

    def processes(self, name: str) -> Processes:
        """The processes whose traces were merged into this file; none if it is one's.

        Raises:
            TraceError: if there are several, and GPU events do not say whose they are.
        """
        if len(self.launching_pids) < 2:
            return ()
        calls = np.frombuffer(self.launches, dtype=np.int64).reshape(-1, 3)
        pid_of = {number: key[0] for key, number in self.threads.items() if isinstance(key, tuple)}
        launches: dict[Hashable, tuple[Int64, Int64]] = {}
        for pid in [pid for pid in dict.fromkeys(pid_of.values()) if pid in self.launching_pids]:
            mine = np.isin(calls[:, 2], [number for number, owner in pid_of.items() if owner == pid])
            if mine.any():
                launches[pid] = calls[mine, 0], calls[mine, 1]
        correlation, start_ns = self.columns.column("correlation"), self.columns.column("start_ns")
        number = np.frombuffer(self.gpu_pid, dtype=np.int64)
        rows = {pid: np.flatnonzero(number == at) for pid, at in self.gpu_pids.items()}
        return processes_of(launches, {pid: (correlation[at], start_ns[at]) for pid, at in rows.items()}, name)

    def _thread(self, event: TraceEvent | CpuEvent) -> int:
        key = (event.pid, event.tid) if not isinstance(event.tid, list | dict) else None
        try:
            return self.threads.setdefault(key, len(self.threads))
        except TypeError:
            return UNKNOWN

    def _launches_kernel(self, name: Any) -> bool:
        """Whether a call of this name puts one kernel on a stream."""
        known = self.launches_kernel.get(name) if type(name) is str else False
        if known is None:
            known = self.launches_kernel[name] = _LAUNCHES_KERNEL.search(name) is not None
        return known

    def _take_marked(self, event: TraceEvent | CpuEvent | LaunchEvent | OtherEvent, args: Args | MarkedArgs) -> None:
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

    def _take_launch(self, event: TraceEvent, args: Args) -> None:
        correlation = to_int(args.correlation)
        if correlation > 0 and (start_ns := to_ns(event.ts)) is not None:
            self.launches.extend((correlation, start_ns, self._thread(event)))
            if self._launches_kernel(event.name):
                self.kernel_launches.append(correlation)
                self.launching_pids.add(_pid_of(event))
            self._take_slow(event, correlation)

    def _take_others(self, launches: Sequence[LaunchEvent], others: Sequence[OtherEvent]) -> None:
        """The slow ones of some launches, and the steps among other events."""
        for launch in launches:
            if launch.dur >= _SLOW_US and launch.args is not None:
                self._take_slow(launch, launch.args.correlation)
        for mark in others:
            if mark.name.startswith(STEP_NAME):
                self.marks.take_gpu_step(mark)

    def _take_slow(self, event: TraceEvent | LaunchEvent, correlation: int) -> None:
        """A launch that took longer than launches do; copies wait for pageable memory as they should."""
        start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
        if type(event.name) is not str or start_ns is None or length_ns is None or correlation <= 0:
            return
        if SLOW_LAUNCH_NS <= length_ns <= MAX_EVENT_NS and "launch" in event.name.lower():
            self.slow_launches.append(
                SlowLaunch(
                    name=event.name[:MAX_NAME],
                    start_ns=start_ns,
                    end_ns=start_ns + length_ns,
                    correlation=correlation,
                )
            )

    def slow_calls(self) -> tuple[SlowLaunch, ...]:
        """The launches, and the calls of collectives, that took much longer than they do."""
        collectives = [
            SlowLaunch(
                name=op.args.collective_name if type(op.args.collective_name) is str else op.name,
                start_ns=op.start_ns,
                end_ns=op.end_ns,
                is_collective=True,
            )
            for ops in self.comm_ops.values()
            for op in ops
            if op.name == _COLLECTIVE_CALL and SLOW_COLLECTIVE_NS <= op.end_ns - op.start_ns <= MAX_EVENT_NS
        ]
        return tuple(sorted((*self.slow_launches, *collectives), key=lambda call: (call.start_ns, -call.end_ns)))

    def _take_sync(self, event: TraceEvent | SyncEvent, args: Args | SyncArgs) -> None:
        """A wait of a stream for an event that another one recorded; events of no stream are left out."""
        numbers = [to_int(v) for v in (args.correlation, args.stream, args.wait_on_stream, args.wait_on_event)]
        if event.name == _WAIT_NAME and UNKNOWN not in numbers:
            correlation, stream, waited_for, recorded = numbers
            self.waits.append(
                StreamWait(
                    correlation=correlation,
                    stream=stream_name(stream),
                    waited_for=stream_name(waited_for),
                    recorded=recorded,
                )
            )

    def _take_cpu(self, event: TraceEvent, args: Args) -> None:
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

    def _take_kernel(self, event: TraceEvent, args: Args) -> None:
        self._take_gpu(event, args, 0)

    def _take_copy(self, event: TraceEvent, args: Args) -> None:
        self._take_gpu(event, args, 1)

    def _take_set(self, event: TraceEvent, args: Args) -> None:
        self._take_gpu(event, args, 2)

    def _take_telling(self, event: TraceEvent | CpuEvent, name: str) -> None:
        """A CPU event whose name says what it is; almost none does, so the others are passed over at once."""
        if name.startswith((*NCCL_PREFIXES, _COLLECTIVE_CALL)):
            self._take_comm_op(event, name)
            if name.startswith(NCCL_PREFIXES[0]):
                self.frameworks.add("ProcessGroupNCCL")
        elif name.startswith(STEP_NAME):
            self.marks.take_step(event, name)
        elif name.startswith(PHASES):
            self.marks.take_phase(event, name)
        if name.startswith(("FSDP::", "DistributedDataParallel")):
            self.frameworks.add("FSDP" if name.startswith("FSDP::") else "DDP")

    def _take_comm_op(self, event: TraceEvent | CpuEvent, name: str) -> None:
        start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
        if start_ns is not None and length_ns is not None and length_ns >= 0:
            op = LaunchedComm(start_ns, start_ns + length_ns, name, (event.args or Args()).kept())
            self.comm_ops[self._thread(event)].append(op)

    def _take_gpu(self, event: TraceEvent, args: Args, memory_op: int) -> None:
        start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
        name = (event.name if type(event.name) is str else str(event.name))[:MAX_NAME]
        if start_ns is None or length_ns is None:
            self.dropped["without a start or duration"] += 1
            return
        if length_ns < 0:
            self.dropped["with a negative duration"] += 1
            return
        if length_ns > MAX_EVENT_NS:
            self.dropped["with a duration of more than a day"] += 1
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
        )
        self.gpu_pid.append(self.gpu_pids.setdefault(_pid_of(event), len(self.gpu_pids)))
        if role == _COMM:
            self.comm_args[number] = args.kept()

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
        matched = join(np.asarray(self.shape_external, dtype=np.int64), external)
        known = (matched != UNKNOWN) & (external != self.columns.column("correlation"))
        shape[known] = np.asarray(self.shape_of, dtype=np.int64)[matched[known]]
        return shape

    def comm_ops_around(self, call: int) -> tuple[LaunchedComm, ...]:
        """The CPU events of collectives around a launch (its index) on its thread, the innermost first."""
        _, at_ns, thread = self.launches[3 * call : 3 * call + 3]
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
