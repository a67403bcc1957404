"""Fixed settings, measured once: the untouched engine, all knobs minimal, all maximal, and a cap on channels.

They are the baselines that a search has to beat.
"""

from lagom_overlap.collective import CommConfig, ConfigSpace
from lagom_overlap.errors import SpaceError
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
    """What the communication library chooses by itself, measured once."""

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


def _capped(space: ConfigSpace, default: CommConfig, cap: int) -> CommConfig:
    subspace = space.subspace_of(default)
    axis = subspace.num_channels
    if axis == (None,):
        return default
    _, thread, chunk = subspace.nearest(default)
    limit = min(cap, default.num_channels or cap)
    below = [index for index, value in enumerate(axis) if value is not None and value <= limit]
    return subspace.at((below[-1] if below else 0, thread, chunk))


def _search(problem: GroupProblem, cap: int) -> Search:
    pairs = zip(problem.spaces, problem.default, strict=True)
    assignment = tuple(_capped(space, default, cap) for space, default in pairs)
    if assignment == problem.default:
        return measure_once(problem, assignment, f"the default: a cap of {cap} channels changes nothing")
    return measure_once(problem, assignment, f"at most {cap} channels each")


class StaticCap(GroupwiseTuner):
    """At most `cap` channels for every collective, measured once: Liger's static cap.

    Du et al., "Liger" (PPoPP'24), sets NCCL_MAX_NCHANNELS=3 for the whole process to limit contention; hence the
    default. Source: spec, Lagom section 4.

    Departures: Liger also interleaves kernels, which is scheduling and not done here. The cap is applied to the space:
    the most channels at or below it (the fewest, if all lie above), the other knobs at the value nearest to the
    default, or the largest where the default leaves them to the engine.

    Raises:
        SpaceError: if the cap is below 1.
    """

    def __init__(self, problems: Problems, *, seed: int = 0, cap: int = 3) -> None:
        if cap < 1:
            raise SpaceError(f"cap is {cap}, must be at least 1")
        super().__init__(problems, lambda problem: _search(problem, cap))
