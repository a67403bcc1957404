"""Which of many layouts take the shortest iteration, with few of them simulated.

Every layout has a lower bound: its computations at the rate of the largest matrices, in as few turns as its pipeline
allows. A simulation costs a hundred times as much. The ratio of a simulated iteration to its bound says what to expect
of other layouts:

- Layouts of one kind have all features alike: the least ratio that was simulated of the kind counts.
- Of a kind without a simulation, each feature counts that `ENOUGH` simulated layouts have: its least ratio. The
  largest of these ratios is taken, because the slowest feature decides.
- Kinds in the families of the `BEST` layouts so far are tried whatever their features did elsewhere.

The layout with the shortest expected iteration is simulated next, until none is expected below the best ones known, or
after as many simulations as the search was given.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

ENOUGH: Final = 6
"""Simulated layouts with a feature before its ratio counts for others that have it. Chosen: fewer may all be odd."""

BEST: Final = 5
"""Layouts, the fastest so far, whose families are simulated whatever was expected of them. Chosen."""


class LayoutCandidate(Protocol):
    """A layout that may be simulated; all of a search have equally many features."""

    @property
    def features(self) -> tuple[Hashable, ...]:
        """What its iteration over its bound depends on."""

    @property
    def family(self) -> Hashable:
        """What its kind has in common with close ones, such as the degrees of parallelism."""

    @property
    def bound_s(self) -> float:
        """No simulated iteration is shorter."""


One = TypeVar("One", bound=LayoutCandidate)


class Outcome(StrEnum):
    """Why a layout has no iteration."""

    TOO_LARGE = "does not fit"
    REFUSED = "cannot be simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """How far a search is: simulations done, of at most so many, and the shortest iteration so far (s)."""

    num_simulated: int
    most: int
    best_s: float | None


@dataclass(slots=True)
class LayoutSearch(Generic[One]):
    """The search over `candidates`; `times` are the simulated ones' iterations (s) when it has ended.

    `simulate` gives an iteration (s), or why there is none. No layout is expected to be faster than the first `kept`
    iterations, unless the search `was_cut`; `least_bound_s` is the least bound of those that were not looked at: what
    is faster than that is certain. `num_too_large` were looked at and did not fit.
    """

    candidates: Sequence[One]
    simulate: Callable[[One], float | Outcome]
    kept: int
    most: int
    times: dict[int, float] = field(default_factory=dict)
    num_too_large: int = 0
    num_refused: int = 0
    was_cut: bool = False
    least_bound_s: float = 0.0

    def run(self) -> Iterator[SearchProgress]:
        """Searches; yields after every layout that was looked at, so that whoever asks may stop."""
        if not self.candidates:
            return
        bounds_s = np.array([one.bound_s for one in self.candidates])
        features = _numbers([tuple(enumerate(one.features)) for one in self.candidates])
        kinds = _numbers([(one.features,) for one in self.candidates])[:, 0]
        families = _numbers([(one.family,) for one in self.candidates])[:, 0]
        of_feature = np.full(int(features.max(initial=0)) + 1, inf)
        num_with = np.zeros(len(of_feature))
        of_kind = np.full(int(kinds.max(initial=0)) + 1, inf)
        is_left = np.ones(len(bounds_s), dtype=bool)
        while is_left.any():
            least = of_kind.min() if self.times else 1.0
            believed = np.where(num_with >= ENOUGH, of_feature, least)[features].max(axis=1)
            best = families[sorted(self.times, key=self.times.__getitem__)[:BEST]]
            believed = np.where(np.isin(families, best), least, believed)
            known = of_kind[kinds]
            expected_s = np.where(is_left, bounds_s * np.where(known < inf, known, believed), inf)
            place = int(expected_s.argmin())
            if len(self.times) >= self.kept and expected_s[place] >= sorted(self.times.values())[self.kept - 1]:
                break
            if len(self.times) >= self.most:
                self.was_cut = True
                break
            is_left[place] = False
            self._look_at(place)
            if place in self.times:
                ratio = self.times[place] / bounds_s[place]
                of_kind[kinds[place]] = min(of_kind[kinds[place]], ratio)
                of_feature[features[place]] = np.minimum(of_feature[features[place]], ratio)
                num_with[features[place]] += 1
            self.least_bound_s = float(np.where(is_left, bounds_s, inf).min())
            best_s = min(self.times.values(), default=None)
            yield SearchProgress(num_simulated=len(self.times), most=self.most, best_s=best_s)

    def _look_at(self, place: int) -> None:
        match self.simulate(self.candidates[place]):
            case Outcome.TOO_LARGE:
                self.num_too_large += 1
            case Outcome.REFUSED:
                self.num_refused += 1
            case float() as seconds:
                self.times[place] = seconds


def _numbers(rows: Sequence[Sequence[Hashable]]) -> NDArray[np.intp]:
    """Equal things have equal numbers."""
    numbers = dict[Hashable, int]()
    numbered = [[numbers.setdefault(one, len(numbers)) for one in row] for row in rows]
    return np.array(numbered, dtype=np.intp).reshape(len(rows), -1)
