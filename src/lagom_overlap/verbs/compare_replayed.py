"""What tuners ended with, compared on a recording: nothing is run, so nothing is measured side by side.

A replay hands out an assignment's recorded values one after the other. Rounds of such values would set the first pass
of one contender next to the second of another, the default next to another visit of itself. So each contender has all
its values, by visit (a pass of the surface, a round of the recorded verdict), and ratios are taken within a visit: of a
tuner that kept the default they are 1.

A few passes say little of one assignment, but those of all assignments together say how far a value is from its like:

    sigma^2 = sum (ln z_ak - mean_k ln z_ak)^2 / sum (n_a - 1)      z_ak: makespan of assignment a in its k-th visit

A median of n ratios then lies within 1.96 sigma sqrt(2 v / n) of the logarithm of the true one, 19 times in 20; v is
1 for the mean of two, pi / 2 for a median of many. It takes noise for normal and for equal in all assignments.
What the search saw is among the values, so a tuner is flattered by the luck that it chose by.
"""

from collections.abc import Mapping
from math import exp, log, pi, sqrt
from statistics import fmean
from typing import Final

from lagom_overlap.backends.recorded import Recorded, Visit
from lagom_overlap.errors import BackendError
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.problem import Assignment, Measurement

CONFIDENCE_SIGMAS: Final = 1.96
"""Of a normal distribution, 95 % lie within this many."""


def makespans_of(
    backend: Recorded, problems: Problems, assignments: Mapping[str, Assignment], name: str
) -> dict[Visit, float]:
    """The iteration's makespan in every visit that all groups have.

    Raises:
        BackendError: if there is none.
    """
    by_group = []
    for problem in problems:
        recorded = backend.visits(problem.group).get(assignments[problem.group.name], {})
        by_group.append({visit: run.makespan_s for visit, run in recorded.items() if isinstance(run, Measurement)})
    common = [visit for visit in by_group[0] if all(visit in held for held in by_group)]
    if not common:
        raise BackendError(f"what {name or 'default'!r} ended with is not in the recording")
    counts = [problem.group.count for problem in problems]
    return {visit: sum(count * held[visit] for count, held in zip(counts, by_group, strict=True)) for visit in common}


def noise_of(backend: Recorded, problems: Problems) -> float | None:
    """Sigma of a makespan's logarithm from visit to visit; None if nothing was recorded twice."""
    squares, num_free = 0.0, 0
    for problem in problems:
        for recorded in backend.visits(problem.group).values():
            runs = [run for run in recorded.values() if isinstance(run, Measurement) and run.makespan_s > 0]
            if runs:
                logs = [log(run.makespan_s) for run in runs]
                squares += sum((each - fmean(logs)) ** 2 for each in logs)
                num_free += len(logs) - 1
    return sqrt(squares / num_free) if num_free else None


def interval_of(ratio: float, num_visits: int, sigma: float) -> tuple[float, float]:
    """Where 95 % of true ratios lie, given the median of that many."""
    factor = 1.0 if num_visits <= 2 else pi / 2
    reach = exp(CONFIDENCE_SIGMAS * sigma * sqrt(2 * factor / num_visits))
    return ratio / reach, ratio * reach
