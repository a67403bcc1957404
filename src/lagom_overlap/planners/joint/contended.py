"""What an iteration takes with contention, when each of its collectives runs with a setting.

A class is what can share a setting without thinking: the same collective, on the same communicator, in the same phase.
A call of it may have a setting of its own. Pieces that a plan makes of a collective (`c#0`, `c/g1`, `c.rs`) run with
the setting of the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lagom_overlap.collective import Collective, CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import JobError, SpaceError
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.simulated import one_at_a_time
from lagom_overlap.planners.times import ModelTimes, origin_name
from lagom_overlap.sim import IterationSimulator
from lagom_overlap.timeline import Timeline
from lagom_overlap.workload import CommOp, Iteration, Phase


@dataclass(frozen=True, slots=True)
class CommClass:
    """Collectives that share a setting."""

    collective: Collective
    communicator: str
    phase: Phase | None


Settings = Mapping[CommClass | str, CommConfig]
"""A setting per class, or per call (name of the whole collective), which wins; what is missing runs untouched."""


def class_of(comm: CommOp) -> CommClass:
    """The class of a collective of the unplanned iteration."""
    return CommClass(comm.collective, comm.communicator, comm.origin.phase)


class Issued:
    """One issue order of a step or of what a plan makes of it: its times under settings."""

    def __init__(self, whole: Iteration, iteration: Iteration, model: ContentionModel) -> None:
        classes = {comm.name: class_of(comm) for comm in whole.comms}
        known = {op.name: 0.0 for op in whole.ops}
        origins = {op.name: origin_name(op.name, known) for op in iteration.ops}
        self._zero_s = known
        self._origins = {name: origin for name, origin in origins.items() if origin in known}
        calls = [(comm.name, origins[comm.name]) for comm in iteration.comms]
        self._calls = [(name, origin, classes[origin]) for name, origin in calls if origin in classes]
        self._simulator = IterationSimulator(one_at_a_time(iteration), model)
        self.iteration = iteration

    @property
    def classes_of_calls(self) -> dict[str, CommClass]:
        """The class of every call of the whole step, in the order in which they are issued here."""
        return {origin: kind for _, origin, kind in self._calls}

    def makespan_s(self, settings: Settings) -> float:
        """Seconds of the iteration; infinite where a setting cannot run on some piece."""
        try:
            return self._simulator.makespan_s(self.configs(settings))
        except SpaceError:
            return float("inf")

    def timeline(self, settings: Settings) -> Timeline:
        """Who runs when, rates changing with what runs.

        Raises:
            SpaceError: if a setting cannot run.
        """
        return self._simulator.timeline(self.configs(settings))

    def stretched_s(self, settings: Settings) -> dict[str, float]:
        """Seconds that each operator of the whole takes under contention: its pieces' times together."""
        took = self._zero_s.copy()
        for span in self.timeline(settings).spans:
            origin = self._origins.get(span.name)
            if origin is not None:
                took[origin] += span.end_s - span.start_s
        return {name: seconds for name, seconds in took.items() if seconds > 0}

    def configs(self, settings: Settings) -> dict[str, CommConfig]:
        """The setting of every collective of the iteration that has one."""
        configs = {}
        for name, origin, kind in self._calls:
            config = settings.get(origin) or settings.get(kind)
            if config is not None:
                configs[name] = config
        return configs


@dataclass(frozen=True, slots=True)
class Contended:
    """The iteration that is planned (`whole`) under a contention model: times of it and of what plans make of it."""

    whole: Iteration
    model: ContentionModel

    @classmethod
    def of(cls, problem: PlanProblem) -> "Contended":
        """The step of a planning problem.

        Raises:
            JobError: if its times are not the cost model's: contention is not known then.
        """
        if not isinstance(problem.times, ModelTimes):
            raise JobError("joint planning needs the cost model's times: measured ones say nothing of contention")
        return cls(problem.iteration, problem.times.model)

    def classes(self) -> tuple[CommClass, ...]:
        """The classes of the whole iteration, in issue order."""
        return tuple(dict.fromkeys(class_of(comm) for comm in self.whole.comms))

    def issued(self, iteration: Iteration) -> Issued:
        """The whole iteration, or what a plan made of it, ready to be simulated often."""
        return Issued(self.whole, iteration, self.model)
