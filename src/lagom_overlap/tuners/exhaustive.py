"""Every assignment of a group, one after the other: the oracle for small spaces."""

from itertools import product
from math import inf, prod

from lagom_overlap.errors import SpaceError
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search
from lagom_overlap.tuners.problem import GroupProblem, Measurement


def _search(problem: GroupProblem) -> Search:
    assignments = dict.fromkeys((problem.default, *product(*problem.spaces)))
    best, best_s = problem.default, inf
    for number, assignment in enumerate(assignments, start=1):
        reason = f"assignment {number} of {len(assignments)}"
        outcome = yield Probe(assignment=assignment, reason=reason, incumbent=best)
        if isinstance(outcome, Measurement) and outcome.makespan_s < best_s:
            best, best_s = assignment, outcome.makespan_s
    return best


class Exhaustive(GroupwiseTuner):
    """Every combination of the collectives' settings; the one measured fastest, the first of equals.

    Raises:
        SpaceError: if a group has more than `limit` assignments.
    """

    def __init__(self, problems: Problems, *, seed: int = 0, limit: int = 4096) -> None:
        for problem in problems:
            size = prod(len(space) for space in problem.spaces)
            if size > limit:
                raise SpaceError(
                    f"group {problem.group.name!r} has {size} assignments, exhaustive search tries at most {limit}:"
                    " allow fewer values per knob, or raise its limit"
                )
        super().__init__(problems, _search)
