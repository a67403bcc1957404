"""Collects GPU events one by one and lays them out as `GpuEvents`: what every reader with a timeline ends with."""

from array import array
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lagom_overlap.trace.gpu_trace import NO_TIME, UNKNOWN, GpuEvents, Int64

MAX_NAME: Final = 4096
"""Characters of a kernel's name that are kept: templates make long names, nobody makes longer ones in earnest."""
MAX_NS: Final = 2**62
"""Times beyond are no times; also keeps sums of two within int64."""


def join(keys: Int64, sought: Int64) -> Int64:
    """For each sought number its index among the keys, the first of equals; `UNKNOWN` where it is not among them."""
    if not len(keys):
        return np.full(len(sought), UNKNOWN, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, sought), len(keys) - 1)
    return np.where(ordered[at] == sought, order[at], UNKNOWN)


def _longs() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class EventColumns:
    """GPU events in the order of the file; `add` one, then `build`."""

    start_ns: "array[int]" = field(default_factory=_longs)
    end_ns: "array[int]" = field(default_factory=_longs)
    name: "array[int]" = field(default_factory=_longs)
    device: "array[int]" = field(default_factory=_longs)
    stream: "array[int]" = field(default_factory=_longs)
    role: "array[int]" = field(default_factory=_longs)
    memory_op: "array[int]" = field(default_factory=_longs)
    correlation: "array[int]" = field(default_factory=_longs)
    external_id: "array[int]" = field(default_factory=_longs)
    shape: "array[int]" = field(default_factory=_longs)
    geometry: "array[int]" = field(default_factory=_longs)
    num_bytes: "array[int]" = field(default_factory=_longs)
    names: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start_ns)

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
        num_bytes: int = 0,
    ) -> int:
        """Adds one event and returns its number in the order of adding."""
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.device.append(device)
        self.stream.append(stream)
        self.role.append(role)
        self.memory_op.append(memory_op)
        self.correlation.append(correlation)
        self.external_id.append(external_id)
        self.shape.append(shape)
        self.geometry.extend(grid)
        self.geometry.extend(block)
        self.num_bytes.append(num_bytes)
        return len(self.start_ns) - 1

    def devices(self) -> tuple[int, ...]:
        """The devices that ran kernels; of a trace without kernels, all of them."""
        device = np.asarray(self.device, dtype=np.int64)
        ran = device[np.asarray(self.memory_op) == 0]
        return tuple(int(d) for d in np.unique(ran if len(ran) else device))

    def build(self, launch_ns: Int64, shape: Int64, *, device: int | None = None) -> tuple[GpuEvents, Int64]:
        """The events of one device (of all, where None) in order of start, and the number at which each was added.

        `launch_ns` and `shape` are given in the order of adding.
        """
        start, end = np.asarray(self.start_ns, dtype=np.int64), np.asarray(self.end_ns, dtype=np.int64)
        order = np.lexsort((end, start))
        if device is not None:
            order = order[np.asarray(self.device, dtype=np.int64)[order] == device]
        geometry = np.asarray(self.geometry, dtype=np.int64).reshape(-1, 6)[order]
        streams, stream = np.unique(np.asarray(self.stream, dtype=np.int64)[order], return_inverse=True)
        events = GpuEvents(
            start_ns=start[order],
            end_ns=end[order],
            name=np.asarray(self.name, dtype=np.int64)[order],
            stream=stream.astype(np.int64),
            role=np.asarray(self.role, dtype=np.int64)[order],
            memory_op=np.asarray(self.memory_op, dtype=np.int64)[order],
            shape=shape[order],
            grid=geometry[:, :3],
            block=geometry[:, 3:],
            num_bytes=np.asarray(self.num_bytes, dtype=np.int64)[order],
            launch_ns=launch_ns[order],
            names=tuple(self.names),
            streams=tuple(f"stream {s}" for s in streams.tolist()),
        )
        return events, order


def launches_of(correlation: Int64, call_correlation: Int64, call_ns: Int64) -> Int64:
    """When the CPU call that launched each event began, by correlation; the earliest of several, `NO_TIME` of none."""
    by_time = np.argsort(call_ns, kind="stable")
    found = join(call_correlation[by_time], correlation)
    known = (found != UNKNOWN) & (correlation > 0)
    launch = np.full(len(correlation), NO_TIME, dtype=np.int64)
    launch[known] = call_ns[by_time][found[known]]
    return launch
