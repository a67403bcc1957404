"""Fixed settings: what the engine does untouched, all minimal, all maximal. The floors that a search has to beat."""

from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem


def smallest(problem: GroupProblem) -> Assignment:
    """The minimum of every knob, in the subspace that the default lies in (else the first)."""
    pairs = zip(problem.spaces, problem.default, strict=True)
    return tuple(space.subspace_of(default).minimum for space, default in pairs)


def largest(problem: GroupProblem) -> Assignment:
    """The maximum of every knob, in the subspace that the default lies in (else the first)."""
    pairs = zip(problem.spaces, problem.default, strict=True)
    return tuple(space.subspace_of(default).maximum for space, default in pairs)


def measure_once(problem: GroupProblem, assignment: Assignment, reason: str) -> Search:
    """One probe; stands by it unless it fails, then by the default."""
    outcome = yield Probe(assignment=assignment, reason=reason)
    return problem.default if isinstance(outcome, Failure) else assignment


class Default(GroupwiseTuner):
    """The engine untouched, measured once."""

    def __init__(self, problems: Problems, *, seed: int = 0) -> None:
        super().__init__(problems, lambda problem: measure_once(problem, problem.default, "the engine untouched"))


class FixedMin(GroupwiseTuner):
    """Every collective with minimal resources, measured once."""

    def __init__(self, problems: Problems, *, seed: int = 0) -> None:
        super().__init__(problems, lambda problem: measure_once(problem, smallest(problem), "all knobs at minimum"))


class FixedMax(GroupwiseTuner):
    """Every collective with maximal resources, measured once."""

    def __init__(self, problems: Problems, *, seed: int = 0) -> None:
        super().__init__(problems, lambda problem: measure_once(problem, largest(problem), "all knobs at maximum"))
