"""Nsight Systems reports, exported with `nsys export --type sqlite`.

Tables read (Nsight Systems' exporter schema): CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET, _RUNTIME, StringIds,
NVTX_EVENTS, NVTX_PAYLOAD_SCHEMA_ENTRIES, TARGET_INFO_GPU; any of them may end in a version (`_V3`). Times are
nanoseconds already. Process ids are the upper bits of `globalPid`. One trace is made for every (process, device).
Ranks, communicators and bytes come from NCCL's NVTX ranges where they were recorded (`nvtx_payloads.py`); else ranks
are the order of processes and kinds come from kernel names. Steps are NVTX ranges named like `ProfilerStep#3`,
`step 3` or `iteration 3`.

The file is opened read-only and immutable; a schema with views in place of tables is refused, because a view may
compute without end.
"""

import re
import sqlite3
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.damage import mend
from lagom_overlap.trace.event_columns import MAX_EVENT_NS, MAX_NAME, MAX_NS, EventColumns, launches_of
from lagom_overlap.trace.gpu_trace import (
    NO_TIME,
    RANK_IN_NAME,
    ROLE_CODES,
    SLOW_COLLECTIVE_NS,
    SLOW_LAUNCH_NS,
    UNKNOWN,
    CommCall,
    EventRole,
    GpuEvents,
    GpuTrace,
    ProfilerStep,
    SlowLaunch,
    short_name,
)
from lagom_overlap.trace.names import function_name, is_communication, kind_of, op_of, reach_of
from lagom_overlap.trace.nvtx_payloads import NcclRanges

_NCCL: Final = "nccl"
_NAMELESS: Final = "unnamed kernel"
_KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SETS: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
_CALLS: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
_GRAPHS: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RANGES: Final = "NVTX_EVENTS"
_LAYOUTS: Final = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
_TABLES: Final = (_KERNELS, _COPIES, _SETS, _CALLS, _GRAPHS, "StringIds", _RANGES, _LAYOUTS, "TARGET_INFO_GPU")
_VERSION: Final = re.compile(r"_V\d{1,4}$")
_STEP: Final = re.compile(
    r"^(?:ProfilerStep\s?#\s?|(?:train[_ ])?(?:step|iteration|iter)[ _:#]*)(\d{1,12})\b", re.IGNORECASE
)
_COPY_KINDS: Final = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
_MAX_ROWS: Final = 50_000_000
"""Of a table. Bounds the memory; hours of a job have fewer."""
_BATCH: Final = 50_000
"""Rows at a time between two looks at the limits."""
_PROCESS_SHIFT: Final = 24
"""A global thread or process number of Nsight Systems has the process above this bit."""
_MAX_DIGITS: Final = 8
"""Of a rank in a file's name: longer numbers are dates or process ids."""


class _Database:
    """A hostile database, read table by table."""

    def __init__(self, path: Path) -> None:
        self.name = short_name(path)
        try:
            self._connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            self._connection.text_factory = partial(str, encoding="utf-8", errors="replace")  # names may be cut
            self._connection.execute("PRAGMA trusted_schema = OFF")
            rows = self._connection.execute("SELECT name, type FROM sqlite_master LIMIT 10000").fetchall()
        except sqlite3.Error as error:
            raise TraceError(f"{self.name}: damaged SQLite file: {error}") from error
        named = [(name, kind) for name, kind in rows if type(name) is str and _VERSION.sub("", name) in _TABLES]
        foreign = sorted(name for name, kind in named if kind != "table")
        self.tables: dict[str, list[str]] = {}
        for name, _ in sorted(named, key=lambda row: (len(row[0]), row[0]), reverse=True):  # the newest first
            self.tables.setdefault(_VERSION.sub("", name), []).append(name)
        if not named and any(type(name) is str and name.startswith("rocpd_") for name, _ in rows):
            raise TraceError(
                f"{self.name}: this is a database of rocprofv3, which is not read; the trace that torch.profiler "
                "writes on ROCm is"
            )
        if foreign:
            raise TraceError(f"{self.name}: refused, {foreign[0]} is not a table")

    def close(self) -> None:
        self._connection.close()

    def rows(self, table: str, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
        """The rows of a table of `_TABLES`, of its newest version that has any; a column that is not there is None."""
        for name in self.tables.get(table, ()):
            try:
                existing = {row[1] for row in self._connection.execute(f"PRAGMA table_info({name})")}
                wanted = ", ".join(f'"{column}"' if column in existing else "NULL" for column in columns)
                cursor = self._connection.execute(f"SELECT {wanted} FROM {name} LIMIT {_MAX_ROWS}")
                is_empty = True
                while batch := cursor.fetchmany(_BATCH):
                    is_empty = False
                    yield from batch
                if not is_empty:
                    return
            except (sqlite3.Error, OverflowError) as error:
                raise TraceError(f"{self.name}: damaged SQLite file in {name}: {error}") from error


def _number(value: Any, default: int = UNKNOWN) -> int:
    return value if type(value) is int and abs(value) < MAX_NS else default


def _interval(start: Any, end: Any) -> tuple[int, int] | None:
    first, last = _number(start, -MAX_NS), _number(end, -MAX_NS)
    return (first, last) if -MAX_NS < first <= last else None


class _Reader:
    def __init__(self, database: _Database, pattern: re.Pattern[str] | None) -> None:
        self._database = database
        self._pattern = pattern
        self._texts = {
            row[0]: row[1][:MAX_NAME] for row in database.rows("StringIds", ("id", "value")) if type(row[1]) is str
        }
        self._codes: dict[str, int] = {}
        self.columns: dict[int, EventColumns] = {}
        self.dropped = 0
        self.num_nameless = 0
        self.slow_launches: dict[int, list[SlowLaunch]] = {}

    def _role(self, name: str, memory_op: int) -> int:
        if name not in self._codes:
            other = EventRole.MEMORY if memory_op else EventRole.COMPUTE
            self._codes[name] = ROLE_CODES[EventRole.COMM if is_communication(name, self._pattern) else other]
        return self._codes[name]

    def _add(self, process: Any, interval: tuple[int, int] | None, name: str, memory_op: int, **values: Any) -> None:
        if interval is None or interval[1] - interval[0] > MAX_EVENT_NS:
            self.dropped += 1
            return
        columns = self.columns.setdefault(_number(process, 0) >> _PROCESS_SHIFT, EventColumns())
        columns.add(
            start_ns=interval[0],
            end_ns=interval[1],
            name=name,
            memory_op=memory_op,
            role=self._role(name, memory_op),
            **values,
        )

    def read_events(self) -> None:
        fields = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
        kernel = (*fields, "demangledName", "shortName", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
        for row in self._database.rows(_KERNELS, kernel):
            start, end, device, stream, correlation, process, long_name, short, *geometry = row
            sizes = [max(0, _number(value, 0)) for value in geometry]
            self.num_nameless += not (self._texts.get(long_name) or self._texts.get(short))
            self._add(
                process,
                _interval(start, end),
                self._texts.get(long_name) or self._texts.get(short) or _NAMELESS,
                0,
                device=_number(device, 0),
                stream=_number(stream),
                correlation=_number(correlation),
                grid=(sizes[0], sizes[1], sizes[2]),
                block=(sizes[3], sizes[4], sizes[5]),
            )
        for table, memory_op in ((_COPIES, 1), (_SETS, 2)):
            for row in self._database.rows(table, (*fields, "copyKind")):
                start, end, device, stream, correlation, process, copy = row
                self._add(
                    process,
                    _interval(start, end),
                    _COPY_KINDS.get(copy, "Memcpy") if memory_op == 1 else "Memset (Device)",
                    memory_op,
                    device=_number(device, 0),
                    stream=_number(stream),
                    correlation=_number(correlation),
                )

    def calls(self) -> dict[int, tuple[list[int], list[int], dict[int, int]]]:
        """(correlations, starts, thread by correlation) of the CPU's calls by process."""
        by_process: dict[int, tuple[list[int], list[int], dict[int, int]]] = {}
        columns = ("start", "end", "correlationId", "globalTid", "nameId")
        for start, end, correlation, thread, name in self._database.rows(_CALLS, columns):
            began, number = _number(start, -MAX_NS), _number(correlation)
            if began > -MAX_NS and number > 0:
                process = _number(thread, 0) >> _PROCESS_SHIFT
                own = by_process.setdefault(process, ([], [], {}))
                words, interval = self._texts.get(name, ""), _interval(start, end)
                if "launch" in words.lower():
                    self._take_slow(process, words, interval, SLOW_LAUNCH_NS, number)
                own[0].append(number)
                own[1].append(began)
                own[2].setdefault(number, _number(thread, 0))
        return by_process

    def _take_slow(
        self, process: int, name: str, interval: tuple[int, int] | None, least_ns: int, correlation: int = UNKNOWN
    ) -> None:
        if interval is not None and least_ns <= interval[1] - interval[0] <= MAX_EVENT_NS:
            self.slow_launches.setdefault(process, []).append(
                SlowLaunch(
                    name=name,
                    start_ns=interval[0],
                    end_ns=interval[1],
                    correlation=correlation,
                    is_collective=correlation == UNKNOWN,
                )
            )

    def ranges(self) -> tuple[dict[int, tuple[ProfilerStep, ...]], NcclRanges]:
        """The steps that NVTX ranges name, by process, and NCCL's own ranges."""
        by_process: dict[int, dict[int, ProfilerStep]] = {}
        nccl = NcclRanges()
        nccl.take_layouts(self._database.rows(_LAYOUTS, ("schemaId", "type", "name", "offset")))
        columns = ("start", "end", "text", "textId", "globalTid", "jsonText", "jsonTextId", "binaryData")
        for start, end, text, text_id, thread, json, json_id, payload in self._database.rows(_RANGES, columns):
            words = text if type(text) is str else self._texts.get(text_id, "")
            interval = _interval(start, end)
            if interval is None:
                continue
            process = _number(thread, 0) >> _PROCESS_SHIFT
            named = _STEP.match(words)
            if named is not None:
                step = ProfilerStep(number=int(named[1]), start_ns=interval[0], end_ns=interval[1])
                by_process.setdefault(process, {}).setdefault(step.number, step)
            elif words.startswith(_NCCL):
                fields = json if type(json) is str else self._texts.get(json_id)
                nccl.take(_number(thread, 0), process, interval, words, (fields, payload))
                self._take_slow(process, words, interval, SLOW_COLLECTIVE_NS)
        nccl.sort()
        steps = {
            process: tuple(sorted(by_number.values(), key=lambda step: step.start_ns))
            for process, by_number in by_process.items()
        }
        return steps, nccl

    def num_graphs(self) -> int:
        """Launches of CUDA graphs that were recorded whole, without their kernels."""
        return sum(1 for _ in self._database.rows(_GRAPHS, ("start",)))

    def devices(self) -> dict[int, tuple[str, int | None]]:
        """(name, SMs) of every GPU."""
        return {
            _number(number): (name if type(name) is str else "", sms if type(sms) is int and sms > 0 else None)
            for number, name, sms in self._database.rows("TARGET_INFO_GPU", ("id", "name", "smCount"))
        }


def _calls_of(events: GpuEvents, threads: Mapping[int, int], ranges: NcclRanges, process: int) -> tuple[CommCall, ...]:
    calls = []
    for row in events.rows(EventRole.COMM).tolist():
        name = events.names[int(events.name[row])]
        launch_ns = int(events.launch_ns[row])
        thread = threads.get(int(events.correlation[row]))
        call = None if thread is None or launch_ns == NO_TIME else ranges.around(thread, launch_ns)
        words = function_name(name)
        if call is not None and op_of(words) == "unknown" and op_of(call.name) != "unknown":
            words = call.name
        kind, stream = kind_of(words), events.streams[int(events.stream[row])]
        communicator = (call.communicator if call else "") or stream
        num_ranks = max(0, ranges.groups.get((process, communicator), (0, -1))[0])
        given = 0 if call is None or call.num_bytes >= MAX_NS else call.num_bytes
        if kind is not None and (kind.traits.takes_part or kind.traits.leaves_part):
            given *= num_ranks  # NCCL counts what one rank gives or keeps
        calls.append(
            CommCall(
                event=row,
                op=op_of(words),
                kind=kind,
                communicator=communicator,
                reach=reach_of(name, kind),
                duration_ns=int(events.end_ns[row] - events.start_ns[row]),
                num_ranks=num_ranks,
                num_bytes=given,
                num_channels=int(events.grid[row].prod()),
                num_threads=int(events.block[row].prod()),
            )
        )
    return tuple(calls)


def read_nsys(path: Path, pattern: re.Pattern[str] | None = None, *, as_recorded: bool = False) -> tuple[GpuTrace, ...]:
    """One trace for every (process, device) of an Nsight Systems SQLite export; `as_recorded` as of `read_kineto`.

    Raises:
        TraceError: if the file is damaged, or holds no GPU event.
    """
    database = _Database(path)
    try:
        reader = _Reader(database, pattern)
        reader.read_events()
        if not reader.columns:
            raise TraceError(
                f"{database.name}: no GPU event in it; record with --trace=cuda,nvtx (and --cuda-graph-trace=node)"
            )
        calls, devices, num_graphs = reader.calls(), reader.devices(), reader.num_graphs()
        steps, ranges = reader.ranges()
    finally:
        database.close()
    traces: list[GpuTrace] = []
    is_only = len(reader.columns) == 1 and len(next(iter(reader.columns.values())).devices()) == 1
    for process in sorted(reader.columns):
        columns = reader.columns[process]
        correlations, starts, threads = calls.get(process, ([], [], {}))
        known = ranges.rank_of(process)
        launch = launches_of(
            columns.column("correlation"),
            np.asarray(correlations, dtype=np.int64),
            np.asarray(starts, dtype=np.int64),
        )
        for device in columns.devices():
            events, _ = columns.build(launch, columns.column("shape"), device=device)
            gpu_name, num_sms = devices.get(device, ("", None))
            rank = len(traces) if known is None else known[0]
            named = RANK_IN_NAME.search(database.name) if known is None and is_only else None
            if named is not None and len(named[1]) < _MAX_DIGITS:
                rank = int(named[1])
            warnings = []
            if known is None and named is None:
                warnings.append(f"the file names no ranks: process {rank} in order is called rank {rank}")
            if not as_recorded:
                mended = mend(events)
                events = mended.events
                warnings.extend(mended.warnings)
            if num_graphs:
                warnings.append(
                    f"{num_graphs} launches of CUDA graphs were recorded without their kernels, which no figure "
                    "counts; record with --cuda-graph-trace=node"
                )
            if reader.num_nameless:
                warnings.append(
                    f"{reader.num_nameless} kernels have no name: those that communicate count as computation"
                )
            if reader.dropped:
                warnings.append(
                    f"{reader.dropped} GPU events without a duration, or with one below 0 or over a day, were dropped"
                )
            traces.append(
                GpuTrace(
                    file=f"{database.name} (gpu {device})",
                    format="Nsight Systems",
                    rank=rank,
                    world_size=None if known is None else known[1],
                    events=events,
                    calls=_calls_of(events, threads, ranges, process),
                    steps=steps.get(process, ()),
                    gpu_name=gpu_name,
                    num_sms=num_sms,
                    slow_launches=tuple(
                        sorted(reader.slow_launches.get(process, ()), key=lambda call: (call.start_ns, -call.end_ns))
                    ),
                    warnings=tuple(warnings),
                )
            )
    return tuple(traces)
