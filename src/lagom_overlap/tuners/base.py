"""The seam of search: ask for a trial, tell its outcome, recommend.

Tuners are pure: no clock, file, environment or global random numbers; the seed is an argument, and the same tells give
the same asks. A tuner works on all groups of an iteration at once, because a training step runs them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement, Outcome

Problems = tuple[GroupProblem, ...]
"""The groups of an iteration, each with its spaces and default."""


def problems_by_name(problems: Problems) -> dict[str, GroupProblem]:
    """The problems by group name, in order.

    Raises:
        ValueError: if there is none, or two groups share a name.
    """
    named = {problem.group.name: problem for problem in problems}
    if not problems or len(named) != len(problems):
        raise ValueError(f"need at least one group and different names, got {[p.group.name for p in problems]}")
    return named


def check_outcomes(
    problems: Mapping[str, GroupProblem], assignments: Mapping[str, Assignment], outcomes: Mapping[str, Outcome]
) -> None:
    """Checks that there is one outcome per group asked for, with one time per collective.

    Raises:
        ValueError: if a group's outcome is missing or foreign, or has another number of collectives.
    """
    if outcomes.keys() != assignments.keys():
        raise ValueError(f"outcomes are of groups {sorted(outcomes)}, asked for {sorted(assignments)}")
    for name, outcome in outcomes.items():
        num_comms = len(problems[name].group.comms)
        if isinstance(outcome, Measurement) and len(outcome.comm_s) != num_comms:
            raise ValueError(f"group {name!r}: {len(outcome.comm_s)} communication times for {num_comms} collectives")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One measured step: an assignment for each group that the tuner wants measured, by group name.

    A group that is absent keeps its setting and needs no measurement. `reasons` are for people, by group; `priorities`
    holds the Lagom metric H by group and collective name, if the tuner has one.
    """

    number: int
    assignments: Mapping[str, Assignment]
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    priorities: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))


class Tuner(Protocol):
    """A search over the configurations of all groups."""

    def ask(self) -> Trial | None:
        """The next trial, the same one until it is told; None when the search is over."""

    def tell(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """The outcomes of the trial just asked for, one per group in it.

        Raises:
            ValueError: if it is not the trial just asked for, or a group's outcome is missing or foreign.
        """

    def recommend(self) -> Mapping[str, Assignment]:
        """Each group's best assignment so far; the default where nothing was learned."""
