"""What groups learn from each other: they share links and GPUs, so one group's constants are another's prior.

Each group is first fitted by itself. What its measurements say of a constant beyond its prior (precision and mean) is
offered to the others, widened by how far groups may differ. Only groups with the same communicators and
implementations share; SM counts are shared by all whose grids are known. What the others say in sum is kept as a sum,
so that a group's prior costs the same among two groups as among a hundred.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lagom_overlap.tune.just_enough.lattice import Floats
from lagom_overlap.tune.just_enough.model import Fit
from lagom_overlap.tune.just_enough.victim import SM_COUNTS
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
    prior_sd: Floats

    @classmethod
    def of(cls, found: Fit, best: int, prior: Prior) -> "Lesson":
        """From a group's own fit under its own prior."""
        before = prior.sd**-2
        after = 1 / np.diagonal(found.covariance[best])
        precision = np.maximum(after - before, 1e-9)
        mean = (after * found.params[best] - before * prior.mean) / precision
        return cls(precision=precision, mean=mean, prior_sd=prior.sd)

    def weighed(self) -> Floats:
        """(2, P): the weight of each constant for another group, and weight times mean."""
        weighed = np.empty((2, len(self.mean)))
        weighed[0] = 1 / (1 / self.precision + (BETWEEN_GROUPS * self.prior_sd) ** 2)
        weighed[1] = weighed[0] * self.mean
        return weighed


@dataclass(slots=True)
class _Class:
    """The lessons of those who share, as weights, and their sum."""

    lessons: dict[str, Floats] = field(default_factory=dict)
    total: Floats = field(default_factory=lambda: np.zeros(1))


class Pool:
    """The latest lessons of every group, by the kind of constants and what must be equal to share them.

    `earlier` holds those of a warm start. A group takes them if its own measurements give them log odds of at least
    `least_evidence` over what it believes without them.
    """

    def __init__(self, earlier: "Pool | None" = None, *, least_evidence: float = 0.0) -> None:
        self.earlier, self.least_evidence = earlier, least_evidence
        self._classes: dict[Hashable, _Class] = {}
        self._odds: Floats = np.zeros(len(SM_COUNTS))
        self._own_odds: dict[str, Floats] = {}

    def learn(self, key: Hashable, name: str, lesson: Lesson) -> None:
        """Keeps a group's lesson in place of its last one."""
        known = self._classes.setdefault(key, _Class())
        weighed = lesson.weighed()
        known.total = known.total + weighed - known.lessons.get(name, 0.0)
        known.lessons[name] = weighed

    def learn_sm_counts(self, name: str, costs: Mapping[int, float]) -> None:
        """Keeps a group's costs (minus log likelihoods) by SM count, over its least; the worst where it has none."""
        least, worst = min(costs.values()), max(costs.values())
        self._odds = self._odds - self._own_odds.get(name, 0.0)
        self._own_odds[name] = np.array([costs.get(count, worst) - least for count in SM_COUNTS])
        self._odds = self._odds + self._own_odds[name]

    def prior(self, key: Hashable, name: str, own: Prior) -> Prior | None:
        """A group's prior with what the others know; None where nobody else shares."""
        known = self._classes.get(key)
        if known is None or len(known.lessons) == (name in known.lessons):
            return None
        weight, weighted = known.total - known.lessons.get(name, 0.0)
        precision = own.sd**-2 + np.maximum(weight, 0.0)
        mean = (own.mean * own.sd**-2 + weighted) / precision
        between = (BETWEEN_GROUPS * own.sd) ** 2
        return Prior(mean, np.minimum(np.sqrt(1 / precision + between), own.sd))

    def against_sm_counts(self, name: str, counts: Sequence[int]) -> Floats:
        """What the other groups hold against each SM count, as costs."""
        others = dict(zip(SM_COUNTS, (self._odds - self._own_odds.get(name, 0.0)).tolist(), strict=True))
        return np.array([min(max(others.get(count, 0.0), 0.0), MOST_EVIDENCE) for count in counts])
