"""How an emulated job is run: what its hosts cost, what disturbs it, which clock Python reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import cos, exp, log, pi, sqrt
from typing import Final

from lagom_emulate.clock import Work

SYMMETRIC_HOSTS_VARIABLE: Final = "LAGOM_EMULATION_SYMMETRIC_HOSTS"
"""How many hosts a job with symmetric ranks has, of which the first runs; the emulated NCCL reads it, too."""
_MASK: Final = (1 << 64) - 1


class PythonClock(StrEnum):
    """What `time.perf_counter`, `monotonic` and `time` read in the job."""

    REAL = "real"
    VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationSettings:
    """`[emulate]` of a job file.

    `launch_s` is what a launch costs the host. `noise` is the sigma of a log-normal factor on every operation, drawn by
    `seed`. `stragglers` stretch a rank's kernels, `slow_links` every collective that a rank takes part in, `skew_s` is
    how much later a rank begins. A job in which nobody moves for `stall_s` of real time is ended.
    """

    launch_s: float = 5e-6
    noise: float = 0.0
    seed: int = 0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)
    skew_s: Mapping[int, float] = field(default_factory=dict)
    python_clock: PythonClock = PythonClock.REAL
    stall_s: float = 60.0

    def factor(self, process: int, op_id: int, instance: int, work: Work) -> float:
        """On the time of an operation."""
        is_comm = work.kind is not None and work.kind >= 0
        slow = (self.slow_links if is_comm else self.stragglers).get(process, 1.0)
        if not self.noise:
            return slow
        # A collective draws once for all members, whoever submits it.
        drawn = (work.num_members, instance) if is_comm else (-1 - process, op_id)
        return slow * exp(self.noise * _normal(self.seed, *drawn))

    def skew_ns(self, process: int) -> float:
        """How much later a process begins."""
        return 1e9 * self.skew_s.get(process, 0.0)

    @property
    def disturbs(self) -> bool:
        """Whether anything is slower than its price."""
        return bool(self.noise or self.stragglers or self.slow_links or self.skew_s)


def _normal(*numbers: int) -> float:
    """A standard normal value that these numbers decide (splitmix64, Box-Muller)."""
    state = 0
    for number in numbers:
        state = _mixed(state ^ (number & _MASK))
    uniform = (_mixed(state) + 1) / (_MASK + 2)
    angle = _mixed(state ^ 1) / (_MASK + 1)
    return sqrt(-2.0 * log(uniform)) * cos(2.0 * pi * angle)


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
