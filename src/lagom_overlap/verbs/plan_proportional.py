"""How the time of a piece is estimated from that of the whole, where no piece was measured and no model fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from lagom_overlap.workload import CommOp, Gemm, Iteration, Op

_ONE_SIZE: Final = 2.0
"""Largest over smallest below which a line through both says nothing of where it starts."""
_LEAST: Final = 1e-18


@dataclass(frozen=True, slots=True)
class ProportionalTimes:
    """A fixed part and a part that grows with the work: how the time of a piece follows from that of the whole.

    `NamedTimes` scales it to what was measured. The fixed part of computations is the shortest one's time; that of
    collectives is where the line through the smallest and the largest meets zero bytes, or, where all are of about one
    size, the same as of computations. The time of a piece is a guess, not a measurement.
    """

    comp_overhead_s: float
    comm_overhead_s: float
    comp_s_per_unit: float
    comm_s_per_byte: float

    @classmethod
    def of(cls, iteration: Iteration, measured_s: Mapping[str, float]) -> "ProportionalTimes":
        """From the times of those of an iteration's operators that were measured."""
        comps = [(measured_s[op.name], _units(op)) for op in iteration.computations if op.name in measured_s]
        comms = [(measured_s[op.name], _units(op)) for op in iteration.comms if op.name in measured_s]
        fixed_s = min((seconds for seconds, _ in comps), default=1e-6)
        call_s = min((_intercept_s(comms, fixed_s), *(seconds for seconds, _ in comms)))
        return cls(fixed_s, call_s, _slope(comps, fixed_s), _slope(comms, call_s))

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        if isinstance(op, CommOp):
            return self.comm_overhead_s + self.comm_s_per_byte * _units(op)
        return self.comp_overhead_s + self.comp_s_per_unit * _units(op)


def _units(op: Op) -> float:
    """Bytes of a collective; of a computation floating-point operations, or bytes where that is all that is known."""
    if isinstance(op, CommOp):
        return float(op.collective.num_bytes)
    work = op.work
    if isinstance(work, Gemm):
        return work.flops
    return float(getattr(work, "flops", 0) or getattr(work, "num_bytes", 0) or 1)


def _intercept_s(times: list[tuple[float, float]], otherwise_s: float) -> float:
    """Where the line through the times (s) of the fewest and of the most units meets no units; at least 0."""
    if not times:
        return otherwise_s
    low, high = min(units for _, units in times), max(units for _, units in times)
    if high < _ONE_SIZE * low:
        return otherwise_s
    low_s, high_s = (median(seconds for seconds, units in times if units == end) for end in (low, high))
    return max(0.0, low_s - low * (high_s - low_s) / (high - low))


def _slope(times: list[tuple[float, float]], fixed_s: float) -> float:
    """Seconds per unit beyond the fixed part, of all together."""
    units = sum(count for _, count in times)
    return max(sum(seconds - fixed_s for seconds, _ in times) / units, _LEAST) if units else _LEAST
