"""Rewrites applied to an iteration: a plan becomes the iteration that it means.

`Reorder` applied: all operators in another issue order, some on other streams, some with one more wait.

`Fuse` applied: collectives of one kind and group become one, at the place of the last of them.

`Substitute` applied: an all-reduce as two collectives, a gather or scatter as one rooted collective per rank.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.ops import CommOp, Op
from lagom_overlap.workload.rewrite.draft import Draft, Replacement
from lagom_overlap.workload.rewrite.partition import apply_partition, apply_split
from lagom_overlap.workload.rewrite.slide import apply_slide
from lagom_overlap.workload.rewrite.steps import (
    Fuse,
    PartitionGroups,
    Reorder,
    Rewrite,
    Slide,
    Split,
    Substitute,
    Substitution,
)

REPLACED = {
    Substitution.REDUCE_SCATTER_ALL_GATHER: CollectiveKind.ALL_REDUCE,
    Substitution.REDUCES: CollectiveKind.REDUCE_SCATTER,
    Substitution.BROADCASTS: CollectiveKind.ALL_GATHER,
}


def apply_substitute(draft: Draft, step: Substitute) -> None:
    """Puts the sub-primitives in the collective's place; together they move what it moved.

    Raises:
        JobError: if the collective is of another kind, or holds fewer bytes than ranks.
    """
    comm = draft.comm(step.comm)
    if comm.collective.kind is not REPLACED[step.into]:
        raise JobError(
            f"{comm.name}: is {comm.collective.kind}, only {REPLACED[step.into]} can be replaced by {step.into}"
        )
    if step.into is Substitution.REDUCE_SCATTER_ALL_GATHER:
        draft.replace({comm.name: _two(comm)})
    else:
        draft.replace({comm.name: _rooted(comm)})


def _two(comm: CommOp) -> Replacement:
    scatter = replace(
        comm, name=f"{comm.name}.rs", collective=replace(comm.collective, kind=CollectiveKind.REDUCE_SCATTER)
    )
    gather = replace(
        comm,
        name=f"{comm.name}.ag",
        collective=replace(comm.collective, kind=CollectiveKind.ALL_GATHER),
        deps=(scatter.name,),
        shards=None
        if comm.shards is None
        else replace(comm.shards, inputs=tuple(replace(use, source=scatter.name) for use in comm.shards.inputs)),
    )
    return Replacement((scatter, gather), (gather.name,), num_parts=comm.collective.num_ranks)


def _rooted(comm: CommOp) -> Replacement:
    """One reduction to, or broadcast from, every rank of its part."""
    call = comm.collective
    gathers = call.kind is CollectiveKind.ALL_GATHER
    kind = CollectiveKind.BROADCAST if gathers else CollectiveKind.REDUCE
    share, rest = divmod(call.num_bytes, call.num_ranks)
    if not share:
        raise JobError(f"{comm.name}: {call.num_bytes} bytes cannot be spread over {call.num_ranks} roots")
    ops = tuple(
        replace(
            comm,
            name=f"{comm.name}.{root}",
            collective=replace(call, kind=kind, num_bytes=share + (root < rest)),
            shards=None,
        )
        for root in range(call.num_ranks)
    )
    share_of_root = Fraction(1, call.num_ranks) if gathers else Fraction(1)
    return Replacement(ops, tuple(op.name for op in ops), made=(share_of_root,) * call.num_ranks)


def reordered(iteration: Iteration, step: Reorder) -> Iteration:
    """The iteration in that order.

    Raises:
        JobError: if the order does not name every operator once, or issues one before what it waits for.
    """
    ops = {op.name: op for op in iteration.ops}
    _check_names(iteration, step)
    place = {name: number for number, name in enumerate(step.order)}
    waits: dict[str, list[str]] = {}
    for name, earlier in step.waits:
        waits.setdefault(name, []).append(earlier)
    for op in iteration.ops:
        early = [dep for dep in (*op.deps, *waits.get(op.name, ())) if place[dep] > place[op.name]]
        if early:
            raise JobError(
                f"the plan's order issues {op.name!r} before {early[0]!r}, which it waits for in {iteration.name!r}"
            )
    streams = dict(step.streams)

    def moved(op: Op) -> Op:
        if op.name not in streams and op.name not in waits:
            return op
        deps = tuple(dict.fromkeys((*op.deps, *waits.get(op.name, ()))))
        return replace(op, stream=streams.get(op.name, op.stream), deps=deps)

    return replace(iteration, ops=tuple(moved(ops[name]) for name in step.order))


def _check_names(iteration: Iteration, step: Reorder) -> None:
    names = {op.name for op in iteration.ops}
    unknown = [
        name
        for name in (*step.order, *(name for name, _ in step.streams), *(name for pair in step.waits for name in pair))
        if name not in names
    ]
    if unknown:
        raise JobError(f"a plan for another graph: iteration {iteration.name!r} has no operator {unknown[0]!r}")
    if len(set(step.order)) != len(step.order):
        twice = [name for name, times in Counter(step.order).items() if times > 1]
        raise JobError(f"the plan's order names {twice[0]!r} twice")
    missing = names.difference(step.order)
    if missing:
        raise JobError(
            f"a plan for another graph: its order leaves out {min(missing)!r} of iteration {iteration.name!r} "
            f"({len(missing)} operators in all)"
        )


def rewritten(iteration: Iteration, rewrites: Iterable[Rewrite]) -> Iteration:
    """The iteration after the rewrites, one after the other; names as `steps` gives them.

    Raises:
        JobError: if the iteration does not hold its data flow, or a rewrite names what is not there or cannot be done.
    """
    if not iteration.is_dataflow:
        raise JobError(f"iteration {iteration.name!r} does not hold its data flow: it cannot be rewritten")
    draft: Draft | None = None  # of what the steps before have made of the iteration, while they draft
    for step in rewrites:
        if isinstance(step, Reorder):
            iteration, draft = reordered(iteration if draft is None else draft.finished(), step), None
            continue
        draft = draft or Draft(iteration)
        match step:
            case Substitute():
                apply_substitute(draft, step)
            case PartitionGroups():
                apply_partition(draft, step)
            case Split():
                apply_split(draft, step)
            case Slide():
                apply_slide(draft, step)
            case Fuse():
                apply_fuse(draft, step)
    return iteration if draft is None else draft.finished()


def fused_name(comms: tuple[str, ...]) -> str:
    """The name of the one collective: the first one's and how many more."""
    return f"{comms[0]}+{len(comms) - 1}"


def same_kind(one: CommOp, other: CommOp) -> bool:
    """Whether two collectives could run as one: kind, group, stream."""
    a, b = one.collective, other.collective
    mine = (a.kind, a.num_ranks, a.num_nodes, one.communicator, one.stream)
    return mine == (b.kind, b.num_ranks, b.num_nodes, other.communicator, other.stream)


def apply_fuse(draft: Draft, step: Fuse) -> None:
    """Fuses; what was issued between the members and waits for one of them moves behind.

    Raises:
        JobError: if the members differ in kind or group, or one waits for another.
    """
    comms = [draft.comm(name) for name in step.comms]
    for other in comms[1:]:
        if not same_kind(comms[0], other):
            raise JobError(f"{comms[0].name} and {other.name} differ in kind, group or stream: they cannot be fused")
    ordered = tuple(sorted(step.comms, key=draft.key))
    after = draft.between(ordered[:-1], (*draft.key(ordered[-1]), 0))
    waiting = [name for name in ordered if name in after]
    if waiting:
        raise JobError(f"{waiting[0]!r} waits for another of {list(step.comms)}: they cannot be fused")
    call = comms[0].collective
    fused = replace(
        comms[0],
        name=fused_name(step.comms),
        collective=Collective(call.kind, sum(c.collective.num_bytes for c in comms), call.num_ranks, call.num_nodes),
        deps=tuple(dict.fromkeys(dep for c in comms for dep in c.deps)),
        shards=None,
    )
    draft.join(ordered, fused, after)
