"""The nouns of a search: problem, assignment, measurement, failure.

An `Assignment` gives each collective of a group, in order, its configuration; a `collective.LaunchedAssignment` also
sets the computation's side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median, quantiles
from types import MappingProxyType
from typing import Final

from lagom_overlap.collective import NO_LAUNCHES, CommConfig, ConfigSpace, LaunchSpace, Subspace
from lagom_overlap.timeline import Timeline
from lagom_overlap.workload import OverlapGroup

IQR_OF_SIGMA: Final = 1.349
"""The interquartile range of a normal distribution in standard deviations."""
MIN_PAIRS: Final = 3
"""The fewest rounds of a verdict that may be asked for: exact times need that many (`sequential.EXACT_PAIRS`)."""
MAX_PAIRS: Final = 101
"""The most rounds of a verdict that may be asked for. Bounds its cost; chosen, not measured."""
SAME_PAIRS: Final = 3
"""Pairs of the default before the rounds (the A/A phase), which measure the noise; one if they repeat to the last
bit."""


def most_verdict_steps(num_pairs: int, num_arms: int = 2) -> int:
    """The most steps of a verdict: pairs of the default, then rounds times contenders (default and tuned, or more)."""
    return 2 * SAME_PAIRS + num_pairs * num_arms


Assignment = tuple[CommConfig, ...]
"""One configuration per collective of a group, in the group's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProblem:
    """A group, its search spaces and its baselines.

    `default` is what the engine does untouched: the baseline that users have today. `baselines` are further named
    settings for the verdict (`"engine_default"`, `"fixed_min"`, ...). `launches` is what may be tried on the
    computation's side, by default nothing.
    """

    group: OverlapGroup
    spaces: tuple[ConfigSpace, ...]
    default: Assignment
    baselines: Mapping[str, Assignment] = field(default_factory=lambda: MappingProxyType({}))
    launches: LaunchSpace = NO_LAUNCHES

    def __post_init__(self) -> None:
        num_comms = len(self.group.comms)
        if len(self.spaces) != num_comms:
            raise ValueError(f"{len(self.spaces)} spaces for {num_comms} collectives")
        for name, assignment in {"default": self.default, **self.baselines}.items():
            if len(assignment) != num_comms:
                raise ValueError(f"{name} has {len(assignment)} configurations for {num_comms} collectives")


def corners(homes: Sequence[Subspace]) -> dict[str, Assignment]:
    """The arms of fixed settings: all knobs of each collective's subspace minimal, and all maximal."""
    return {
        "fixed_min": tuple(home.minimum for home in homes),
        "fixed_max": tuple(home.maximum for home in homes),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times of one group under one assignment: medians over `num_repeats` runs, each a maximum over ranks.

    `makespan_s` is Z, `comp_s` is Y (the computations and the gaps between them), `comm_s[j]` is x_j.
    `makespan_iqr_s` is the interquartile range of Z over the repeats (0 for one run). The timeline, if any, is of the
    last run.
    """

    makespan_s: float
    comp_s: float
    comm_s: tuple[float, ...]
    num_repeats: int = 1
    makespan_iqr_s: float = 0.0
    timeline: Timeline | None = None

    def __post_init__(self) -> None:
        for value in (self.makespan_s, self.comp_s, *self.comm_s):
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"measured times must be finite and not negative, got {self}")
        if self.num_repeats < 1:
            raise ValueError(f"num_repeats is {self.num_repeats}, must be at least 1")

    @property
    def total_comm_s(self) -> float:
        """X: the summed communication."""
        return sum(self.comm_s)

    @classmethod
    def from_runs(cls, runs: "Sequence[Measurement]") -> "Measurement":
        """The medians of several single runs, field by field."""
        makespans = [run.makespan_s for run in runs]
        low, _, high = quantiles(makespans, n=4, method="inclusive") if len(runs) > 1 else (0.0, 0.0, 0.0)
        return cls(
            makespan_s=median(makespans),
            comp_s=median(run.comp_s for run in runs),
            comm_s=tuple(median(times) for times in zip(*(run.comm_s for run in runs), strict=True)),
            num_repeats=len(runs),
            makespan_iqr_s=high - low,
            timeline=runs[-1].timeline,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A configuration that cannot run, or that was abandoned because it was slow; the search continues without it.

    `measured` is what was measured before it was abandoned. Our tuners never recommend such a setting; a published
    algorithm that has no case for it can continue from the measurement.
    """

    reason: str
    measured: Measurement | None = None


Outcome = Measurement | Failure
