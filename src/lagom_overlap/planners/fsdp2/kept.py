"""A step whose units keep their parameters from forward to backward: it has no second gathers.

What read a second gathering's copy reads the first one's; its buffers live until then.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lagom_overlap.planners.fsdp2.visits import Visit
from lagom_overlap.workload import Buffer, CommOp, Iteration


def with_kept(iteration: Iteration, visits: Sequence[Visit], kept: Collection[str]) -> Iteration:
    """The data flow without the backward gatherings of those units, where forward gathered the same."""
    if not kept:
        return iteration
    gathers = {op.name: op for op in iteration.comms}
    first = {(v.unit, v.batch, _kind(gathers, v)): v for v in visits if v.is_forward}
    twins: dict[str, str] = {}
    gone: set[str] = set()
    for visit in visits:
        earlier = first.get((visit.unit, visit.batch, _kind(gathers, visit)))
        if visit.is_forward or visit.unit not in kept or earlier is None:
            continue
        if (len(earlier.chain), len(earlier.copied)) != (len(visit.chain), len(visit.copied)):
            continue
        twins |= dict(zip((*visit.chain, *visit.copied), (*earlier.chain, *earlier.copied), strict=True))
        gone |= {*visit.chain, *visit.copied}
    if not gone:
        return iteration
    ops = [
        replace(op, deps=tuple(dict.fromkeys(twins.get(dep, dep) for dep in op.deps)))
        for op in iteration.ops
        if op.name not in gone
    ]
    return replace(iteration, ops=tuple(ops), buffers=_buffers(iteration, twins, gone))


def _kind(gathers: Mapping[str, CommOp], visit: Visit) -> object:
    """What tells the gathers of one unit apart: several groups of parameters differ in bytes or ranks."""
    gather = gathers[visit.gather]
    return gather.collective, gather.communicator


def _buffers(iteration: Iteration, twins: dict[str, str], gone: set[str]) -> tuple[Buffer, ...]:
    """Buffers of the second gatherings are not made; the first ones' are held for those who used them."""
    more: dict[str, list[str]] = {}
    for buffer in iteration.buffers:
        if buffer.maker in twins:
            more.setdefault(twins[buffer.maker], []).extend(user for user in buffer.users if user not in gone)
    kept = []
    for buffer in iteration.buffers:
        if buffer.maker in gone:
            continue
        users = (user for user in (*buffer.users, *more.get(buffer.maker, ())) if user not in gone)
        kept.append(replace(buffer, users=tuple(dict.fromkeys(users))))
    return tuple(kept)
