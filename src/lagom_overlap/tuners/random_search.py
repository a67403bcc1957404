"""Random joint assignments: the floor that any search worth its name has to beat at equal measurements."""

from math import inf

from lagom_overlap.errors import SpaceError
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search, group_random
from lagom_overlap.tuners.problem import GroupProblem, Measurement


def _search(problem: GroupProblem, num_measurements: int, seed: int) -> Search:
    rng = group_random(seed, problem)
    spaces = [tuple(space) for space in problem.spaces]
    best, best_s = problem.default, inf
    for number in range(num_measurements):
        drawn = tuple(rng.choice(space) for space in spaces) if number else problem.default
        reason = f"drawn at random, {number} of {num_measurements - 1}" if number else "the default, as the incumbent"
        outcome = yield Probe(assignment=drawn, reason=reason, incumbent=best)
        if isinstance(outcome, Measurement) and outcome.makespan_s < best_s:
            best, best_s = drawn, outcome.makespan_s
    return best


class RandomSearch(GroupwiseTuner):
    """Uniform random settings of all collectives at once; the one measured fastest.

    Raises:
        SpaceError: if `num_measurements` is below 1.
    """

    def __init__(self, problems: Problems, *, seed: int = 0, num_measurements: int = 10) -> None:
        if num_measurements < 1:
            raise SpaceError(f"num_measurements is {num_measurements}, must be at least 1")
        super().__init__(problems, lambda problem: _search(problem, num_measurements, seed))
