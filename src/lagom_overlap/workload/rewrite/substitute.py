"""`Substitute` applied: an all-reduce as two collectives, a gather or scatter as one rooted collective per rank."""

from dataclasses import replace

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import CommOp
from lagom_overlap.workload.rewrite.draft import Draft, Replacement
from lagom_overlap.workload.rewrite.steps import Substitute, Substitution

_NEEDS = {
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
    if comm.collective.kind is not _NEEDS[step.into]:
        raise JobError(
            f"{comm.name}: is {comm.collective.kind}, only {_NEEDS[step.into]} can be replaced by {step.into}"
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
    return Replacement((scatter, gather), (gather.name,))


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
    return Replacement(ops, tuple(op.name for op in ops))
