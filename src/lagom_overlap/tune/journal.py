"""What a study did, step by step; the journal as JSON lines is the measurement bundle of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from lagom_overlap.backends.base import Assignment, Outcome


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
