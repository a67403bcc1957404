"""Liger's idea: one static cap on the channels of every collective, everything else as it was.

Du et al., "Liger" (PPoPP'24), sets NCCL_MAX_NCHANNELS=3 for the whole process to limit contention. Source: spec, Lagom
section 4.

Departures: Liger also interleaves kernels, which is scheduling and not done here. The cap is applied on the space: the
most allowed channels at or below it (the fewest, if all lie above), the other knobs at the allowed value nearest to the
default, the largest where the default leaves them to the engine.
"""

from lagom_overlap.collective import CommConfig, ConfigSpace
from lagom_overlap.errors import SpaceError
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.fixed import measure_once
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Search
from lagom_overlap.tuners.problem import GroupProblem


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
    """At most `cap` channels for every collective, measured once.

    Raises:
        SpaceError: if the cap is below 1.
    """

    def __init__(self, problems: Problems, *, seed: int = 0, cap: int = 3) -> None:
        if cap < 1:
            raise SpaceError(f"cap is {cap}, must be at least 1")
        super().__init__(problems, lambda problem: _search(problem, cap))
