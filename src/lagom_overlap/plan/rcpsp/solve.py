"""The solver of projects: a genetic search, and beside it on a second core CP-SAT, then another genetic search.

Measured on PSPLIB and on random projects (benchmarks/rcpsp.py, benchmarks/random_projects.py): CP-SAT proves projects
of 30 activities within seconds, and larger ones if the bound can be met; where it cannot, a genetic search finds more.
So CP-SAT has the second core for a share of the time. The best schedule is never lost.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Final

from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.rcpsp.bounds import lower_bound
from lagom_overlap.plan.rcpsp.model import ExactSearch
from lagom_overlap.plan.rcpsp.project import Project, Solution, check_solution
from lagom_overlap.plan.rcpsp.search import GeneticSearch

_SLICE_S: Final = 0.05
"""Of a search between two looks at the deadline, at Ctrl-C and at what others found."""
_WARM_UP: Final = 0.02
"""Share of the time before CP-SAT starts, from the best schedule until then."""
_SMALL: Final = 40
"""Up to so many activities CP-SAT has both cores to itself after the warm-up, until the end."""
_PROOF: Final = 0.3
"""Share of the time that CP-SAT has one core for larger projects."""
_CHILD_S: Final = 1.3e-7
"""Rough seconds of a child per activity."""
_CHILDREN_PER_MEMBER: Final = 1000
"""In the time given: four populations and their union grow stale in 300 to 400, so all is begun two or three times."""


def solve(project: Project, limit_s: float, seed: int = 0) -> Solution:
    """The best schedule found within `limit_s`, with a proved lower bound; ends early once it is proved optimal.

    Raises:
        ValueError: if the limit is not positive.
        JobError: if the project is beyond the limits of the search.
    """
    if not limit_s > 0:
        raise ValueError(f"limit_s is {limit_s}, must be positive")
    deadline = Deadline(limit_s)
    bound = lower_bound(project)
    search = _new_search(project, limit_s, seed)
    _advance(search, deadline.within(_WARM_UP * limit_s), bound)
    if search.best()[0] > bound and deadline.left_s > 0:
        bound = _proved(project, search, bound, deadline, seed)
    if search.best()[0] > bound and deadline.left_s > 0:
        _advance_two(search, _new_search(project, deadline.left_s, seed + 1), deadline, bound)
    makespan, starts = search.best()
    solution = Solution(starts=tuple(starts), makespan=makespan, lower_bound=min(bound, makespan))
    check_solution(project, solution)
    return solution


def _new_search(project: Project, limit_s: float, seed: int) -> GeneticSearch:
    num_children = limit_s / (_CHILD_S * len(project))
    return GeneticSearch(project, seed=seed, population=round(num_children / _CHILDREN_PER_MEMBER))


def _advance(search: GeneticSearch, deadline: Deadline, target: int, is_over: Event | None = None) -> None:
    """Searches until the deadline, a makespan of `target`, or the event; at least one schedule is made."""
    while search.run(limit_s=min(_SLICE_S, max(deadline.left_s, 0.0)), target=target) > target:
        if deadline.left_s <= 0 or (is_over is not None and is_over.is_set()):
            return


def _advance_two(search: GeneticSearch, other: GeneticSearch, deadline: Deadline, target: int) -> None:
    """Both at once, the second in a thread; the first takes the best of the second in the end."""
    is_over = Event()

    def run_other() -> None:
        _advance(other, deadline, target, is_over)
        is_over.set()

    with ThreadPoolExecutor(max_workers=1) as beside:
        running = beside.submit(run_other)
        try:
            _advance(search, deadline, target, is_over)
        finally:
            is_over.set()
        running.result()
    search.add(other.best()[1])


def _proved(project: Project, search: GeneticSearch, bound: int, deadline: Deadline, seed: int) -> int:
    """CP-SAT for its share of the time, beside the search if the project is not small; the proved bound."""
    is_small = len(project) <= _SMALL
    ends = deadline if is_small else deadline.within(_PROOF * deadline.left_s)
    found: list[list[int]] = []
    makespan, starts = search.best()
    exact = ExactSearch(
        project,
        starts,
        makespan=makespan,
        lower_bound=bound,
        limit_s=ends.left_s,
        num_workers=2 if is_small else 1,
        seed=seed,
        on_solution=found.append,
    )
    try:
        while ends.left_s > 0 and search.best()[0] > bound and exact.is_running:
            if is_small:
                exact.wait(min(_SLICE_S, ends.left_s))
            else:
                search.run(limit_s=min(_SLICE_S, ends.left_s), target=bound)
    finally:
        exact.stop()
    for schedule in found:
        search.add(schedule)
    return exact.bound
