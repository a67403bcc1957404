"""The whole step of a job whose overlap groups are tuned: untouched, and with the settings that were found for groups.

A group is a part of a step: what it gains there is not what the step gains, since a step has more than its groups, and
what it gains may be waited for elsewhere. Here the settings of every group go into the step that
`lagom simulate` prices, under contention: a group's collectives are found in it by their call sites.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lagom_overlap.collective import Collective, CommConfig, launch_of
from lagom_overlap.errors import SpaceError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.memory import beyond_note
from lagom_overlap.planners.memory import peak_of_spans
from lagom_overlap.sim import IterationSimulator
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.problem import Assignment
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.overlap import call_sites


def _site(communicator: str, collective: Collective, number: int) -> tuple[str, str, int, int]:
    """A call site: its place among the step's calls of one communicator, kind and size."""
    return communicator, collective.kind, collective.num_bytes, number


@dataclass(frozen=True, slots=True)
class WholeStep:
    """One rank's step and its seconds under settings; `notes` are what is to be said of it."""

    untouched_s: float
    notes: tuple[str, ...]
    _simulator: IterationSimulator
    _names: Mapping[tuple[str, str, int, int], str]
    _own_s: float

    @classmethod
    def of(cls, job: Job, backend: str) -> "WholeStep | None":
        """The step of a job whose model is priced; None where the job has none, or its times are measured."""
        if backend != "simulated":
            return None
        if job.step is not None:
            step = job.step.issued
            simulator = job.step.simulator.price.simulator(step.iteration, waits=step.waits)
            return cls._of(step.iteration, simulator, job.step.times.iteration_s, ())
        cluster, issued = job.cluster, job.issued
        if cluster is None or issued is None:
            return None
        simulator = IterationSimulator(issued, job.price)
        names = (op.name for op in issued.ops)
        spans = dict(zip(names, zip(*simulator.run({}), strict=True), strict=True))
        notes = beyond_note(peak_of_spans(issued, spans), cluster.gpu)
        return cls._of(issued, simulator, None, notes)

    @classmethod
    def _of(
        cls, iteration: Iteration, simulator: IterationSimulator, untouched_s: float | None, notes: tuple[str, ...]
    ) -> "WholeStep":
        own_s = simulator.makespan_s({})
        comms, sites = {comm.name: comm for comm in iteration.comms}, call_sites(iteration)
        names = {_site(comms[name].communicator, comms[name].collective, site): name for name, site in sites.items()}
        return cls(own_s if untouched_s is None else untouched_s, notes, simulator, names, own_s)

    def seconds(self, problems: Problems, found: Mapping[str, Assignment]) -> float | None:
        """Seconds of the step with these settings of its groups; groups that `found` does not name stay untouched.

        None where the computation's side is set, which is priced in groups only, or a setting cannot run.
        """
        configs: dict[str, CommConfig] = {}
        for problem in problems:
            assignment = found.get(problem.group.name, problem.default)
            if launch_of(assignment) != launch_of(problem.default):
                return None
            for comm, sites, default, config in zip(
                problem.group.comms, problem.group.occurrences, problem.default, assignment, strict=True
            ):
                if config != default:
                    configs |= {self._names[_site(comm.communicator, comm.collective, site)]: config for site in sites}
        if not configs:
            return self.untouched_s
        try:
            # Many micro-batches are predicted from the three that differ (`sim.training`), so a ratio is taken.
            return self.untouched_s * self._simulator.makespan_s(configs) / self._own_s
        except SpaceError:
            return None

    def alone(self, problems: Problems, found: Mapping[str, Assignment]) -> dict[str, float]:
        """Seconds of the step with the settings of one group at a time, of those that change."""
        steps = {}
        for problem in problems:
            name = problem.group.name
            if found.get(name, problem.default) != problem.default:
                step_s = self.seconds(problems, {name: found[name]})
                if step_s is not None:
                    steps[name] = step_s
        return steps
