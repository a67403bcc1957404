"""The journal seen from one group: its probes in order, and its times under the contenders of the verdict."""

from dataclasses import dataclass
from math import isfinite

from lagom_overlap.backends.base import Assignment, Failure, GroupProblem, Measurement
from lagom_overlap.report.model import TuneReport
from lagom_overlap.tune.journal import StepKind
from lagom_overlap.tune.verdict import DEFAULT_ARM, TUNED_ARM


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
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
    probes: tuple[Probe, ...]
    arms: dict[str, Measurement]
    default: Measurement | None
    tuned: Measurement | None

    @property
    def measured(self) -> tuple[tuple[Probe, Measurement], ...]:
        """The probes that ran, with their times."""
        return tuple((probe, probe.measurement) for probe in self.probes if probe.measurement is not None)

    @property
    def num_failures(self) -> int:
        """Probes that could not run."""
        return len(self.probes) - len(self.measured)

    @property
    def best(self) -> tuple[Probe, Measurement] | None:
        """The search's fastest probe, the earliest of equals."""
        return min(self.measured, key=lambda pair: pair[1].makespan_s, default=None)


def _priority(values: dict[str, float], names: tuple[str, ...]) -> tuple[float | None, ...]:
    return tuple(value if (value := values.get(name)) is not None and isfinite(value) else None for name in names)


def _median_of(probes: tuple[Probe, ...], assignment: Assignment) -> Measurement | None:
    runs = [p.measurement for p in probes if p.assignment == assignment and p.measurement is not None]
    if len(runs) > 1:
        return Measurement.from_runs(runs)
    return runs[0] if runs else None


def histories(report: TuneReport) -> tuple[GroupHistory, ...]:
    """The history of every group, in the report's order."""
    return tuple(_history(report, problem) for problem in report.problems)


def _history(report: TuneReport, problem: GroupProblem) -> GroupHistory:
    name = problem.group.name
    probes: list[Probe] = []
    runs: dict[str, list[Measurement]] = {}
    for entry in report.entries:
        outcome = entry.outcomes.get(name)
        if outcome is None or name not in entry.step.assignments:
            continue
        if entry.step.kind is StepKind.SEARCH:
            probes.append(
                Probe(
                    number=entry.step.number,
                    assignment=entry.step.assignments[name],
                    outcome=outcome,
                    reason=entry.step.reasons.get(name, ""),
                    priority=_priority(dict(entry.step.priorities.get(name, {})), problem.group.comm_names),
                )
            )
        elif isinstance(outcome, Measurement) and entry.step.arm is not None:
            runs.setdefault(entry.step.arm, []).append(outcome)
    arms = {arm: Measurement.from_runs(held) for arm, held in runs.items()}
    found = tuple(probes)
    default, recommended = arms.get(DEFAULT_ARM) or _median_of(found, problem.default), report.tuned_of(problem)
    return GroupHistory(
        problem=problem,
        probes=found,
        arms=arms,
        default=default,
        tuned=arms.get(TUNED_ARM) or (default if recommended == problem.default else _median_of(found, recommended)),
    )
