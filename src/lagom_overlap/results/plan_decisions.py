"""What a plan decides, collective by collective, and which computations it cuts alone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lagom_overlap.planners.base import Plan
from lagom_overlap.planners.times import origin_name
from lagom_overlap.workload import CompOp, Iteration
from lagom_overlap.workload.rewrite.steps import Fuse, PartitionGroups, Slide, Split, Substitute
from lagom_overlap.workload.sharding import Gather


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOrder:
    """A mesh over the group, and its axes in the order in which they run."""

    mesh: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecision:
    """What the plan does with one collective of the program, or that it cuts a computation alone (`is_computation`).

    `split_dim` is the dimension of its result along which it is cut into `num_chunks`; None for a computation whose
    pieces are summed. `prefetch` counts computations that are issued between it and the first that needs it.
    """

    comm: str
    substitution: str | None = None
    groups: MeshOrder | None = None
    split_dim: int | None = None
    num_chunks: int = 1
    fused_with: tuple[str, ...] = ()
    prefetch: int = 0
    is_computation: bool = False


def decisions_of(before: Iteration, plan: Plan) -> tuple[PlanDecision, ...]:
    """What the plan decides for collectives of the program that it treats otherwise, then for computations cut alone.

    A computation that is cut with a collective belongs to that collective's decision.
    """
    known = {comm.name: comm for comm in before.comms}
    comps = {comp.name: comp for comp in before.computations}
    alone: dict[str, PlanDecision] = {}
    changed: dict[str, PlanDecision] = {}

    def note(name: str, **fields: Any) -> None:
        origin = origin_name(name, known)
        changed[origin] = replace(changed.get(origin, PlanDecision(comm=origin)), **fields)

    for step in plan.rewrites:
        match step:
            case Substitute():
                note(step.comm, substitution=str(step.into))
            case Slide():
                for name in step.comms:
                    note(name, substitution="reduce_scatter_part_all_gather")
            case PartitionGroups():
                note(step.comm, groups=MeshOrder(mesh=tuple(step.mesh), order=tuple(step.order)))
            case Split() if (name := origin_name(step.comm, comps)) in comps:
                earlier = alone[name].num_chunks if name in alone else 1
                alone[name] = PlanDecision(
                    comm=name,
                    split_dim=_result_dim(comps[name], step.axis),
                    num_chunks=earlier + step.num_chunks - 1,
                    is_computation=True,
                )
            case Split():
                base = known.get(origin_name(step.comm, known))
                combine = base.shards.combine[step.axis] if base is not None and base.shards is not None else None
                dim = combine.dim if isinstance(combine, Gather) else step.axis
                note(step.comm, split_dim=dim, num_chunks=step.num_chunks)
            case Fuse():
                for name in step.comms:
                    note(name, fused_with=tuple(other for other in step.comms if other != name))
    leads_before, leads_after = _leads(before, known), _leads(plan.iteration, known)
    decisions = []
    for name in known:
        lead = leads_after.get(name, leads_before.get(name, 0))
        if name in changed or lead != leads_before.get(name, 0):
            decisions.append(replace(changed.get(name, PlanDecision(comm=name)), prefetch=lead))
    return (*decisions, *(alone[name] for name in comps if name in alone))


def _result_dim(op: CompOp, axis: int) -> int | None:
    """The dimension of a computation's result along which pieces of an axis lie; None where they are summed."""
    combine = op.shards.combine[axis] if op.shards is not None else None
    return combine.dim if isinstance(combine, Gather) else None


def _leads(iteration: Iteration, known: Iterable[str]) -> dict[str, int]:
    """Computations issued between the first part of each collective and the first that waits for a part of it."""
    names = dict.fromkeys(known)
    started: dict[str, int] = {}
    leads: dict[str, int] = {}
    num_computations = 0
    base_of: dict[str, str] = {}
    for op in iteration.ops:
        base = origin_name(op.name, names)
        is_part = base in names and not isinstance(op, CompOp)
        for dep in op.deps:
            waited = base_of.get(dep)
            if waited is not None and waited not in leads and not (is_part and base == waited):
                leads[waited] = num_computations - started[waited]
        if is_part:
            base_of[op.name] = base
            started.setdefault(base, num_computations)
        else:
            num_computations += isinstance(op, CompOp)
    for base, start in started.items():
        leads.setdefault(base, num_computations - start)
    return leads
