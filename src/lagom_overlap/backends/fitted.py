"""A backend over a contention model that was fitted to this machine's measured overlaps: predictions, no runs.

Used by the calibration loop (fit, tune on the fit, run, compare). The spaces are gloo's, whose slices and channels the
model knows. Not an entry point: it needs constants and computations measured beforehand.
"""

from collections.abc import Mapping

from lagom_overlap.backends.gloo.terms import space_within
from lagom_overlap.collective import CommConfig, SpaceLimits
from lagom_overlap.cost.overlap_fit import FittedOverlap, OverlapConstants, predict
from lagom_overlap.engines.gloo_space import whole_message
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome, corners
from lagom_overlap.workload import OverlapGroup


class FittedBackend:
    """Implements `Backend`; `comp_alone_s` gives the time of each group's computations alone, by group name."""

    description = "predicted from a trace by a model fitted to measured overlaps: nothing was run"

    def __init__(
        self, constants: OverlapConstants, comp_alone_s: Mapping[str, float], limits: SpaceLimits | None = None
    ) -> None:
        self._constants = constants
        self._comp_alone_s = dict(comp_alone_s)
        self._limits = limits or SpaceLimits()

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """See `Backend`; as the gloo backend has it."""
        spaces = tuple(space_within(comm.collective, self._limits) for comm in group.comms)
        return GroupProblem(
            group=group,
            spaces=spaces,
            default=(CommConfig(),) * len(group.comms),
            baselines={
                "engine_default": tuple(whole_message(comm.collective) for comm in group.comms),
                **corners([space.subspaces[0] for space in spaces]),
            },
        )

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """The predicted times; `Failure` where the fit never saw a kind of collective run that way."""
        try:
            times = predict(self.overlap(group, assignment), self._constants)
        except KeyError as error:
            return Failure(f"the fit holds no measurement of {error.args[0]}")
        return Measurement(makespan_s=times.makespan_s, comp_s=times.comp_s, comm_s=times.comm_s)

    def overlap(self, group: OverlapGroup, assignment: Assignment) -> FittedOverlap:
        """A group under an assignment in the model's terms; its computations count alike for `starts_after`."""
        return overlap_of(group, assignment, self._comp_alone_s[group.name])

    def close(self) -> None:
        """Nothing to free."""


def overlap_of(group: OverlapGroup, assignment: Assignment, comp_alone_s: float) -> FittedOverlap:
    """A group under an assignment whose computations take `comp_alone_s` alone."""
    return FittedOverlap(
        comp_alone_s=comp_alone_s,
        collectives=tuple(comm.collective for comm in group.comms),
        configs=assignment,
        starts=tuple(start / len(group.computations) for start in group.starts_after),
    )
