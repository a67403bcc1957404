"""The solver of projects: a genetic search and CP-SAT side by side, each fed with what the other finds.

Measured on PSPLIB (benchmarks/rcpsp.py): CP-SAT alone proves projects of 30 activities within seconds, the genetic
search finds better schedules of 120 activities. The best schedule is never lost.
"""

from threading import Lock
from typing import Final

from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.rcpsp.generation import packed
from lagom_overlap.plan.rcpsp.genetic import Genetic
from lagom_overlap.plan.rcpsp.model import ExactSearch, paths
from lagom_overlap.plan.rcpsp.project import Project, Solution, check_solution

_WARM_UP: Final = 0.2
"""Share of the time before CP-SAT starts, from the best schedule until then."""
_SLICE_S: Final = 0.2
_SMALL: Final = 40
"""Up to so many activities CP-SAT has both cores to itself after the warm-up."""
_LARGE: Final = 80
"""Beyond so many activities CP-SAT has one core; up to here two, half of the time shared with the genetic search."""


def solve(project: Project, limit_s: float, seed: int = 0) -> Solution:
    """The best schedule found within `limit_s`, with a proved lower bound; ends early once it is proved optimal.

    Raises:
        ValueError: if the limit is not positive.
    """
    if not limit_s > 0:
        raise ValueError(f"limit_s is {limit_s}, must be positive")
    deadline = Deadline(limit_s)
    bound = simple_bound(project)
    genetic = Genetic(project, packed(project), seed)
    genetic.run(deadline.within(_WARM_UP * limit_s), bound)
    proved = bound
    if genetic.best[0] > bound:
        proved = _beside_cp_sat(project, genetic, bound, deadline, seed)
    makespan, starts = genetic.best
    solution = Solution(starts=tuple(starts), makespan=makespan, lower_bound=min(proved, makespan))
    check_solution(project, solution)
    return solution


def _beside_cp_sat(project: Project, genetic: Genetic, bound: int, deadline: Deadline, seed: int) -> int:
    """Runs both until the deadline or a proof; returns the proved bound."""
    lock = Lock()
    found: list[list[int]] = []

    def take(starts: list[int]) -> None:
        with lock:
            found.append(starts)

    exact = ExactSearch(
        project,
        genetic.best[1],
        makespan=genetic.best[0],
        lower_bound=bound,
        limit_s=deadline.left_s,
        num_workers=1 if len(project) > _LARGE else 2,
        seed=seed,
        on_solution=take,
    )
    while deadline.left_s > 0 and genetic.best[0] > bound and exact.is_running:
        if len(project) > _SMALL:
            genetic.run(deadline.within(_SLICE_S), bound)
        if len(project) <= _LARGE:
            exact.wait(min(_SLICE_S, max(0.0, deadline.left_s)))
        with lock:
            fresh, found[:] = list(found), []
        for starts in fresh:
            genetic.add(starts)
    exact.stop()
    for starts in found:
        genetic.add(starts)
    return exact.bound


def simple_bound(project: Project) -> int:
    """The critical path, and the work on each resource over its capacity, rounded up."""
    heads, tails = paths(project)
    longest = max(head + tail for head, tail in zip(heads, tails, strict=True))
    loads = [
        -(-sum(d * row[resource] for d, row in zip(project.durations, project.demands, strict=True)) // capacity)
        for resource, capacity in enumerate(project.capacities)
        if capacity
    ]
    return max(longest, *loads) if loads else longest
