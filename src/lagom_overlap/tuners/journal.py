"""The journal of a study, step by step; as JSON lines it is the measurement bundle of a run.

One line per step, one object per group:

    {"number": 3, "kind": "search", "arm": null, "round": null, "groups": {"block/0": {
        "configs": {"ag": {"algorithm": null, "protocol": null, "transport": null, "num_channels": 2,
                           "num_threads": null, "chunk_bytes": 1400832}},
        "reason": "...", "priorities": {"ag": 0.2},
        "measured": {"makespan_s": 0.1, "comp_s": 0.1, "comm_s": {"ag": 0.05}, "num_repeats": 1,
                     "makespan_iqr_s": 0.0},
        "failure": null}}}

Either `measured` or `failure` is set, both if a trial was abandoned after a measurement, and neither where only the
whole step was timed; then `step_s` stands next to `groups`. Numbers round-trip exactly; timelines are not kept.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, TypeVar

import msgspec

from lagom_overlap.errors import BundleError, SpaceError
from lagom_overlap.tuners.base import Problems, problems_by_name
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Outcome
from lagom_overlap.tuners.rows import GroupRow, assignment_of, group_row, outcome_of


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
    """A step and its outcomes by group name; a step that was timed as a whole has `step_s` and no outcomes."""

    step: Step
    outcomes: Mapping[str, Outcome]
    step_s: float | None = None


class EntryRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line as it stands in the file: no field but the last may be missing, none may be unknown.

    Who only tells what was tried reads these: an `Entry` needs the groups.
    """

    number: int
    kind: StepKind
    arm: str | None
    round: int | None
    groups: dict[str, GroupRow]
    step_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


def entry_to_json(entry: Entry, problems: Problems) -> str:
    """One line, without the newline."""
    named = problems_by_name(problems)
    step = entry.step
    groups = {
        name: group_row(
            named[name],
            assignment,
            entry.outcomes.get(name),
            reason=step.reasons.get(name),
            priorities=step.priorities.get(name),
        )
        for name, assignment in step.assignments.items()
    }
    row = EntryRow(
        number=step.number, kind=step.kind, arm=step.arm, round=step.round, groups=groups, step_s=entry.step_s
    )
    return msgspec.json.encode(row).decode()


def rows_from_json(lines: Iterable[str], *, first_line: int = 1) -> tuple[EntryRow, ...]:
    """The lines of a journal as they stand there.

    Raises:
        BundleError: if a line is damaged; the message names the line.
    """
    return _decoded(lines, lambda row: row, first_line)


def entries_from_json(lines: Iterable[str], problems: Problems, *, first_line: int = 1) -> tuple[Entry, ...]:
    """The entries of a journal, one per line; `first_line` is the number of the first in its file, for messages.

    Raises:
        BundleError: if a line is damaged, or speaks of groups or collectives that are not in the problems; the
            message names the line.
    """
    named = problems_by_name(problems)
    return _decoded(lines, lambda row: _entry(row, named), first_line)


_T = TypeVar("_T")


def _decoded(lines: Iterable[str], made_of: Callable[[EntryRow], _T], first_line: int) -> tuple[_T, ...]:
    decoder = msgspec.json.Decoder(EntryRow)
    entries = []
    for number, line in enumerate(lines, start=first_line):
        try:
            entries.append(made_of(decoder.decode(line)))
        except (msgspec.MsgspecError, SpaceError, ValueError) as error:
            raise BundleError(f"line {number} of the measurements is damaged: {error}") from error
    return tuple(entries)


def _entry(row: EntryRow, problems: Mapping[str, GroupProblem]) -> Entry:
    if foreign := row.groups.keys() - problems.keys():
        raise ValueError(f"group {min(foreign)!r} is not one of {sorted(problems)}")
    assignments = {name: assignment_of(group, problems[name]) for name, group in row.groups.items()}
    step = Step(
        number=row.number,
        kind=row.kind,
        assignments=assignments,
        arm=row.arm,
        round=row.round,
        reasons={name: group.reason for name, group in row.groups.items() if group.reason is not None},
        priorities={name: group.priorities for name, group in row.groups.items() if group.priorities},
    )
    rows = {} if row.step_s is not None else row.groups
    outcomes = {name: outcome_of(group, problems[name]) for name, group in rows.items()}
    return Entry(step=step, outcomes=outcomes, step_s=row.step_s)
