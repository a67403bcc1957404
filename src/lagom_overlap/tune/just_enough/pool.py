"""What groups learn from each other: they share links and GPUs, so one group's constants are another's prior.

Each group is first fitted by itself. What its measurements say of a constant beyond its prior (precision and mean) is
offered to the others, widened by how far groups may differ. Only groups with the same communicators and
implementations share; SM counts are shared by all whose grids are known.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from lagom_overlap.tune.just_enough.fit import Fit
from lagom_overlap.tune.just_enough.lattice import Floats
from lagom_overlap.tune.just_enough.wire import Prior

BETWEEN_GROUPS: Final = 0.25
"""Spread of a constant between groups, over its prior's standard deviation."""
MOST_EVIDENCE: Final = 8.0
"""Log odds against an SM count that the other groups can give."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """What one group's own measurements say: precision beyond its prior, and the mean, per constant."""

    precision: Floats
    mean: Floats

    @classmethod
    def of(cls, found: Fit, best: int, prior: Prior) -> "Lesson":
        """From a group's own fit under its own prior."""
        before = prior.sd**-2
        after = 1 / np.diagonal(found.covariance[best])
        precision = np.maximum(after - before, 1e-9)
        mean = (after * found.params[best] - before * prior.mean) / precision
        return cls(precision=precision, mean=mean)


class Pool:
    """The latest lessons of every group, by the kind of constants and what must be equal to share them."""

    def __init__(self) -> None:
        self._lessons: dict[Hashable, dict[str, Lesson]] = {}
        self._odds: dict[str, Mapping[int, float]] = {}

    def learn(self, key: Hashable, name: str, lesson: Lesson) -> None:
        """Keeps a group's lesson in place of its last one."""
        self._lessons.setdefault(key, {})[name] = lesson

    def learn_sm_counts(self, name: str, costs: Mapping[int, float]) -> None:
        """Keeps a group's costs (minus log likelihoods) by SM count."""
        self._odds[name] = costs

    def prior(self, key: Hashable, name: str, own: Prior) -> Prior | None:
        """A group's prior with what the others know; None where nobody else shares."""
        others = [lesson for other, lesson in self._lessons.get(key, {}).items() if other != name]
        if not others:
            return None
        between = (BETWEEN_GROUPS * own.sd) ** 2
        precision, weighted = own.sd**-2, own.mean * own.sd**-2
        for lesson in others:
            weight = 1 / (1 / lesson.precision + between)
            precision, weighted = precision + weight, weighted + weight * lesson.mean
        return Prior(weighted / precision, np.minimum(np.sqrt(1 / precision + between), own.sd))

    def against_sm_count(self, name: str, count: int) -> float:
        """What the other groups hold against an SM count, as a cost."""
        total = 0.0
        for other, costs in self._odds.items():
            if other != name and costs:
                total += costs.get(count, max(costs.values())) - min(costs.values())
        return min(total, MOST_EVIDENCE)
