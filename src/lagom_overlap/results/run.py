"""What `lagom run -- COMMAND` left in its folder. Format of its JSON: docs/formats.md."""

from collections.abc import Mapping
from dataclasses import dataclass

from lagom_overlap.collective import CommConfig
from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.results.base import Result, Row
from lagom_overlap.results.conclusion import Conclusion


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """A state that online tuning entered: when (UTC), why, call sites that were set, steps it would take at most."""

    date: str
    state: str
    reason: str
    num_settings: int
    num_steps_left: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A setting that was measured on a group of collectives, in the search or as an `arm` of the verdict.

    `configs` are knobs by collective; `makespan_s` is the group's, None where it could not run (`failure`), or where
    only the whole step was timed. `metric_h` is Lagom's H by collective, where the tuner tells it: seconds of
    computation lost per second of communication gained (Algorithm 1); the smallest is changed next.
    """

    number: int
    arm: str | None
    group: str
    configs: Mapping[str, CommConfig]
    makespan_s: float | None
    metric_h: Mapping[str, float]
    reason: str
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class RunResult(Result):
    """A training job under `lagom run`, as rank 0's files tell it, also while it runs.

    `conclusion` is None until the job has ended by itself. `steps_s` are the settled steps that ran under one setting,
    `settings` those that were saved, with the `verdict` on them.
    """

    tool: str = "lagom run"
    mode: str
    command: tuple[str, ...]
    world_size: int | None = None
    backend: str | None = None
    model: str | None = None
    states: tuple[StateChange, ...] = ()
    tried: tuple[Tried, ...] = ()
    num_steps: int | None = None
    steps_s: tuple[float, ...] = ()
    settings: tuple[SiteSetting, ...] = ()
    verdict: str | None = None
    conclusion: Conclusion | None = None

    @property
    def state(self) -> StateChange | None:
        """Where tuning is, or was at the end; None before it began."""
        return self.states[-1] if self.states else None

    def summary(self) -> str:
        """The three lines that it ended with, or where it is."""
        if self.conclusion is not None:
            return "\n".join(self.conclusion.lines())
        if self.state is None:
            return f"lagom run, {self.mode}: no step was seen yet"
        return f"lagom run, {self.mode}: {self.state.state}: {self.state.reason}"

    def table(self) -> list[Row]:
        """One row per setting that was tried."""
        return [
            {
                "number": row.number,
                "arm": row.arm,
                "group": row.group,
                "makespan_s": row.makespan_s,
                "failure": row.failure,
                "reason": row.reason,
            }
            for row in self.tried
        ]
