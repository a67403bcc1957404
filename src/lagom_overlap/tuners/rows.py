"""One measured row of a search as JSON: a bundle's line, and a journal's entry. Format: docs/formats.md."""

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from lagom_overlap.collective import (
    UNTOUCHED_LAUNCH,
    Algorithm,
    CommConfig,
    LaunchConfig,
    LaunchOrder,
    Protocol,
    StreamPriority,
    Transport,
    launch_of,
    launched,
)
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all rows: no field may be missing, and none may be unknown."""


class ConfigRow(_Row, frozen=True):
    """A configuration; null is a knob that is not set."""

    algorithm: Algorithm | None
    protocol: Protocol | None
    transport: Transport | None
    num_channels: int | None
    num_threads: int | None
    chunk_bytes: int | None


class LaunchRow(_Row, frozen=True):
    """How the computation was launched; null is a knob that is not set."""

    sm_carveout: int | None
    order: LaunchOrder | None
    priority: StreamPriority | None


class MeasuredRow(_Row, frozen=True):
    """A measurement, its collectives by name."""

    makespan_s: float
    comp_s: float
    comm_s: dict[str, float]
    num_repeats: int
    makespan_iqr_s: float


class GroupRow(_Row, frozen=True, omit_defaults=True):
    """One group in one step: configurations by collective, the reason, and the outcome: `measured`, `failure` or both.

    Both are set if a trial was abandoned after a measurement. `launch` is absent where the computation was untouched.
    """

    configs: dict[str, ConfigRow]
    reason: str | None
    priorities: dict[str, float]
    measured: MeasuredRow | None
    failure: str | None
    launch: LaunchRow | None = None


_KNOBS: Final = ConfigRow.__struct_fields__
_LAUNCH_KNOBS: Final = LaunchRow.__struct_fields__
_T = TypeVar("_T")


def group_row(
    problem: GroupProblem,
    assignment: Assignment,
    outcome: Outcome | None,
    reason: str | None = None,
    priorities: Mapping[str, float] | None = None,
) -> GroupRow:
    """The row of one group in one step; `outcome` None: only the whole step was timed."""
    names, launch = problem.group.comm_names, launch_of(assignment)
    read = outcome.measured if isinstance(outcome, Failure) else outcome
    measured = None
    if read is not None:
        measured = MeasuredRow(
            makespan_s=read.makespan_s,
            comp_s=read.comp_s,
            comm_s=dict(zip(names, read.comm_s, strict=True)),
            num_repeats=read.num_repeats,
            makespan_iqr_s=read.makespan_iqr_s,
        )
    return GroupRow(
        configs={
            name: ConfigRow(*(getattr(config, knob) for knob in _KNOBS))
            for name, config in zip(names, assignment, strict=True)
        },
        reason=reason,
        priorities=dict(priorities or {}),
        measured=measured,
        failure=outcome.reason if isinstance(outcome, Failure) else None,
        launch=None if launch.is_untouched else LaunchRow(*(getattr(launch, knob) for knob in _LAUNCH_KNOBS)),
    )


def assignment_of(row: GroupRow, problem: GroupProblem) -> Assignment:
    """The assignment in a row.

    Raises:
        ValueError: if it does not name exactly the group's collectives.
        SpaceError: if a knob is impossible.
    """
    rows = _in_order("configs", row.configs, problem)
    configs = (CommConfig(**{knob: getattr(config, knob) for knob in _KNOBS}) for config in rows)
    launch_row = row.launch
    launch = (
        UNTOUCHED_LAUNCH
        if launch_row is None
        else LaunchConfig(**{knob: getattr(launch_row, knob) for knob in _LAUNCH_KNOBS})
    )
    return launched(configs, launch)


def outcome_of(row: GroupRow, problem: GroupProblem) -> Outcome:
    """The outcome in a row.

    Raises:
        ValueError: if it holds neither a measurement nor a failure, or other collectives.
    """
    if row.measured is None and row.failure is None:
        raise ValueError("one of measured and failure must be set")
    measured = None if row.measured is None else _measurement(row.measured, problem)
    if row.failure is not None:
        return Failure(row.failure, measured)
    assert measured is not None, "a row without an outcome"
    return measured


def _measurement(row: MeasuredRow, problem: GroupProblem) -> Measurement:
    return Measurement(
        makespan_s=row.makespan_s,
        comp_s=row.comp_s,
        comm_s=_in_order("comm_s", row.comm_s, problem),
        num_repeats=row.num_repeats,
        makespan_iqr_s=row.makespan_iqr_s,
    )


def _in_order(what: str, values: Mapping[str, _T], problem: GroupProblem) -> tuple[_T, ...]:
    names = problem.group.comm_names
    if values.keys() != set(names):
        raise ValueError(f"{what} of group {problem.group.name!r} name {sorted(values)}, must name {sorted(names)}")
    return tuple(values[name] for name in names)
