"""What one rank's GPU did, as columns in whole nanoseconds.

Every reader of `trace/` ends here, and `analysis/` starts here. Columns instead of one object per event: a trace holds
millions. Times are integers, so that sums and differences are exact.
"""

import re
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload import Phase

Int64 = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
"""As `NDArray[np.int64]`, but for importing numpy.typing, which takes longer than reading a small trace."""
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

EMULATED_GPU: Final = " (emulated)"
"""How the names of GPUs end that `lagom emulate` shows a job, and so its traces."""
RANK_IN_NAME: Final = re.compile(r"(?:rank|worker)[_\-]?(\d+)", re.IGNORECASE)
"""How a file's name says whose it is."""
NS_PER_S: Final = 10**9
"""Nanoseconds in a second; dividing by it rounds correctly, multiplying by 1e-9 does not."""
NS_PER_US: Final = 1000
"""Nanoseconds in a microsecond, the unit of Kineto's files."""
NO_TIME: Final = int(np.iinfo(np.int64).min)
"""In a column of times: the trace does not say."""
UNKNOWN: Final = -1
"""In a column of numbers: the trace does not say."""
SLOW_LAUNCH_NS: Final = 100_000
"""A launch takes 5 to 10 us, under a profiler 20."""
SLOW_COLLECTIVE_NS: Final = 1_000_000
"""What PyTorch does around the launch of a collective takes tens of microseconds."""


def seconds(length_ns: float) -> float:
    """Nanoseconds of a trace in seconds."""
    return length_ns / NS_PER_S


class EventRole(StrEnum):
    """What a GPU event does; `ROLE_CODES` numbers it in columns."""

    COMPUTE = "compute"
    COMM = "comm"
    MEMORY = "memory"


ROLE_CODES: Final = {EventRole.COMPUTE: 0, EventRole.COMM: 1, EventRole.MEMORY: 2}


class KnobReach(StrEnum):
    """Which knobs of NCCL reach a collective (source: NCCL 2.30.7, enqueue.cc; see `names.reach_of`)."""

    TUNER = "tuner"
    P2P_CHANNELS = "p2p_channels"
    NONE = "none"


COLUMNS: Final = (
    "start_ns",
    "end_ns",
    "name",
    "stream",
    "role",
    "memory_op",
    "shape",
    "grid",
    "block",
    "correlation",
    "launch_ns",
)
"""The columns of `GpuEvents`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEvents:
    """The GPU's events in order of start; all columns have the same length.

    `name`, `stream` and `shape` are indices into `names`, `streams` and the trace's own shapes (`UNKNOWN` where none
    was recorded). `correlation` is the host's number of the launch, which grows in the order of the host's calls
    (`UNKNOWN` where the trace has none). `role` holds `ROLE_CODES`, `memory_op` is 0 for a kernel, 1 for a copy, 2 for
    a set. `grid` and `block` are (n, 3), zero where unknown. `launch_ns` is the start of the CPU call that launched the
    event, `NO_TIME` where none was found.
    """

    start_ns: Int64
    end_ns: Int64
    name: Int64
    stream: Int64
    role: Int64
    memory_op: Int64
    shape: Int64
    grid: Int64
    block: Int64
    correlation: Int64
    launch_ns: Int64
    names: tuple[str, ...]
    streams: tuple[str, ...]

    def __post_init__(self) -> None:
        num = len(self.start_ns)
        for field in COLUMNS:
            if len(getattr(self, field)) != num:
                raise ValueError(f"column {field} has {len(getattr(self, field))} rows, start_ns has {num}")
        if num and (np.any(np.diff(self.start_ns) < 0) or np.any(self.end_ns < self.start_ns)):
            raise ValueError("events must be in order of start and end after they start")

    def __len__(self) -> int:
        return len(self.start_ns)

    def rows(self, role: EventRole) -> Int64:
        """The rows of one role."""
        return np.flatnonzero(self.role == ROLE_CODES[role])

    @property
    def span_ns(self) -> int:
        """From the first start to the last end."""
        return int(self.end_ns.max() - self.start_ns[0]) if len(self) else 0


def only_rows(events: GpuEvents, rows: "Int64 | slice") -> GpuEvents:
    """Some of the events; names and streams stay as they are numbered."""
    columns: dict[str, Any] = {
        field.name: value[rows]
        for field in fields(events)
        if isinstance(value := getattr(events, field.name), np.ndarray)
    }
    return replace(events, **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommCall:
    """One collective as one rank ran it.

    `event` is its row among the GPU's events, `UNKNOWN` where the file has no timeline (NCCL Inspector, flight
    recorder). `op` is the name in our words (`"all_reduce"`, `"gather"`, `"unknown"`), `kind` the same as a
    `CollectiveKind` where there is one. `num_bytes` is the whole tensor, as `Collective.num_bytes` means it. A number
    that the trace does not say is 0; `sequence` None. `ranks` is empty where unknown. `algorithm` and `protocol` are
    NCCL's words where the file has them. A call that is not `is_finished` is in no sum: its
    duration is not known. Of one that is not `is_followed` nobody saw the end: it counts as finished unless another
    rank never called it. `is_started` is None where the recorder does not tell.
    `pair` are the ranks that a send or a receive goes from and to, where they are known.
    """

    event: int
    op: str
    kind: CollectiveKind | None
    communicator: str
    reach: KnobReach
    duration_ns: int
    ranks: tuple[int, ...] = ()
    num_ranks: int = 0
    num_bytes: int = 0
    num_channels: int = 0
    num_threads: int = 0
    dtype: str = ""
    sequence: int | None = None
    algorithm: str = ""
    protocol: str = ""
    is_started: bool | None = True
    is_finished: bool = True
    is_followed: bool = True
    pair: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerStep:
    """One profiler step as the CPU saw it."""

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedEvent:
    """An event off the GPU that carries a stream number all the same (Triton's CPU operators, stream waits).

    We do not count it; HTA does, so `--compat hta` needs it.
    """

    name: str
    start_ns: int
    end_ns: int
    launch_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLaunch:
    """A call on the CPU that launches a kernel, a graph or a collective, and took `SLOW_LAUNCH_NS` or longer.

    `correlation` is `UNKNOWN` for the whole call of a collective (`is_collective`), in which other launches may lie.
    """

    name: str
    start_ns: int
    end_ns: int
    correlation: int = UNKNOWN
    is_collective: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWait:
    """Stream `stream` waits for what `waited_for` had been given up to correlation `recorded`.

    `correlation` is the wait's own. Streams are named as in `GpuEvents.streams`. Kineto writes waits where
    `enable_cuda_sync_events` was set.
    """

    correlation: int
    stream: str
    waited_for: str
    recorded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTrace:
    """One rank's trace.

    `is_cpu`: threads stand in place of streams and operators in place of kernels (`cpu_trace.py`).
    `num_gpus` are the GPUs that the file lists, 0 where none. `phases` holds (phase, start, end in ns) of the backward
    pass and the optimizer on the CPU. `lost_launch_ns` are the times of launches whose kernels are not in the trace
    (`is_torn`: its file ends within an event, and later ones are missing),
    `gpu_step_ns` where steps begin that are marked on the GPU's timeline. `frameworks` are words found in the CPU
    events that say which framework made them (`"FSDP"`, `"DDP"`), and `"ProcessGroupNCCL"` where that engine annotated
    its collectives: PyTorch 2.15's own one does not. `slow_launches` are calls of the CPU that took much longer than a
    launch does. `format` names the file format in words.
    """

    file: str
    format: str
    rank: int | None
    events: GpuEvents
    calls: tuple[CommCall, ...]
    steps: tuple[ProfilerStep, ...] = ()
    world_size: int | None = None
    gpu_name: str = ""
    num_sms: int | None = None
    nccl_version: str = ""
    is_cpu: bool = False
    num_gpus: int = 0
    phases: tuple[tuple[Phase, int, int], ...] = ()
    frameworks: frozenset[str] = frozenset()
    marked: tuple[MarkedEvent, ...] = ()
    waits: tuple[StreamWait, ...] = ()
    lost_launch_ns: tuple[int, ...] = ()
    is_torn: bool = False
    gpu_step_ns: tuple[int, ...] = ()
    slow_launches: tuple[SlowLaunch, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_emulated(self) -> bool:
        """Whether `lagom emulate` made it: the GPU's times are a cost model's, the CPU's are another clock's."""
        return self.gpu_name.endswith(EMULATED_GPU)


def short_name(path: Path, member: str = "") -> str:
    """How a file is named in a result: without its folders."""
    return f"{path.name}:{Path(member).name}" if member else path.name


def empty_events() -> GpuEvents:
    """No events: for files that hold collectives without a timeline."""
    none = np.empty(0, dtype=np.int64)
    triple = np.empty((0, 3), dtype=np.int64)
    return GpuEvents(
        start_ns=none,
        end_ns=none,
        name=none,
        stream=none,
        role=none,
        memory_op=none,
        shape=none,
        grid=triple,
        block=triple,
        correlation=none,
        launch_ns=none,
        names=(),
        streams=(),
    )
