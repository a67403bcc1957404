"""What `lagom reproduce` found: published lines next to ours, and the series that its figures draw."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

SIMULATOR: Final = "the simulator"


class ReproducedVerdict(StrEnum):
    """How a published line fares in the simulator."""

    REPRODUCED = "reproduced"
    DIRECTION = "direction only"
    BUILT_IN = "built in"
    """It agrees, but what it agrees with went into the model: no evidence."""
    NOT = "not reproduced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One published statement and ours, under one cost profile, with a reason; `figure` is its chapter.

    `taken` is what of the paper went into ours: inputs, forms of equations, values. `gap` is ours over the published
    number, minus one (of a range: medians and middle); None where there is none.
    """

    figure: str
    profile: str
    what: str
    published: str
    ours: str
    verdict: ReproducedVerdict
    why: str
    taken: str
    gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where a published line holds under one profile, over what the paper leaves open.

    `best` is the best verdict under any setting, `where` says which verdict the line gets under which settings,
    `needed` which setting comes closest and what it lacks: "" where the line holds.
    """

    figure: str
    profile: str
    what: str
    published: str
    best: ReproducedVerdict
    where: str
    needed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A series: `x` against `y`; `kind` tells series of one figure apart."""

    name: str
    profile: str
    kind: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproducedSurface:
    """Fig. 3a: computation time over that alone, `values[i][j]` at `chunks_bytes[i]` and `channels[j]`."""

    profile: str
    channels: tuple[int, ...]
    chunks_bytes: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of Fig. 7: iteration times (s) of NCCL's default, AutoCCL and Lagom, and of the best that was found.

    `best_s` comes from a coordinate search on each group's makespan: what tuning could give at most, as far as we know.
    `hidden_share` is the share of communication that NCCL's default hides, `num_measurements` what each search took.
    """

    workload: str
    strategy: str
    cluster: str
    profile: str
    default_s: float
    autoccl_s: float
    lagom_s: float
    best_s: float
    hidden_share: float
    autoccl_measurements: int
    lagom_measurements: int

    @property
    def autoccl(self) -> float:
        """Speedup of AutoCCL over NCCL."""
        return self.default_s / self.autoccl_s

    @property
    def lagom(self) -> float:
        """Speedup of Lagom over NCCL."""
        return self.default_s / self.lagom_s

    @property
    def best(self) -> float:
        """Speedup of the best found over NCCL."""
        return self.default_s / self.best_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupBar:
    """One bar of Fig. 8: a pattern's speedup over the default, published (None: the paper has none) and ours."""

    pattern: str
    config: str
    profile: str
    published: float | None
    ours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproduceReport:
    """All that one run found; what was not asked for is empty. `ground` is where our figures come from."""

    chapters: tuple[str, ...]
    date: str
    seed: int
    lines: tuple[Line, ...]
    surfaces: tuple[ReproducedSurface, ...] = ()
    curves: tuple[Curve, ...] = ()
    cases: tuple[Case, ...] = ()
    bars: tuple[SpeedupBar, ...] = ()
    profile_labels: dict[str, str] = field(default_factory=dict)
    regions: tuple[Region, ...] = ()
    is_interrupted: bool = False
    ground: str = SIMULATOR

    def count(self, verdict: ReproducedVerdict) -> int:
        """Lines with that verdict."""
        return sum(line.verdict is verdict for line in self.lines)
