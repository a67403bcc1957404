"""What `lagom compare --planners` found. Format of its JSON: docs/formats_plan.md."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from lagom_overlap import __version__
from lagom_overlap.results.base import Drawn, Row
from lagom_overlap.results.plan import TimesOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRow:
    """One planner of `lagom compare --planners`: predicted seconds, bytes, and the seconds that it took.

    Where it found no plan, `failure` says why and what a plan would have is None.
    """

    planner: str
    before_s: float
    after_s: float | None = None
    lower_bound_s: float | None = None
    exposed_comm_s: float | None = None
    peak_memory_bytes: int | None = None
    solve_s: float | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class ComparePlannersResult(Drawn):
    """One comparison, a row per planner in the order given; `interrupted`: the user ended it, this was there by then.

    `baseline` is what "before" is, `simulation` whether the figures know contention (a bound never does).
    """

    verb: ClassVar[str] = "compare_planners"

    tool: str = "lagom compare"
    version: str = __version__
    job: str
    baseline: str
    simulation: str
    rows: tuple[PlannerRow, ...]
    times: TimesOrigin | None
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    def table(self) -> list[Row]:
        """One row per planner."""
        return [asdict(row) for row in self.rows]
