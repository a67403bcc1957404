"""Libra's idea: choose only the number of threads of each collective, by the makespan.

Liu et al., "Libra: Contention-Aware GPU Thread Allocation for Data Parallel Training" (INFOCOM'23). The paper is closed
and was not readable; what is known is the knob (spec, Lagom section 4, and the Lagom paper's section 1).

Departures: Libra models the cost of overlap; here the makespan is measured, one collective after the other, walking
from the default's number of threads downwards, then upwards, while it falls. The other knobs stay at the allowed values
nearest to the default (the largest where the default leaves them to the engine, since a configuration must lie in the
space). Where the engine has no thread knob the default is measured and the search ends.
"""

from collections.abc import Generator
from math import inf

from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.groupwise import GroupwiseTuner, Probe, Search
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement, Outcome

NO_KNOB = "the default: this engine has no thread knob"
"""The reason of the only trial on such an engine."""


def _walk(
    problem: GroupProblem, index: int, best: Assignment, best_s: float
) -> Generator[Probe, Outcome, tuple[Assignment, float]]:
    """The better number of threads of one collective, the others as in `best`."""
    subspace = problem.spaces[index].subspace_of(problem.default[index])
    channel, start, chunk = subspace.nearest(problem.default[index])
    last = len(subspace.num_threads) - 1
    tried = {best}
    for path in (range(start, -1, -1), range(start + 1, last + 1)):
        for thread in path:
            config = subspace.at((channel, thread, chunk))
            assignment = (*best[:index], config, *best[index + 1 :])
            if assignment in tried:
                continue
            tried.add(assignment)
            name = problem.group.comm_names[index]
            outcome = yield Probe(assignment=assignment, reason=f"{name}: {config.num_threads} threads", incumbent=best)
            if isinstance(outcome, Measurement) and outcome.makespan_s < best_s:
                best, best_s = assignment, outcome.makespan_s
            elif thread != start:
                break
    return best, best_s


def _search(problem: GroupProblem) -> Search:
    pairs = zip(problem.spaces, problem.default, strict=True)
    with_knob = [j for j, (space, own) in enumerate(pairs) if space.subspace_of(own).num_threads != (None,)]
    outcome = yield Probe(assignment=problem.default, reason="the default" if with_knob else NO_KNOB)
    best, best_s = problem.default, outcome.makespan_s if isinstance(outcome, Measurement) else inf
    for index in with_knob:
        best, best_s = yield from _walk(problem, index, best, best_s)
    return best


class ThreadsOnly(GroupwiseTuner):
    """Searches the number of threads of every collective, and nothing else."""

    def __init__(self, problems: Problems, *, seed: int = 0) -> None:
        super().__init__(problems, _search)
