"""Warm starts of a search: other runs of its groups.

None is trusted: a tuner that takes a warm start still measures the default, and drops what its own measurements
contradict. The earlier best is measured once, after the default; like everything else it is adopted only on evidence.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Final

from lagom_overlap.collective import CommConfig, launch_of
from lagom_overlap.tuners.journal import Entry, StepKind
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.tuners.verdict import DEFAULT_ARM, TUNED_ARM

SIMILAR_BYTES: Final = 1.25
"""Collectives of the same kind and number of ranks count as the same up to this ratio of sizes. Chosen, not
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A group of another run, its measurements, and the assignment that it ended with (None: not known)."""

    problem: GroupProblem
    runs: Mapping[Assignment, tuple[Measurement, ...]] = field(default_factory=lambda: MappingProxyType({}))
    best: Assignment | None = None

    def is_like(self, problem: GroupProblem) -> bool:
        """Whether its collectives match a group's one by one: equal kind and ranks, nearly equal size."""
        mine, others = self.problem.group.comms, problem.group.comms
        if len(mine) != len(others):
            return False
        for a, b in zip((comm.collective for comm in mine), (comm.collective for comm in others), strict=True):
            low, high = sorted((a.num_bytes, b.num_bytes))
            if (a.kind, a.num_ranks) != (b.kind, b.num_ranks) or high > SIMILAR_BYTES * low:
                return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Earlier groups; `source` says in words where they come from."""

    source: str
    earlier: tuple[Earlier, ...] = ()

    def first_probe(self, problem: GroupProblem) -> Assignment | None:
        """What an earlier run ended with, as far as it is allowed here; None if that is the default or not known."""
        best = self.first(problem)
        allowed = None if best is None else nearest_allowed(problem, best)
        return None if allowed == problem.default else allowed

    def first(self, problem: GroupProblem) -> Assignment | None:
        """The best assignment of an earlier group like this one, preferably of the same name; None if there is none."""
        alike = [earlier for earlier in self.earlier if earlier.best is not None and earlier.is_like(problem)]
        alike.sort(key=lambda earlier: earlier.problem.group.name != problem.group.name)
        return alike[0].best if alike else None


def earlier_of(problem: GroupProblem, entries: Iterable[Entry]) -> Earlier:
    """A group of a run from the run's journal; `best` is the tuned assignment if it was faster in the verdict.

    Runs with a launch setting on the computation's side are left out.
    """
    name, runs = problem.group.name, defaultdict[Assignment, list[Measurement]](list)
    arms = defaultdict[str | None, list[float]](list)
    tuned: Assignment | None = None
    for entry in entries:
        outcome, assignment = entry.outcomes.get(name), entry.step.assignments.get(name)
        if assignment is None:
            continue
        if isinstance(outcome, Measurement) and launch_of(assignment).is_untouched:
            runs[assignment].append(outcome)
        time_s = outcome.makespan_s if isinstance(outcome, Measurement) else entry.step_s
        if entry.step.kind is StepKind.VERDICT and time_s is not None:
            arms[entry.step.arm].append(time_s)
            tuned = tuple(assignment) if entry.step.arm == TUNED_ARM else tuned
    return Earlier(
        problem=problem,
        runs={assignment: tuple(done) for assignment, done in runs.items()},
        best=tuned if _is_faster(arms[TUNED_ARM], arms[DEFAULT_ARM]) else None,
    )


def _is_faster(tuned_s: Sequence[float], default_s: Sequence[float]) -> bool:
    return bool(tuned_s and default_s) and median(tuned_s) < median(default_s)


def nearest_allowed(problem: GroupProblem, wanted: Assignment) -> Assignment | None:
    """The allowed configurations nearest to those of an earlier run; None if an implementation is not allowed.

    A configuration that equals the group's default stays, even outside the space.
    """
    configs: list[CommConfig] = []
    for space, default, config in zip(problem.spaces, problem.default, wanted, strict=True):
        if config in space or config == default:
            configs.append(config)
            continue
        subspaces = [
            part
            for part in space.subspaces
            if all(
                asked is None or asked == allowed_values
                for asked, allowed_values in (
                    (config.algorithm, part.algorithm),
                    (config.protocol, part.protocol),
                    (config.transport, part.transport),
                )
            )
        ]
        if not subspaces:
            return None
        configs.append(subspaces[0].at(subspaces[0].nearest(config)))
    return tuple(configs)
