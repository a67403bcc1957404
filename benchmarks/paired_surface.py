"""The surface of a job's one group, measured: what `paired_tuners.py` finds best in it, the bundle that replays it."""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Final

from lagom_overlap.backends.base import Backend, BackendRequest
from lagom_overlap.errors import JobError, RankError
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.tuners.bundle import header_line
from lagom_overlap.tuners.journal import Entry, Step, StepKind
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement, Outcome
from lagom_overlap.verbs.measure import Journal
from lagom_overlap.workload import OverlapGroup

MAX_SURFACE: Final = 600
"""Assignments; a larger space is refused."""
MAX_LOST: Final = 3
"""Ranks of one job that may be lost before it is given up."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Makespans of assignments, one per pass; a pass that failed is missing."""

    makespans_s: Mapping[Assignment, Sequence[float]]

    def median_s(self, assignment: Assignment) -> float:
        """Of its passes."""
        return median(self.makespans_s[assignment])

    def best(self) -> Assignment:
        """The lowest median."""
        return min(self.makespans_s, key=self.median_s)

    def best_fixed(self) -> Assignment:
        """The best of those that give every collective the same setting."""
        return min((found for found in self.makespans_s if is_fixed(found)), key=self.median_s)


def is_fixed(assignment: Assignment) -> bool:
    """Whether all collectives have one setting."""
    return len(set(assignment)) == 1


def assignments_of(problem: GroupProblem) -> list[Assignment]:
    """The product of the spaces, each with the collective's default, and the baselines."""
    offered = (dict.fromkeys((*space, default)) for space, default in zip(problem.spaces, problem.default, strict=True))
    return list(dict.fromkeys((*product(*offered), *problem.baselines.values())))


def check_size(problem: GroupProblem) -> None:
    """Refuses a space that is too large to be measured as a whole.

    Raises:
        JobError: naming its size.
    """
    num = len(assignments_of(problem))
    if num > MAX_SURFACE:
        raise JobError(f"{problem.group.name}: {num} assignments, the surface takes at most {MAX_SURFACE}: --surface 0")


def measure_surface(
    backend: Backend,
    problem: GroupProblem,
    order: Sequence[Assignment],
    *,
    num_passes: int,
    keep: Callable[[Entry], None],
    seed: int,
) -> Surface:
    """Each assignment `num_passes` times, each pass in another order; every one is kept as it is made."""
    order, rng, numbers = list(order), random.Random(seed), count()
    group = problem.group
    makespans_s: dict[Assignment, list[float]] = {assignment: [] for assignment in order}
    for _ in range(num_passes):
        rng.shuffle(order)
        for assignment in order:
            outcome = backend.measure(group, assignment)
            step = Step(number=next(numbers), kind=StepKind.SEARCH, assignments={group.name: assignment})
            keep(Entry(step=step, outcomes={group.name: outcome}))
            if isinstance(outcome, Measurement):
                makespans_s[assignment].append(outcome.makespan_s)
    return Surface({assignment: times for assignment, times in makespans_s.items() if times})


def start_journal(
    folder: Path, spec: JobSpec, request: BackendRequest, backend: Backend, problem: GroupProblem, *, note: str
) -> Journal:
    """The bundle's file with its header."""
    journal = Journal(folder / "measurements.jsonl", (problem,))
    journal.start(
        header_line(
            request.job_fingerprint,
            spec.job.backend,
            (problem,),
            description=backend.description,
            notes=(note,),
            limits=request.limits,
        )
    )
    return journal


class Sturdy:
    """A backend that is opened anew when a rank is lost, up to `MAX_LOST` times; that measurement is made again."""

    def __init__(self, open_anew: Callable[[], Backend]) -> None:
        self._open_anew = open_anew
        self._backend = open_anew()
        self.description = self._backend.description
        self.num_lost = 0

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """See `Backend`."""
        return self._backend.problem(group)

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """See `Backend`.

        Raises:
            RankError: if too many ranks were lost.
        """
        while True:
            try:
                return self._backend.measure(group, assignment)
            except RankError as error:
                self.num_lost += 1
                self._backend.close()
                if self.num_lost > MAX_LOST:
                    raise
                print(f"a rank was lost, starting anew: {error}", file=sys.stderr)
                self._backend = self._open_anew()
                self._backend.problem(group)

    def close(self) -> None:
        """See `Backend`."""
        self._backend.close()
