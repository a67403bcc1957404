"""The whole step of a job whose overlap groups are tuned: untouched, and with the settings that were found for groups.

A group is a part of a step: what it gains there is not what the step gains, since a step has more than its groups, and
what it gains may be waited for elsewhere. Here the settings of every group go into the step that
`lagom simulate` prices, under contention: a group's collectives are found in it by their call sites. Of a pipeline that
is the iteration of all stages.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lagom_overlap.collective import CommConfig, launch_of
from lagom_overlap.errors import SpaceError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.memory import beyond_note
from lagom_overlap.jobfile.stages import StagedGroup, stages_notes
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.planners.memory import peak_of_spans
from lagom_overlap.sim import IterationSimulator
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.problem import Assignment
from lagom_overlap.workload import Iteration, OverlapGroup
from lagom_overlap.workload.overlap import call_of, call_sites

_Changes = Mapping[tuple[str, int], CommConfig]
"""Settings by a group's name and the number of its collective."""


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A job's step and its seconds under settings; `notes` are what is to be said of it."""

    untouched_s: float
    notes: tuple[str, ...]
    _seconds_of: Callable[[_Changes], float]

    @classmethod
    def of(cls, job: Job, backend: str) -> "WholeStep | None":
        """The step of a job whose model is priced; None where the job has none, or its times are measured."""
        if backend != "simulated":
            return None
        if job.step is not None:
            untouched_s = job.step.times.iteration_s
            if not job.step.is_whole:
                return cls(untouched_s, stages_notes(job.step), _in_stages(job.step, job.staged))
            step = job.step.issued
            simulator = job.step.simulator.price.simulator(step.iteration, waits=step.waits)
            return cls(untouched_s, (), _in_one_rank(step.iteration, simulator, job.groups, untouched_s))
        cluster, issued = job.cluster, job.issued
        if cluster is None or issued is None:
            return None
        simulator = IterationSimulator(issued, job.price)
        names = (op.name for op in issued.ops)
        spans = dict(zip(names, zip(*simulator.run({}), strict=True), strict=True))
        notes = beyond_note(peak_of_spans(issued, spans), cluster.gpu)
        untouched_s = simulator.makespan_s({})
        return cls(untouched_s, notes, _in_one_rank(issued, simulator, job.groups, untouched_s))

    def seconds(self, problems: Problems, settings: Mapping[str, Assignment]) -> float | None:
        """Seconds of the step with these settings of its groups; groups that `settings` does not name stay untouched.

        None where the computation's side is set, which is priced in groups only, or a setting cannot run.
        """
        changes: dict[tuple[str, int], CommConfig] = {}
        for problem in problems:
            name = problem.group.name
            assignment = settings.get(name, problem.default)
            if launch_of(assignment) != launch_of(problem.default):
                return None
            for number, (default, config) in enumerate(zip(problem.default, assignment, strict=True)):
                if config != default:
                    changes[name, number] = config
        if not changes:
            return self.untouched_s
        try:
            return self._seconds_of(changes)
        except SpaceError:
            return None

    def alone(self, problems: Problems, settings: Mapping[str, Assignment]) -> dict[str, float]:
        """Seconds of the step with the settings of one group at a time, of those that change."""
        steps = {}
        for problem in problems:
            name = problem.group.name
            if settings.get(name, problem.default) != problem.default:
                step_s = self.seconds(problems, {name: settings[name]})
                if step_s is not None:
                    steps[name] = step_s
        return steps


def _in_one_rank(
    iteration: Iteration, simulator: IterationSimulator, groups: tuple[OverlapGroup, ...], untouched_s: float
) -> Callable[[_Changes], float]:
    """Prices changes in a step that one rank runs by itself."""
    comms, sites = {comm.name: comm for comm in iteration.comms}, call_sites(iteration)
    names = {(*call_of(comms[name]), site): name for name, site in sites.items()}
    calls = {
        (group.name, number): [names[*call_of(comm), site] for site in occurrences]
        for group in groups
        for number, (comm, occurrences) in enumerate(zip(group.comms, group.occurrences, strict=True))
    }
    # Many micro-batches are predicted from the three that differ (`sim.training`), so a ratio is taken.
    scale = untouched_s / simulator.makespan_s({})

    def seconds(changes: _Changes) -> float:
        return scale * simulator.makespan_s({name: config for call, config in changes.items() for name in calls[call]})

    return seconds


def _in_stages(step: JobStep, staged: tuple[StagedGroup, ...]) -> Callable[[_Changes], float]:
    """Prices changes in the iteration of a pipeline: in each stage where a group occurs."""
    places = {staged_group.group.name: staged_group.places for staged_group in staged}

    def seconds(changes: _Changes) -> float:
        placed: dict[int, dict[int, CommConfig]] = defaultdict(dict)
        for (name, number), config in changes.items():
            for stage, of_comms in places[name].items():
                placed[stage] |= dict.fromkeys(of_comms[number], config)
        return step.simulator.times_at(placed).iteration_s

    return seconds
