"""The journal seen from one group: its probes in order, and its times under the contenders of the verdict."""

from dataclasses import dataclass
from math import isfinite

from lagom_overlap.results.tune import TuneResult
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement
from lagom_overlap.tuners.verdict import DEFAULT_ARM, SAME_ARM, TUNED_ARM


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePoint:
    """One measurement of the search in one group; `priority[j]` is H of collective j, None where there is none."""

    number: int
    assignment: Assignment
    outcome: Measurement | Failure
    reason: str
    priority: tuple[float | None, ...]

    @property
    def measurement(self) -> Measurement | None:
        """The times, or None where the configuration could not run."""
        return None if isinstance(self.outcome, Failure) else self.outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistory:
    """What a run learned about one group.

    `arms` holds the medians of the verdict's rounds by contender. `default` and `tuned` are those medians where the
    verdict ran, else the medians of the search's probes of that assignment, else None.
    """

    problem: GroupProblem
    probes: tuple[ProbePoint, ...]
    arms: dict[str, Measurement]
    default: Measurement | None
    tuned: Measurement | None

    @property
    def measured(self) -> tuple[tuple[ProbePoint, Measurement], ...]:
        """The probes that ran, with their times."""
        return tuple((probe, probe.measurement) for probe in self.probes if probe.measurement is not None)

    @property
    def num_failures(self) -> int:
        """Probes that could not run."""
        return len(self.probes) - len(self.measured)

    @property
    def best(self) -> tuple[ProbePoint, Measurement] | None:
        """The search's fastest probe, the earliest of equals."""
        return min(self.measured, key=lambda pair: pair[1].makespan_s, default=None)


def _priority(values: dict[str, float], names: tuple[str, ...]) -> tuple[float | None, ...]:
    return tuple(value if (value := values.get(name)) is not None and isfinite(value) else None for name in names)


def _median_of(probes: tuple[ProbePoint, ...], assignment: Assignment) -> Measurement | None:
    runs = [p.measurement for p in probes if p.assignment == assignment and p.measurement is not None]
    if len(runs) > 1:
        return Measurement.from_runs(runs)
    return runs[0] if runs else None


def histories(result: TuneResult) -> tuple[GroupHistory, ...]:
    """The history of every group, in the run's order."""
    return tuple(_history(result, problem) for problem in result.search.problems)


def _history(result: TuneResult, problem: GroupProblem) -> GroupHistory:
    name = problem.group.name
    probes: list[ProbePoint] = []
    runs: dict[str, list[Measurement]] = {}
    for entry in result.search.entries:
        outcome = entry.outcomes.get(name)
        if outcome is None or name not in entry.step.assignments:
            continue
        if entry.step.kind is StepKind.SEARCH:
            probes.append(
                ProbePoint(
                    number=entry.step.number,
                    assignment=entry.step.assignments[name],
                    outcome=outcome,
                    reason=entry.step.reasons.get(name, ""),
                    priority=_priority(dict(entry.step.priorities.get(name, {})), problem.group.comm_names),
                )
            )
        elif isinstance(outcome, Measurement) and entry.step.arm not in (None, SAME_ARM):
            runs.setdefault(entry.step.arm, []).append(outcome)
    arms = {arm: Measurement.from_runs(arm_runs) for arm, arm_runs in runs.items()}
    taken = tuple(probes)
    default, recommended = arms.get(DEFAULT_ARM) or _median_of(taken, problem.default), result.search.tuned_of(problem)
    return GroupHistory(
        problem=problem,
        probes=taken,
        arms=arms,
        default=default,
        tuned=arms.get(TUNED_ARM) or (default if recommended == problem.default else _median_of(taken, recommended)),
    )
