"""What a study did, step by step; the journal as JSON lines is the measurement bundle of a run.

One line per step, one object per group:

    {"number": 3, "kind": "search", "arm": null, "round": null, "groups": {"block/0": {
        "configs": {"ag": {"algorithm": null, "protocol": null, "transport": null, "num_channels": 2,
                           "num_threads": null, "chunk_bytes": 1400832}},
        "reason": "...", "priorities": {"ag": 0.2},
        "measured": {"makespan_s": 0.1, "comp_s": 0.1, "comm_s": {"ag": 0.05}, "num_repeats": 1,
                     "makespan_iqr_s": 0.0},
        "failure": null}}}

Either `measured` or `failure` is set. Numbers come back exactly; timelines are not kept.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

import msgspec

from lagom_overlap.backends.base import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.collective import Algorithm, CommConfig, Protocol, Transport
from lagom_overlap.errors import BundleError, SpaceError
from lagom_overlap.tune.base import Problems, problems_by_name


class StepKind(StrEnum):
    """Why a step was run."""

    SEARCH = "search"
    VERDICT = "verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to run: an assignment for each named group.

    `number` counts all steps of a study from 0. `arm` names the contender of a verdict step (`"default"`, `"tuned"`, a
    baseline's name), `round` its round; both are None in the search. `reasons` and `priorities` are the trial's.
    """

    number: int
    kind: StepKind
    assignments: Mapping[str, Assignment]
    arm: str | None = None
    round: int | None = None
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    priorities: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A step and what came of it, by group name."""

    step: Step
    outcomes: Mapping[str, Outcome]


# Rows as they stand in the file: no field may be missing, none may be unknown.


class _ConfigRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    algorithm: Algorithm | None
    protocol: Protocol | None
    transport: Transport | None
    num_channels: int | None
    num_threads: int | None
    chunk_bytes: int | None


class _MeasuredRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    makespan_s: float
    comp_s: float
    comm_s: dict[str, float]
    num_repeats: int
    makespan_iqr_s: float


class _GroupRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    configs: dict[str, _ConfigRow]
    reason: str | None
    priorities: dict[str, float]
    measured: _MeasuredRow | None
    failure: str | None


class _EntryRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int
    kind: StepKind
    arm: str | None
    round: int | None
    groups: dict[str, _GroupRow]


_KNOBS = _ConfigRow.__struct_fields__
_T = TypeVar("_T")


def entry_to_json(entry: Entry, problems: Problems) -> str:
    """One line, without the newline."""
    named = problems_by_name(problems)
    step = entry.step
    groups = {
        name: _GroupRow(
            configs=_config_rows(named[name], assignment),
            reason=step.reasons.get(name),
            priorities=dict(step.priorities.get(name, {})),
            measured=_measured_row(named[name], entry.outcomes[name]),
            failure=outcome.reason if isinstance(outcome := entry.outcomes[name], Failure) else None,
        )
        for name, assignment in step.assignments.items()
    }
    row = _EntryRow(number=step.number, kind=step.kind, arm=step.arm, round=step.round, groups=groups)
    return msgspec.json.encode(row).decode()


def _config_rows(problem: GroupProblem, assignment: Assignment) -> dict[str, _ConfigRow]:
    pairs = zip(problem.group.comm_names, assignment, strict=True)
    return {name: _ConfigRow(*(getattr(config, knob) for knob in _KNOBS)) for name, config in pairs}


def _measured_row(problem: GroupProblem, outcome: Outcome) -> _MeasuredRow | None:
    if isinstance(outcome, Failure):
        return None
    return _MeasuredRow(
        makespan_s=outcome.makespan_s,
        comp_s=outcome.comp_s,
        comm_s=dict(zip(problem.group.comm_names, outcome.comm_s, strict=True)),
        num_repeats=outcome.num_repeats,
        makespan_iqr_s=outcome.makespan_iqr_s,
    )


def entries_from_json(lines: Iterable[str], problems: Problems, *, first_line: int = 1) -> tuple[Entry, ...]:
    """The entries of a journal, one per line; `first_line` is the number of the first in its file, for messages.

    Raises:
        BundleError: if a line is damaged, or speaks of groups or collectives that are not in the problems; the
            message names the line.
    """
    named = problems_by_name(problems)
    decoder = msgspec.json.Decoder(_EntryRow)
    entries = []
    for number, line in enumerate(lines, start=first_line):
        try:
            entries.append(_entry(decoder.decode(line), named))
        except (msgspec.MsgspecError, SpaceError, ValueError) as error:
            raise BundleError(f"line {number} of the measurements is damaged: {error}") from error
    return tuple(entries)


def _entry(row: _EntryRow, problems: Mapping[str, GroupProblem]) -> Entry:
    if foreign := row.groups.keys() - problems.keys():
        raise ValueError(f"group {min(foreign)!r} is not one of {sorted(problems)}")
    assignments = {name: _assignment(group, problems[name]) for name, group in row.groups.items()}
    step = Step(
        number=row.number,
        kind=row.kind,
        assignments=assignments,
        arm=row.arm,
        round=row.round,
        reasons={name: group.reason for name, group in row.groups.items() if group.reason is not None},
        priorities={name: group.priorities for name, group in row.groups.items() if group.priorities},
    )
    return Entry(step=step, outcomes={name: _outcome(group, problems[name]) for name, group in row.groups.items()})


def _in_order(what: str, values: Mapping[str, _T], problem: GroupProblem) -> tuple[_T, ...]:
    names = problem.group.comm_names
    if values.keys() != set(names):
        raise ValueError(f"{what} of group {problem.group.name!r} name {sorted(values)}, must name {sorted(names)}")
    return tuple(values[name] for name in names)


def _assignment(row: _GroupRow, problem: GroupProblem) -> Assignment:
    rows = _in_order("configs", row.configs, problem)
    return tuple(
        CommConfig(
            algorithm=config.algorithm,
            protocol=config.protocol,
            transport=config.transport,
            num_channels=config.num_channels,
            num_threads=config.num_threads,
            chunk_bytes=config.chunk_bytes,
        )
        for config in rows
    )


def _outcome(row: _GroupRow, problem: GroupProblem) -> Outcome:
    if (row.measured is None) == (row.failure is None):
        raise ValueError("exactly one of measured and failure must be set")
    if row.measured is None:
        return Failure(row.failure or "")
    return Measurement(
        makespan_s=row.measured.makespan_s,
        comp_s=row.measured.comp_s,
        comm_s=_in_order("comm_s", row.measured.comm_s, problem),
        num_repeats=row.measured.num_repeats,
        makespan_iqr_s=row.measured.makespan_iqr_s,
    )
