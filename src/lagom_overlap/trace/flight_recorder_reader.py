"""PyTorch's flight recorder, as JSON or as the pickle that it writes by default: collectives without a timeline.

Fields (FlightRecorder.hpp, version 2.x): `entries` with profiling_name, sizes, types, state and times in ns,
`pg_config` by group. A pickle may run code when loaded. This one is loaded by an unpickler that knows numbers, texts,
lists and dictionaries, and refuses a file that names anything else.

ProcessGroupNCCL follows its calls: "scheduled", with timing "started", then "completed". Other engines (PyTorch 2.15's
own one, FlightRecorderHook) tell the recorder of ends only: such a call is "scheduled" until it is "completed". Some
never tell (2.15.0), or take each call off the list as it is issued ("retired" and "scheduled"); then only what ranks
called, not what ended, shows where a job stands. (pytorch test/distributed/test_c10d_flight_recorder_hook.py, and dumps
that 2.15.0 wrote on emulated GPUs.)
"""

import io
import pickle
import pickletools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgspec

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.chrome_reader import repaired
from lagom_overlap.trace.event_columns import MAX_NS
from lagom_overlap.trace.fields import num_elements, to_int, to_ranks
from lagom_overlap.trace.files import PICKLE_MAGIC, ByteStream
from lagom_overlap.trace.gpu_trace import UNKNOWN, CommCall, GpuTrace, KnobReach, empty_events
from lagom_overlap.trace.inspector_reader import NO_TIMELINE
from lagom_overlap.trace.names import GLOO_PREFIX, dtype_bytes, kind_of, op_of, reach_of_kind, whole_bytes
from lagom_overlap.units import GIB, format_bytes

_PEERS: Final = re.compile(r"(send|recv) (\d{1,8})(?:->|<-)(\d{1,8})")
_MAX_FLIGHT: Final = 1 * GIB
"""Chosen, far above what a recorder's ring holds."""
_RANK_IN_NAME: Final = re.compile(r"(?<!nccl)(?<!\d)(\d+)(?:\.json)?(?:\.gz)?$")
"""A dump named after PyTorch's engine (`nccl2.json`) says nothing of a rank."""
_FOLLOWING_ENGINE: Final = "nccl"
_OWN_ENGINES: Final = frozenset({"nccl2", "nccl-lazy"})
_WHERE_ENTRIES_ARE: Final = (
    "PyTorch 2.15 keeps those of its own engine apart, where _dump_nccl_trace_json does not look: "
    "torch._C._distributed_c10d._dump_fr_trace_json(backend='nccl2')"
)


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
    state: Any = None
    retired: Any = None


class _FlightGroup(msgspec.Struct):
    name: Any = ""
    desc: Any = ""
    ranks: Any = None


class _Flight(msgspec.Struct):
    entries: list[_FlightEntry] = msgspec.field(default_factory=list)
    pg_config: Any = None
    rank: Any = None


_FLIGHT: Final = msgspec.json.Decoder(_Flight)


class _PlainUnpickler(pickle.Unpickler):
    """Loads what a dump holds; torch's own pickler may name the builder of a list, nothing else is known by name."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if module == "torch.jit._pickle" and name in _LIST_BUILDERS:
            return list
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a dump does not need")

    def persistent_load(self, _: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of itself")


_LIST_BUILDERS: Final = frozenset({"build_intlist", "build_doublelist", "build_boollist"})


def _check_memo(data: bytes) -> None:
    """Refuses a pickle that counts its values otherwise than one by one: the unpickler allots as many as it says.

    Raises:
        ValueError: if it does, or is damaged.
    """
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name in _MEMO and argument is not None and argument > number:
            raise ValueError(f"its opcode {number} is value {argument}")


_MEMO: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


def _from_pickle(data: bytes, name: str) -> _Flight:
    """The dump in a pickle.

    Raises:
        TraceError: if it is damaged, holds what no dump holds, or is no dump.
    """
    try:
        _check_memo(data)
        dump = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a hostile pickle may raise anything that its numbers, texts and lists can raise
        raise TraceError(f"{name}: refused, this pickle is no flight recorder dump: {error}") from error
    try:
        return msgspec.convert(dump, _Flight)
    except (msgspec.ValidationError, RecursionError) as error:
        raise TraceError(f"{name}: this pickle is no flight recorder dump: {error}") from error


def _from_json(data: bytes, name: str) -> _Flight:
    """The dump in a JSON file.

    Raises:
        TraceError: if it is damaged or no dump.
    """
    try:
        try:
            return _FLIGHT.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):  # nan, control characters
            return _FLIGHT.decode(repaired(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{name}: broken flight recorder dump: {error}") from error


def _tensor_bytes(sizes: Any, dtypes: Any) -> int:
    if type(sizes) is not list or type(dtypes) is not list:
        return 0
    return sum(num_elements(shape) * dtype_bytes(str(dtype)) for shape, dtype in zip(sizes, dtypes, strict=False))


def _groups(config: Any) -> dict[str, _FlightGroup]:
    if type(config) is not dict:
        return {}
    groups: dict[str, _FlightGroup] = {}
    for name, value in config.items():
        try:
            groups[str(name)] = msgspec.convert(value, _FlightGroup)
        except msgspec.ValidationError:
            continue
    return groups


@dataclass(frozen=True, slots=True)
class _Recorder:
    """What a recorder says of calls by engine: those whose ends it was told, those whose starts."""

    tells_ends: frozenset[str]
    tells_starts: frozenset[str]

    @classmethod
    def of(cls, entries: Sequence[_FlightEntry]) -> "_Recorder":
        completed = {_engine_and_op(entry)[0] for entry in entries if entry.state == "completed"}
        # Without TORCH_NCCL_ENABLE_TIMING nothing is known of starts, and a running call reads "scheduled".
        timed = any(
            entry.state == "started" or to_int(entry.time_discovered_started_ns) > 0
            for entry in entries
            if _engine_and_op(entry)[0] == _FOLLOWING_ENGINE
        )
        return cls(
            tells_ends=frozenset(completed | {_FOLLOWING_ENGINE}),
            tells_starts=frozenset({_FOLLOWING_ENGINE} if timed else ()),
        )

    def state(self, entry: _FlightEntry) -> tuple[bool | None, bool, bool]:
        """`is_started`, `is_finished` and `is_followed` of a call."""
        engine = _engine_and_op(entry)[0]
        if entry.state in (None, "completed"):
            return True, True, True
        if (entry.state == "scheduled" and entry.retired is True) or engine not in self.tells_ends:
            return None, True, False
        return entry.state != "scheduled" if engine in self.tells_starts else None, False, True


def _engine_and_op(entry: _FlightEntry) -> tuple[str, str]:
    """`("nccl2", "all_reduce")`; the engine is empty where the name has none."""
    engine, _, op = str(entry.profiling_name).rpartition(":")
    return engine, op


def _flight_call(entry: _FlightEntry, groups: dict[str, _FlightGroup], recorder: _Recorder) -> CommCall:
    engine, words = _engine_and_op(entry)
    kind = kind_of(words)
    owner = entry.process_group if type(entry.process_group) is list else [entry.process_group]
    name = str(owner[0]) if owner else ""
    group = groups.get(name, _FlightGroup())
    description = str(owner[1]) if len(owner) > 1 else str(group.desc)
    started, ended = to_int(entry.time_discovered_started_ns), to_int(entry.time_discovered_completed_ns)
    duration_ns = max(0, ended - started) if started > 0 and ended > 0 and engine not in _OWN_ENGINES else 0
    if isinstance(entry.duration_ms, float | int) and 0 <= entry.duration_ms * 1_000_000 < MAX_NS:
        duration_ns = round(entry.duration_ms * 1_000_000)
    ranks = to_ranks(group.ranks)
    sequence = to_int(entry.collective_seq_id)
    inputs = _tensor_bytes(entry.input_sizes, entry.input_dtypes)
    outputs = _tensor_bytes(entry.output_sizes, entry.output_dtypes)
    is_started, is_finished, is_followed = recorder.state(entry)
    return CommCall(
        event=UNKNOWN,
        op=op_of(words),
        kind=kind,
        communicator=description if description not in ("", "undefined") else f"pg {name}",
        reach=KnobReach.NONE if f"{engine}:" == GLOO_PREFIX else reach_of_kind(kind),
        duration_ns=duration_ns,
        ranks=ranks,
        num_ranks=len(ranks),
        num_bytes=whole_bytes(kind, inputs, outputs, len(ranks)),
        dtype=str(entry.input_dtypes[0]) if type(entry.input_dtypes) is list and entry.input_dtypes else "",
        sequence=sequence if sequence >= 0 else None,
        is_started=is_started,
        is_finished=is_finished,
        is_followed=is_followed,
        pair=_pair(words, ranks),
    )


def _pair(words: str, ranks: tuple[int, ...]) -> tuple[int, int] | None:
    """The ranks that `send 0->1` or `recv 1<-0` goes from and to; the words number them within the group."""
    match = _PEERS.search(words)
    if match is None:
        return None
    own, peer = int(match[2]), int(match[3])
    if max(own, peer) < len(ranks):
        own, peer = ranks[own], ranks[peer]
    return (own, peer) if match[1] == "send" else (peer, own)


def read_flight_recorder(stream: ByteStream, prefix: bytes) -> tuple[GpuTrace, ...]:
    """The collectives that a rank's flight recorder kept, without a timeline.

    Raises:
        TraceError: if the file is too large, or not the flight recorder's.
    """
    data = prefix + stream.read(_MAX_FLIGHT)
    if len(data) >= _MAX_FLIGHT:
        raise TraceError(f"{stream.name}: refused, a flight recorder dump of more than {format_bytes(_MAX_FLIGHT)}")
    flight = _from_pickle(data, stream.name) if data.startswith(PICKLE_MAGIC) else _from_json(data, stream.name)
    groups = _groups(flight.pg_config)
    recorder = _Recorder.of(flight.entries)
    calls = tuple(_flight_call(entry, groups, recorder) for entry in flight.entries)
    if not calls:
        raise TraceError(f"{stream.name}: a flight recorder dump without entries. {_WHERE_ENTRIES_ARE}")
    rank = to_int(flight.rank)
    named = _RANK_IN_NAME.search(stream.name)
    if rank < 0 and named is not None and len(named[1]) < 8:
        rank = int(named[1])
    warnings = [NO_TIMELINE]
    num_unseen = sum(not call.is_followed for call in calls)
    if num_unseen:
        warnings.append(
            f"of {num_unseen} of {len(calls)} calls the recorder does not know whether they ended: where a job hangs "
            "shows only in what ranks called differently or never"
        )
    if not any(call.duration_ns for call in calls) and any(call.is_finished for call in calls):
        is_own = any(_engine_and_op(entry)[0] in _OWN_ENGINES for entry in flight.entries)
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
