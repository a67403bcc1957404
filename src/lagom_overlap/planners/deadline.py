"""What a planner is given: time, or work.

Time ends a search wherever a loaded machine has got to by then, so that no two plans need be equal. Work counts what
the searches do, in steps: a step is one operator put into a schedule by the library, and what else takes long counts as
many as take about as long. The same problem with the same work gives the same plan, whatever else the machine does.

Searches know seconds only (shares of what is left, so long for a window): with work, `STEPS_PER_S` steps are one.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Final

from lagom_overlap.interrupts import noted

STEPS_PER_S: Final = 4_000_000
"""Steps that stand for a second: about what one core did where this was measured (docs/planners.md)."""
WORK_NOTE: Final = "work: "
"""How a plan's note on its work begins."""
OPERATOR_STEPS: Final = 15
"""Steps per operator of what Python does to a whole graph: making it, simulating it, rewriting it."""

_interrupted = threading.Event()


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C or SIGTERM ends every deadline: planners return the best they have; a second interrupts.

    Yields the event that says whether it came. Does nothing outside of the main thread.
    """
    _interrupted.clear()
    try:
        with noted(_interrupted.set):
            yield _interrupted
    finally:
        _interrupted.clear()


def is_interrupted() -> bool:
    """The user has ended the search by Ctrl-C."""
    return _interrupted.is_set()


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """A budget in millions of steps. `limit_s` ends the search on the clock all the same, and then plans may differ."""

    million_steps: float
    limit_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.million_steps < float("inf"):
            raise ValueError(f"work is {self.million_steps} million steps, must be positive and finite")
        if self.limit_s is not None and not 0 < self.limit_s < float("inf"):
            raise ValueError(f"limit is {self.limit_s} s, must be positive and finite")


class _Meter:
    """Steps done, in seconds; `was_cut` once the clock ended what work had not."""

    def __init__(self, until_s: float = float("inf")) -> None:
        self.until_s = until_s
        self.done_s = 0.0
        self.was_cut = False


class Deadline:
    """This many seconds from now on the clock, or the work that stands for them; the only clock of planning."""

    def __init__(self, budget_s: float, meter: _Meter | None = None) -> None:
        self._meter = meter
        self._start_s = self._now_s()
        self._end_s = self._start_s + budget_s

    @classmethod
    def of_work(cls, work: SearchBudget) -> "Deadline":
        """The end of so much work."""
        until_s = float("inf") if work.limit_s is None else monotonic() + work.limit_s
        return cls(1e6 * work.million_steps / STEPS_PER_S, _Meter(until_s))

    def _now_s(self) -> float:
        return monotonic() if self._meter is None else self._meter.done_s

    @property
    def counts_work(self) -> bool:
        """Whether work ends it, not the clock."""
        return self._meter is not None

    @property
    def budget_s(self) -> float:
        """Seconds from its start to its end."""
        return self._end_s - self._start_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._now_s() - self._start_s

    @property
    def left_s(self) -> float:
        """Seconds until the end; negative behind it, 0 once the user, or the clock above the work, has ended it."""
        left_s = self._end_s - self._now_s()
        if self._meter is not None and monotonic() >= self._meter.until_s:
            self._meter.was_cut = self._meter.was_cut or left_s > 0
            return min(0.0, left_s)
        return min(0.0, left_s) if _interrupted.is_set() else left_s

    @property
    def clock_s(self) -> float:
        """Seconds on the clock until a call must end, if it can: infinite where only work counts."""
        return self.left_s if self._meter is None else self._meter.until_s - monotonic()

    @property
    def left_steps(self) -> int:
        """Steps that a call may do; no limit where the clock counts."""
        return sys.maxsize if self._meter is None else max(0, int(self.left_s * STEPS_PER_S))

    def spend(self, steps: float) -> None:
        """Notes work that was done."""
        if self._meter is not None:
            self._meter.done_s += steps / STEPS_PER_S

    def within(self, limit_s: float) -> "Deadline":
        """The nearer of this one and `limit_s` seconds from now."""
        return Deadline(min(limit_s, self.left_s), self._meter)

    def parts(self, num: int) -> list["Deadline"]:
        """An end for each of several searches at once: the same time on the clock, equal parts of the work left.

        Work done under a part counts here once `join` is told of it.
        """
        if self._meter is None:
            return [self.within(self.left_s) for _ in range(num)]
        return [Deadline(self.left_s / num, _Meter(self._meter.until_s)) for _ in range(num)]

    def join(self, parts: "list[Deadline]") -> None:
        """Counts the work of parts that have ended."""
        for part in parts:
            if self._meter is not None and part._meter is not None:
                self._meter.done_s += part._meter.done_s
                self._meter.was_cut = self._meter.was_cut or part._meter.was_cut

    def remarks(self) -> tuple[str, ...]:
        """What a plan says of its work; nothing of time."""
        if self._meter is None:
            return ()
        done = f"{1e-6 * STEPS_PER_S * self.elapsed_s:.6g} of {1e-6 * STEPS_PER_S * self.budget_s:.6g} million steps"
        if self._meter.was_cut or _interrupted.is_set():
            return (f"{WORK_NOTE}{done}, then it was ended: another run may find another plan",)
        return (f"{WORK_NOTE}{done}; the same step and work give the same plan",)
