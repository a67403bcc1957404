"""Sets of time as disjoint half-open intervals [start, end) in whole nanoseconds: exact unions, cuts and lengths."""

from dataclasses import dataclass

import numpy as np

from lagom_overlap.trace.gpu_trace import Int64


@dataclass(frozen=True, slots=True)
class Intervals:
    """Disjoint intervals in order; no two touch."""

    start_ns: Int64
    end_ns: Int64

    @classmethod
    def union(cls, start_ns: Int64, end_ns: Int64) -> "Intervals":
        """The union of any intervals; empty ones vanish, touching ones join."""
        is_open = end_ns > start_ns
        start, end = start_ns[is_open], end_ns[is_open]
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order]) if len(order) else end
        if not len(start):
            return cls(start, reach)
        opens = np.concatenate(([True], start[1:] > reach[:-1]))
        closes = np.concatenate((opens[1:], [True]))
        return cls(start[opens], reach[closes])

    @property
    def length_ns(self) -> int:
        """The length of the set."""
        return int((self.end_ns - self.start_ns).sum())

    def before(self, at_ns: Int64) -> Int64:
        """How much of the set lies before each time."""
        if not len(self.start_ns):
            return np.zeros(len(at_ns), dtype=np.int64)
        total = np.concatenate(([0], np.cumsum(self.end_ns - self.start_ns)))
        index = np.searchsorted(self.start_ns, at_ns, side="right")
        last = np.maximum(index - 1, 0)
        inside = np.where(index > 0, np.minimum(at_ns, self.end_ns[last]) - self.start_ns[last], 0)
        return total[last] + inside

    def within(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """How much of the set lies inside each of the given intervals."""
        return self.before(end_ns) - self.before(start_ns)

    def clip(self, start_ns: int, end_ns: int) -> "Intervals":
        """The part of the set inside [start_ns, end_ns)."""
        start, end = np.maximum(self.start_ns, start_ns), np.minimum(self.end_ns, end_ns)
        is_open = end > start
        return Intervals(start[is_open], end[is_open])

    def gaps(self, start_ns: int, end_ns: int) -> "Intervals":
        """What of [start_ns, end_ns) is not in the set."""
        inner = self.clip(start_ns, end_ns)
        start = np.concatenate(([start_ns], inner.end_ns)).astype(np.int64)
        end = np.concatenate((inner.start_ns, [end_ns])).astype(np.int64)
        is_open = end > start
        return Intervals(start[is_open], end[is_open])

    def intersect(self, other: "Intervals") -> "Intervals":
        """What lies in both sets."""
        return depth_at_least(
            np.concatenate((self.start_ns, other.start_ns)), np.concatenate((self.end_ns, other.end_ns)), 2
        )


def depth_at_least(start_ns: Int64, end_ns: Int64, depth: int) -> Intervals:
    """Where at least `depth` of the given intervals run at once."""
    is_open = end_ns > start_ns
    start, end = start_ns[is_open], end_ns[is_open]
    at = np.concatenate((start, end))
    change = np.concatenate((np.ones(len(start), dtype=np.int64), -np.ones(len(end), dtype=np.int64)))
    order = np.argsort(at, kind="stable")
    at, running = at[order], np.cumsum(change[order])
    if not len(at):
        return Intervals(start, end)
    deep = running[:-1] >= depth
    return Intervals.union(at[:-1][deep], at[1:][deep])
