"""The search over layouts, on worlds whose iterations are known."""

from dataclasses import dataclass
from itertools import product
from math import inf

from lagom_overlap.planners.layout_search import LayoutSearch, Outcome


@dataclass(frozen=True)
class One:
    tensor: int
    micro_batch: int
    recompute: int
    iteration_s: float
    bound_s: float
    fits: bool = True

    @property
    def family(self) -> int:
        return self.tensor

    @property
    def features(self) -> tuple[int, int]:
        return (self.tensor, self.micro_batch)


def world() -> list[One]:
    """Communication grows with tensor parallelism, launch gaps shrink with the micro-batch, recomputing adds."""
    made = []
    for tensor, micro_batch, recompute in product((1, 2, 4, 8), (1, 2, 4), (0, 1)):
        bound_s = 1.0 + recompute / 3
        iteration_s = bound_s * (1 + 0.1 * tensor) * (1 + 0.4 / micro_batch) + 0.003 * tensor * micro_batch
        fits = micro_batch <= tensor * (1 + recompute)
        made.append(One(tensor, micro_batch, recompute, iteration_s, bound_s, fits))
    return made


def search_of(every: list[One], kept: int = 3, most: int = 1000) -> tuple[LayoutSearch[One], list[One]]:
    looked_at = list[One]()

    def simulate(one: One) -> float | Outcome:
        looked_at.append(one)
        return one.iteration_s if one.fits else Outcome.TOO_LARGE

    search = LayoutSearch(every, simulate, kept, most)
    for _ in search.run():
        pass
    return search, looked_at


def test_the_fastest_that_fits_is_found_without_simulating_all() -> None:
    every = world()
    search, looked_at = search_of(every)
    fastest = min((one for one in every if one.fits), key=lambda one: one.iteration_s)
    assert every[min(search.times, key=search.times.__getitem__)] == fastest
    assert len(looked_at) < len(every)
    assert len(set(looked_at)) == len(looked_at)
    assert search.num_too_large == sum(not one.fits for one in looked_at)


def test_what_is_faster_than_every_bound_that_is_left_is_certain() -> None:
    every = world()
    search, looked_at = search_of(every)
    assert search.least_bound_s == min((one.bound_s for one in every if one not in looked_at), default=inf)


def test_a_search_that_is_given_few_simulations_ends_after_them_and_says_so() -> None:
    search, _ = search_of(world(), most=2)
    assert len(search.times) == 2
    assert search.was_cut
    assert not search_of(world())[0].was_cut


def test_a_world_without_a_layout_that_fits_has_no_times() -> None:
    search, looked_at = search_of([One(1, 1, 0, 1.0, 1.0, fits=False)] * 3)
    assert (search.times, search.num_too_large, len(looked_at)) == ({}, 3, 3)
    assert not search_of([])[0].times
