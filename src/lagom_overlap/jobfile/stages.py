"""The overlap groups of a pipeline: those of each stage that is simulated, equal ones of several stages once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.sim.training import MAX_BUILT
from lagom_overlap.workload import OverlapGroup, find_overlap_groups
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.ops import CommOp
from lagom_overlap.workload.overlap import call_of, call_sites


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedGroup:
    """A group, and where it occurs: by stage, for each of its collectives, the places in the step of that stage."""

    group: OverlapGroup
    places: Mapping[int, tuple[tuple[int, ...], ...]]


def staged_groups(step: JobStep) -> tuple[StagedGroup, ...]:
    """The groups of the stages that are simulated, in the order of the stages.

    A group's `count` is that in the iteration of one rank, of the stage where it occurs most.
    """
    groups: dict[object, StagedGroup] = {}
    for stage in step.simulator.stages:
        iteration = step.simulator.step(stage).issued
        for group in find_overlap_groups(iteration):
            places = _places(group, iteration)
            count = _count(places[0], iteration, step.layout.num_micro_batches)
            works = tuple(op.work for op in group.computations)
            calls = tuple((op.collective, op.communicator) for op in group.comms)
            key = works, calls, group.starts_after
            known = groups.get(key)
            if known is None:
                named = replace(group, name=f"{iteration.name}/{len(groups)}", count=count)
                groups[key] = StagedGroup(group=named, places={stage: places})
            else:
                most = replace(known.group, count=max(known.group.count, count))
                groups[key] = StagedGroup(group=most, places={**known.places, stage: places})
    return tuple(groups.values())


def _places(group: OverlapGroup, iteration: Iteration) -> tuple[tuple[int, ...], ...]:
    """Where each collective of a group stands in the step."""
    sites = call_sites(iteration)
    places = {(*call_of(op), sites[op.name]): place for place, op in enumerate(iteration.ops) if isinstance(op, CommOp)}
    return tuple(
        tuple(places[*call_of(comm), number] for number in occurrences)
        for comm, occurrences in zip(group.comms, group.occurrences, strict=True)
    )


def _count(places: tuple[int, ...], iteration: Iteration, num_micro_batches: int) -> int:
    """How often a group occurs: of the micro-batches in the step, the second stands for all but first and last."""
    num_inner = max(1, num_micro_batches - MAX_BUILT + 1)
    return sum(num_inner if iteration.ops[place].origin.microbatch == 1 else 1 for place in places)


def stages_notes(step: JobStep) -> tuple[str, ...]:
    """Of which stages the groups are."""
    num, simulated = step.layout.pipeline, step.simulator.stages
    shown = ", ".join(map(str, simulated))
    alike = "" if len(simulated) == num else "; every other stage is like one of them"
    return (
        f"Groups are those of stages {shown} of the pipeline's {num}{alike}. Equal groups of several are set alike.",
    )
