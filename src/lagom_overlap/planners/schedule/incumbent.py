"""The best schedule of a search so far, and how it was found."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.schedule.graph import Schedule

NUM_KEPT: Final = 6
"""Latest improvements that are kept for the simulation with contention to choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgress:
    """A better schedule was found: by what, when (s from the start), its makespan and the bound (ticks)."""

    found_by: str
    elapsed_s: float
    makespan: int
    bound: int


class Incumbent:
    """Keeps the shortest of the schedules offered; it is never lost."""

    def __init__(
        self,
        bound: int,
        deadline: Deadline,
        *,
        tolerance: float = 0.0,
        on_progress: Callable[[PlanProgress], None] | None = None,
    ) -> None:
        self._bound = bound
        self._deadline = deadline
        self._target = int(bound * (1.0 + tolerance))
        self._on_progress = on_progress
        self._best: Schedule | None = None
        self._latest: deque[Schedule] = deque(maxlen=NUM_KEPT)
        self.history: list[PlanProgress] = []
        self.is_proved = False

    @property
    def best(self) -> Schedule:
        """The shortest schedule offered."""
        assert self._best is not None, "nothing was offered"
        return self._best

    @property
    def latest(self) -> tuple[Schedule, ...]:
        """The last few schedules that were the best when they were offered."""
        return tuple(self._latest)

    @property
    def deadline(self) -> Deadline:
        """When the search ends."""
        return self._deadline

    @property
    def target(self) -> int:
        """Ticks at which no better schedule is looked for: the bound and its tolerance."""
        return self._target

    @property
    def bound(self) -> int:
        """A lower bound (ticks)."""
        return self._bound

    @property
    def is_reached(self) -> bool:
        """Nothing more is to be gained."""
        return self._best is not None and (self.is_proved or self._best.makespan <= self._target)

    @property
    def is_done(self) -> bool:
        """Nothing more is to be gained, or there is no time left."""
        return self._best is not None and (self.is_reached or self._deadline.left_s <= 0)

    def go_on(self, deadline: Deadline) -> None:
        """The search has more time."""
        self._deadline = deadline

    def prove(self) -> None:
        """Notes that no schedule is shorter than the best."""
        self.is_proved = True

    def offer(self, schedule: Schedule, found_by: str) -> bool:
        """Takes a schedule if it is shorter; says whether it was."""
        if self._best is not None and schedule.makespan >= self._best.makespan:
            return False
        self._best = schedule
        self._latest.append(schedule)
        progress = PlanProgress(
            found_by=found_by,
            elapsed_s=self._deadline.elapsed_s,
            makespan=schedule.makespan,
            bound=self._bound,
        )
        self.history.append(progress)
        if self._on_progress is not None:
            self._on_progress(progress)
        return True
