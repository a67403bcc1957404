"""What an iteration takes with contention, when collectives of one class run with one setting.

A class is what can share a setting without thinking: the same collective, on the same communicator, in the same phase.
Pieces that a plan makes of a collective (`c#0`, `c/g1`, `c.rs`) run with the setting of the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lagom_overlap.collective import Collective, CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import SpaceError
from lagom_overlap.plan.times import origin_name
from lagom_overlap.sim import simulate_iteration
from lagom_overlap.timeline import Timeline
from lagom_overlap.workload import CommOp, Iteration, Phase


@dataclass(frozen=True, slots=True)
class CommClass:
    """Collectives that share a setting."""

    collective: Collective
    communicator: str
    phase: Phase | None


Settings = Mapping[CommClass, CommConfig]
"""A setting per class; a class that is missing runs untouched."""


def class_of(comm: CommOp) -> CommClass:
    """The class of a collective of the unplanned iteration."""
    return CommClass(comm.collective, comm.communicator, comm.origin.phase)


@dataclass(frozen=True, slots=True)
class Contended:
    """The iteration that is planned (`whole`) under a contention model: times of it and of what plans make of it."""

    whole: Iteration
    model: ContentionModel

    def classes(self) -> tuple[CommClass, ...]:
        """The classes of the whole iteration, in issue order."""
        return tuple(dict.fromkeys(class_of(comm) for comm in self.whole.comms))

    def timeline(self, iteration: Iteration, settings: Settings) -> Timeline:
        """Who runs when, rates changing with what runs.

        Raises:
            SpaceError: if a setting cannot run.
        """
        return simulate_iteration(iteration, self._configs(iteration, settings), self.model)

    def makespan_s(self, iteration: Iteration, settings: Settings) -> float:
        """Seconds of the iteration; infinite where a setting cannot run on some piece."""
        try:
            return self.timeline(iteration, settings).makespan_s
        except SpaceError:
            return float("inf")

    def stretched_s(self, iteration: Iteration, settings: Settings) -> dict[str, float]:
        """Seconds that each operator of the whole takes beside what ran beside it: its pieces' times together."""
        known = {op.name: 0.0 for op in self.whole.ops}
        for span in self.timeline(iteration, settings).spans:
            origin = origin_name(span.name, known)
            if origin in known:
                known[origin] += span.end_s - span.start_s
        return {name: seconds for name, seconds in known.items() if seconds > 0}

    def _configs(self, iteration: Iteration, settings: Settings) -> dict[str, CommConfig]:
        chosen = {comm.name: settings[kind] for comm in self.whole.comms if (kind := class_of(comm)) in settings}
        found = {}
        for comm in iteration.comms:
            config = chosen.get(origin_name(comm.name, chosen))
            if config is not None:
                found[comm.name] = config
        return found
