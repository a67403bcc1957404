"""What `lagom compare` found of several tuners, or with `--planners` of several planners, on one job.

Formats of their JSON: docs/formats.md, docs/formats_plan.md.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

from lagom_overlap.results.base import Drawn, Row
from lagom_overlap.results.plan import TimesOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One tuner: `regret_over_best` is makespan over the best tuner's, minus 1.

    `speedup_interval` is the 95 % interval of `speedup_over_default`, None where there are too few pairs for one. All
    but the measurements are None where the user ended the comparison before the results were measured side by side.
    `step_s` is the whole step with what it found, by the price of `lagom simulate`; None where the job's is.
    """

    tuner: str
    num_measurements: int
    makespan_s: float | None
    speedup_over_default: float | None
    speedup_interval: tuple[float, float] | None
    regret_over_best: float | None
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class CompareResult(Drawn):
    """One comparison, a row per tuner in the order given; `interrupted`: the user ended it, this was there by then.

    `step_s` is the whole step untouched, as `lagom simulate` predicts it; None where the job has no model that is
    priced.
    """

    verb: ClassVar[str] = "compare"

    tool: str = "lagom compare"
    job: str
    backend: str
    seed: int
    rows: tuple[CompareRow, ...]
    step_s: float | None = None
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    def table(self) -> list[Row]:
        """One row per tuner."""
        return [
            {
                "tuner": row.tuner,
                "num_measurements": row.num_measurements,
                "makespan_s": row.makespan_s,
                "speedup_over_default": row.speedup_over_default,
                "speedup_low": None if row.speedup_interval is None else row.speedup_interval[0],
                "speedup_high": None if row.speedup_interval is None else row.speedup_interval[1],
                "regret_over_best": row.regret_over_best,
                "step_s": row.step_s,
            }
            for row in self.rows
        ]


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
