"""Collects GPU events one by one and lays them out as `GpuEvents`: what every reader with a timeline ends with."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lagom_overlap.trace.gpu_trace import NO_TIME, UNKNOWN, GpuEvents, Int64

MAX_NAME: Final = 4096
"""Characters of a kernel's name that are kept: templates make long names, nobody makes longer ones in earnest."""
MAX_NS: Final = 2**62
"""Times beyond are no times; also keeps sums of two within int64."""

MAX_EVENT_NS: Final = 86_400 * 10**9
"""A day: no kernel or copy runs as long, and the sum of 100,000 of them is still within int64."""


def join(keys: Int64, sought: Int64) -> Int64:
    """For each sought number its index among the keys, the first of equals; `UNKNOWN` where it is not among them."""
    if not len(keys):
        return np.full(len(sought), UNKNOWN, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, sought), len(keys) - 1)
    return np.where(ordered[at] == sought, order[at], UNKNOWN)


def stream_name(number: int) -> str:
    """A stream as traces of ours name it."""
    return f"stream {number}"


_COLUMNS: Final = (
    "start_ns",
    "end_ns",
    "name",
    "device",
    "stream",
    "role",
    "memory_op",
    "correlation",
    "external_id",
    "shape",
)
_GEOMETRY: Final = len(_COLUMNS)
_WIDTH: Final = _GEOMETRY + 6
"""Numbers of a row: the columns, and grid and block with three each."""


@dataclass(slots=True)
class EventColumns:
    """GPU events in the order of the file; `add` one, then `build`.

    All numbers of an event stand behind each other in one array (one call per event is what makes reading fast).
    """

    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    names: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers) // _WIDTH

    def column(self, name: str) -> Int64:
        """A copy of one column, in the order of adding."""
        return np.frombuffer(self.numbers, dtype=np.int64)[_COLUMNS.index(name) :: _WIDTH].copy()

    def add(
        self,
        *,
        start_ns: int,
        end_ns: int,
        name: str,
        device: int,
        stream: int,
        role: int,
        memory_op: int = 0,
        correlation: int = UNKNOWN,
        external_id: int = UNKNOWN,
        shape: int = UNKNOWN,
        grid: tuple[int, int, int] = (0, 0, 0),
        block: tuple[int, int, int] = (0, 0, 0),
    ) -> int:
        """Adds one event and returns its number in the order of adding."""
        number = self.names.setdefault(name, len(self.names))
        self.numbers.extend(
            (
                start_ns,
                end_ns,
                number,
                device,
                stream,
                role,
                memory_op,
                correlation,
                external_id,
                shape,
                *grid,
                *block,
            )
        )
        return len(self.numbers) // _WIDTH - 1

    def extend(self, columns: Mapping[str, Int64]) -> int:
        """Adds events given by columns (`geometry` is (n, 6): grid, block) and returns the first one's number.

        A column left out is unknown. The names' numbers are those of `names`.
        """
        first, num = len(self), len(columns["start_ns"])
        rows = np.full((num, _WIDTH), UNKNOWN, dtype=np.int64)
        for index, name in enumerate(_COLUMNS):
            if name in columns:
                rows[:, index] = columns[name]
        rows[:, _GEOMETRY:] = columns["geometry"]
        self.numbers.frombytes(rows.tobytes())
        return first

    def devices(self) -> tuple[int, ...]:
        """The devices that ran kernels; of a trace without kernels, all of them."""
        device = self.column("device")
        ran = device[self.column("memory_op") == 0]
        return tuple(int(d) for d in np.unique(ran if len(ran) else device))

    def build(self, launch_ns: Int64, shape: Int64, *, device: int | None = None) -> tuple[GpuEvents, Int64]:
        """The events of one device (of all, where None) in order of start, and the number at which each was added.

        `launch_ns` and `shape` are given in the order of adding.
        """
        start, end = self.column("start_ns"), self.column("end_ns")
        order = np.lexsort((end, start))
        if device is not None:
            order = order[self.column("device")[order] == device]
        geometry = np.frombuffer(self.numbers, dtype=np.int64).reshape(-1, _WIDTH)[order, _GEOMETRY:]
        streams, stream = np.unique(self.column("stream")[order], return_inverse=True)
        events = GpuEvents(
            start_ns=start[order],
            end_ns=end[order],
            name=self.column("name")[order],
            stream=stream.astype(np.int64),
            role=self.column("role")[order],
            memory_op=self.column("memory_op")[order],
            shape=shape[order],
            grid=geometry[:, :3],
            block=geometry[:, 3:],
            correlation=self.column("correlation")[order],
            launch_ns=launch_ns[order],
            names=tuple(self.names),
            streams=tuple(map(stream_name, streams.tolist())),
        )
        return events, order


def launches_of(correlation: Int64, call_correlation: Int64, call_ns: Int64) -> Int64:
    """When the CPU call that launched each event began, by correlation; the earliest of several, `NO_TIME` of none."""
    by_time = np.argsort(call_ns, kind="stable")
    matched = join(call_correlation[by_time], correlation)
    known = (matched != UNKNOWN) & (correlation > 0)
    launch = np.full(len(correlation), NO_TIME, dtype=np.int64)
    launch[known] = call_ns[by_time][matched[known]]
    return launch
