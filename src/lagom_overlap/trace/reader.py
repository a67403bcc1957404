"""Opens whatever a profiler wrote and says what each rank's GPU did."""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.files import (
    DEFAULT_LIMITS,
    PICKLE_MAGIC,
    ByteStream,
    Limits,
    is_sqlite,
    open_streams,
    trace_paths,
)
from lagom_overlap.trace.gpu_trace import GpuTrace, short_name
from lagom_overlap.trace.kineto_reader import NoGpuEventError, read_kineto
from lagom_overlap.trace.merged import MergedTracesError
from lagom_overlap.units import KIB, MIB

_SNIFF: Final = 64 * KIB
"""Bytes that are looked at first."""
_MAX_SNIFF: Final = 64 * MIB
"""Bytes that are looked at for a file's kind: enough for the metadata that may stand first."""
_MAX_PATTERN: Final = 1000
"""Chosen: bounds what Python's `re` may take."""
_MIN_PARALLEL: Final = 64 * MIB
"""Unpacked bytes from which starting processes costs less than they save. Chosen, not measured."""
_CPU_ALONE: Final = "no GPU event, unlike the others"
_FOREIGN_MARKS: Final = (
    (
        re.compile(rb'"rocprofiler-sdk-tool"\s*:'),
        "rocprofv3's JSON, which is not read; the trace that torch.profiler writes on ROCm is",
    ),
    (
        re.compile(rb"^\s*(Kind|\"Kind\"),(Agent_Id|\"Agent_Id\")"),
        "a table of rocprofv3, which is not read; the trace that torch.profiler writes on ROCm is",
    ),
    (
        re.compile(rb"/device:[TG]PU:|/host:CPU|XLA Modules"),
        'a profile of XLA (JAX or TensorFlow), which is not read; a Chrome trace with kernels of category "kernel", as '
        "torch.profiler writes, is",
    ),
    (
        re.compile(rb'"(?:Ascend Hardware|aicore_metrics|Task Type|Model ID)"|^Device_id,Model ID'),
        'a profile of Ascend, which is not read; a Chrome trace with kernels of category "kernel", as torch.profiler '
        "writes, is",
    ),
)
"""Formats that other tools write: how they are known, and the nearest way."""
_ZIPPED: Final = frozenset({".gz", ".tgz", ".zip"})
_PACKED: Final = 12
"""Kineto's JSON is about this many times its gzip."""
_MARKS: Final = tuple(
    re.compile(mark) for mark in (rb'"traceEvents"\s*:', rb'"(?:coll_perf|p2p_perf|dump_stats)"\s*:', rb'"entries"\s*:')
)

_LISTED: Final[dict[int | None, str]] = {
    1: "a list of NCCL Inspector's rows; they are read from lines, one row on each",
    2: "a list of flight recorder dumps; they are read from files, one rank's dump in each",
}
"""Why a list is none, by the mark in it (`_MARKS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read: the user's own word for communication, and how much a file may unpack to.

    `as_recorded` leaves in what cannot be, as other tools do.
    """

    pattern: re.Pattern[str] | None = None
    as_recorded: bool = False
    limits: Limits = DEFAULT_LIMITS


def compile_pattern(text: str | None) -> re.Pattern[str] | None:
    """The user's pattern for kernels that communicate.

    Raises:
        TraceError: if it is no regular expression, or matches everything.
    """
    if text is None:
        return None
    if len(text) > _MAX_PATTERN:
        raise TraceError(f"--pattern is {len(text)} characters long, at most {_MAX_PATTERN} are allowed")
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise TraceError(f"--pattern {text!r} is not a regular expression: {error}") from error
    if pattern.search(""):
        raise TraceError(f"--pattern {text!r} matches every kernel; name the kernels that communicate")
    return pattern


def _which(data: bytes) -> int | None:
    """Which mark comes first; None where there is none."""
    places = [(match.start(), index) for index, mark in enumerate(_MARKS) if (match := mark.search(data))]
    return min(places)[1] if places else None


def _check_json(data: bytes, stream: ByteStream, foreign: str | None) -> None:
    """Refuses what does not begin as JSON, is in JSON of another tool (`foreign`, in words), or a list of what is none.

    Raises:
        TraceError: if it is such.
    """
    if foreign is not None and _which(data) is None:
        raise TraceError(f"{stream.name}: this is {foreign}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TraceError(f"{stream.name}: is text in UTF-16, as PowerShell writes; save it as UTF-8")
    first = data.lstrip()[:1]
    if first not in (b"{", b"["):
        what = f"it starts with {first!r}" if first or not stream.was_cut else "nothing of it can be unpacked"
        raise TraceError(f"{stream.name}: is not a trace: JSON is expected, {what}")
    if first == b"[" and b'"ph"' not in data and (which := _which(data)) in _LISTED:
        raise TraceError(f"{stream.name}: is not a trace: {_LISTED[which]}")


def _read_stream(stream: ByteStream, options: ReadOptions) -> tuple[GpuTrace, ...]:
    data = stream.read(_SNIFF).removeprefix(BOM_UTF8)
    if data.startswith(PICKLE_MAGIC):
        from lagom_overlap.trace import flight_recorder_reader  # noqa: PLC0415 - what most runs never need

        return flight_recorder_reader.read_flight_recorder(stream, data)
    foreign = next((what for mark, what in _FOREIGN_MARKS if mark.search(data)), None)
    _check_json(data, stream, foreign)
    if data.lstrip().startswith(b"["):
        return read_kineto(stream, data, options.pattern, as_recorded=options.as_recorded)
    which = _which(data)
    while which is None and len(data) < _MAX_SNIFF:
        more = stream.read(MIB)
        if not more:
            break
        data += more
        which = _which(data)
    if which is None:
        raise TraceError(
            f'{stream.name}: is not a trace: no "traceEvents" (Kineto), "coll_perf" or "p2p_perf" (NCCL '
            'Inspector) or "entries" (flight recorder) in it'
        )
    if which == 0:
        try:
            return read_kineto(stream, data, options.pattern, as_recorded=options.as_recorded)
        except NoGpuEventError as error:
            if foreign is None:
                raise
            raise TraceError(f"{stream.name}: this is {foreign}") from error
    if which == 1:
        from lagom_overlap.trace import inspector_reader  # noqa: PLC0415

        return inspector_reader.read_inspector(stream, data)
    from lagom_overlap.trace import flight_recorder_reader  # noqa: PLC0415

    return flight_recorder_reader.read_flight_recorder(stream, data)


_Read = GpuTrace | TraceError
"""What comes of a file: its traces, and why a part of it cannot be read."""


def _read_all(path: Path, options: ReadOptions) -> Iterator[_Read]:
    """The traces of one file; of an archive, those that can be read and an error for each that cannot."""
    try:
        if is_sqlite(path):
            from lagom_overlap.trace.nsys_reader import read_nsys  # noqa: PLC0415 - sqlite3, which most runs never need

            yield from read_nsys(path, options.pattern, as_recorded=options.as_recorded)
            return
        is_empty = True
        with open_streams(path, options.limits) as streams:
            for index, stream in enumerate(streams):
                is_empty = False
                try:
                    traces = _read_stream(stream, options)
                except MergedTracesError as error:
                    yield from _read_merged(path, index, error, options)
                except NoGpuEventError as error:
                    yield _read_cpu(path, index, error)
                except TraceError as error:
                    yield error
                else:
                    yield from traces
        if is_empty:
            yield TraceError(f"{short_name(path)}: an archive without a trace in it")
    except TraceError as error:
        yield error


def _read_merged(path: Path, index: int, error: MergedTracesError, options: ReadOptions) -> Iterator[_Read]:
    """The traces of a file that several processes were merged into, read once for each of them."""
    for process in error.processes:
        with open_streams(path, options.limits) as streams:
            stream = next(islice(streams, index, None))
            try:
                yield from read_kineto(stream, b"", options.pattern, as_recorded=options.as_recorded, process=process)
            except TraceError as why:
                yield why


def _read_cpu(path: Path, index: int, error: TraceError) -> _Read:
    """A trace of the CPU alone: with gloo in it, it tells what overlaps."""
    from lagom_overlap.trace.cpu_trace import read_cpu_trace  # noqa: PLC0415 - seldom needed, and imports this module

    try:
        return read_cpu_trace(path, index, error)
    except TraceError as why:
        return why


def is_trace(path: Path) -> bool:
    """Whether a file looks like a profiler's, by its first 64 KiB; False if it cannot be read."""
    try:
        if is_sqlite(path):
            return True
        with open_streams(path) as streams:
            head = next(iter(streams)).read(_SNIFF)
    except (TraceError, StopIteration):
        return False
    return _which(head) is not None


def read_file(path: Path, options: ReadOptions) -> Iterator[GpuTrace]:
    """The traces of one file, in the order in which they stand in it.

    Raises:
        TraceError: if it cannot be read, or holds no trace.
    """
    for item in _read_all(path, options):
        if isinstance(item, TraceError):
            raise item
        yield item


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProgress:
    """How far reading is: files done of all, the trace just read (None: a file is done)."""

    num_done: int
    num_files: int
    trace: str | None


def _ignore(_: ReadProgress) -> None:
    """Tells nobody."""


def _one_by_one(files: Sequence[Path], options: ReadOptions) -> Generator[tuple[int, _Read | None], None, None]:
    for index, file in enumerate(files):
        for item in _read_all(file, options):
            yield index, item
        yield index, None


def _worth_processes(files: Sequence[Path], num_jobs: int) -> bool:
    """Whether there is so much to read that starting processes pays."""
    if min(len(files), num_jobs) < 2:
        return False
    return sum(file.stat().st_size * (_PACKED if file.suffix in _ZIPPED else 1) for file in files) >= _MIN_PARALLEL


def read_traces(
    paths: Sequence[Path],
    options: ReadOptions | None = None,
    observe: Callable[[ReadProgress], None] = _ignore,
    *,
    num_jobs: int = 1,
    unread: list[str] | None = None,
) -> tuple[GpuTrace, ...]:
    """All traces of the given files and folders, in order of rank; the same for any number of jobs.

    `unread` takes a line for each file that cannot be read while others can; without it that is an error.

    With several jobs, files that are large enough are read by that many processes; call it from a module that can be
    imported without running it (`if __name__ == "__main__"`), as `multiprocessing` asks.

    Raises:
        TraceError: if a file cannot be read, or with `unread` none can.
        ValueError: if the number of jobs is below 1.
    """
    if num_jobs < 1:
        raise ValueError(f"num_jobs is {num_jobs}, must be at least 1")
    options = options or ReadOptions()
    files = tuple(file for path in paths for file in trace_paths(path))
    parts = _one_by_one(files, options)
    if _worth_processes(files, num_jobs):
        from lagom_overlap.trace.parallel import read_in_processes  # noqa: PLC0415 - multiprocessing takes its time

        parts = read_in_processes(files, partial(_read_all, options=options), num_jobs)
    traces: list[tuple[int, GpuTrace]] = []
    failed: list[tuple[int, TraceError]] = []
    num_done = 0
    with closing(parts):
        for index, item in parts:
            if item is None:
                num_done += 1
            elif isinstance(item, TraceError):
                if unread is None:
                    raise item
                failed.append((index, item))
            else:
                traces.append((index, item))
            observe(
                ReadProgress(
                    num_done=num_done,
                    num_files=len(files),
                    trace=item.file if isinstance(item, GpuTrace) else None,
                )
            )
    if any(len(trace.events) and not trace.is_cpu for _, trace in traces):
        failed += [(index, TraceError(f"{trace.file}: {_CPU_ALONE}")) for index, trace in traces if trace.is_cpu]
        traces = [(index, trace) for index, trace in traces if not trace.is_cpu]
    failed.sort(key=lambda pair: pair[0])
    if not traces:
        raise failed[0][1]
    if unread is not None:
        unread.extend(f"{error}; this file is left out" for _, error in failed)
    traces.sort(key=lambda pair: (pair[1].rank is None, pair[1].rank or 0, pair[0]))
    return tuple(trace for _, trace in traces)
