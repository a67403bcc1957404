"""The paired A/B: is the tuned assignment faster than what the engine does untouched?"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Baseline makespan over tuned makespan, pair by pair: above 1 the tuned assignment is faster."""

    num_pairs: int
    median_ratio: float
    q25: float
    q75: float
    num_wins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of the rounds.

    `over_default` compares with the untouched default, `over_baselines` with every other contender by name. `best_fixed`
    is the name of the fixed setting with the lowest median, if any ran. `makespans_s[arm]` lists the iteration's
    makespan (sum over groups of count x makespan) per round. `adopted` says that the lower quartile over the default
    is above 1 and that the tuned assignment differs from the default.
    """

    over_default: PairedRatio
    over_baselines: Mapping[str, PairedRatio]
    best_fixed: str | None
    adopted: bool
    makespans_s: Mapping[str, tuple[float, ...]]
