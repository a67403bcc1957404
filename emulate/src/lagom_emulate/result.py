"""What `lagom emulate` found. Format of its JSON: docs/formats.md."""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lagom_emulate.recorder import StepFigures
from lagom_overlap.results.base import Result, Row
from lagom_overlap.timeline import Timeline

if TYPE_CHECKING:  # for the annotation
    import plotly.graph_objects as go


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedShare:
    """What the prices of a number of operations rest on, and their share of the time of all operations alone."""

    source: str
    num_operations: int
    time_share: float


@dataclass(frozen=True, kw_only=True)
class EmulateResult(Result):
    """One emulated job.

    `step_s` is the median of all steps but the first; None, as is `last_step`, where no step was found. `exit_code` is
    the command's. `num_started` of the ranks were processes, the others are taken to have done the same. `ran` is found
    again as `timeline`.
    """

    tool: str = "lagom emulate"
    command: tuple[str, ...]
    exit_code: int
    cluster: str
    num_ranks: int
    num_started: int
    num_hosts: int
    num_steps: int
    step_s: float | None
    steps_s: tuple[float, ...]
    last_step: StepFigures | None
    virtual_s: float
    wall_s: float
    memory_bytes: int | None
    memory_limit_bytes: int
    num_operations: int
    num_late: int
    num_idle: int
    python_clock: str
    priced: tuple[PricedShare, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    ran: InitVar[Timeline]

    def __post_init__(self, ran: Timeline) -> None:
        object.__setattr__(self, "_timeline", ran)

    @property
    def timeline(self) -> Timeline:
        """What ran when in the last step, on all ranks."""
        timeline: Timeline = self.behind("_timeline", "timeline that can be read (timeline.json)")
        return timeline

    def summary(self) -> str:
        """The job, what it ran on, and the caveats."""
        said: str = import_module("lagom_emulate.report").summary(self)  # which stands above
        return said

    def figure(self) -> "go.Figure":
        """What ran when in the last step."""
        from lagom_overlap.report.timeline_figure import streams_figure  # noqa: PLC0415  plotly is loaded on demand

        return streams_figure({" ".join(self.command[-1:]) or "job": self.timeline})

    def table(self) -> list[Row]:
        """One row per step."""
        return [{"step": number, "step_s": seconds} for number, seconds in enumerate(self.steps_s)]

    @property
    def parts(self) -> Mapping[str, float]:
        """The last step's parts in seconds, by name; empty where there is none."""
        step = self.last_step
        if step is None:
            return {}
        return {
            "compute": step.compute_s,
            "stretched within it": step.stretched_s,
            "communication": step.comm_s,
            "exposed within it": step.exposed_comm_s,
            "neither": step.idle_s,
        }
