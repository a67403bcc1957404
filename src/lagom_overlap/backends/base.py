"""The seam between what is tuned and what runs it; the nouns of both sides are in `tuners.problem`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lagom_overlap.collective import SpaceLimits
from lagom_overlap.cost.operators import OperatorConstants
from lagom_overlap.hardware import Cluster
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Outcome
from lagom_overlap.workload import OverlapGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRequest:
    """What a job asks of its backend; a backend's `open_backend(request)` is its entry point.

    `job_fingerprint` names the workload and the machine model, so that a bundle of another job is refused. `repeats` is
    the number of runs behind one measurement. `cluster`, `profile`, `noise` (sigma of a log-normal factor),
    `sm_carveout` (persistent products leave that many SMs free; None: plain ones), `rank_skew_s` and `operators` (None:
    the package's for that GPU) drive the simulator; `bundle` is the recording to replay; `num_ranks`,
    `link_bytes_per_s` (emulated link, one direction, None for the plain loopback) and `timeout_s` (the longest that one
    measurement may take) drive rank processes.
    """

    job_fingerprint: str
    seed: int = 0
    repeats: int = 1
    limits: SpaceLimits = field(default_factory=SpaceLimits)
    cluster: Cluster | None = None
    profile: str = "plausible"
    noise: float = 0.0
    sm_carveout: int | None = None
    rank_skew_s: float = 0.0
    operators: OperatorConstants | None = None
    bundle: Path | None = None
    num_ranks: int = 2
    link_bytes_per_s: float | None = None
    timeout_s: float = 60.0


class Backend(Protocol):
    """Something that can run overlap groups.

    `description` says in one line what the times come from. `measure` raises `BackendError` when the machine, not the
    configuration, is at fault; the run then ends.
    """

    description: str

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """The group's spaces, its untouched default and further baselines."""

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """The group's times under the assignment, or why it cannot run."""

    def close(self) -> None:
        """Ends processes and frees what was taken; safe to call twice."""
