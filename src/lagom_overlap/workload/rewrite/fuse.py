"""`Fuse` applied: collectives of one kind and group become one, at the place of the last of them."""

from dataclasses import replace

from lagom_overlap.collective import Collective
from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import CommOp
from lagom_overlap.workload.rewrite.draft import Draft
from lagom_overlap.workload.rewrite.steps import Fuse


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
