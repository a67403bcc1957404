"""What a framework's step waits for beyond its data flow, whatever the order: plans for it keep that.

Data flow alone would let an optimizer's bookkeeping run before the forward pass, and a second gather of parameters
before the first has begun. No framework runs that:

- `optimizer.step()` is called when `backward()` has returned, which is when every gradient has been reduced: FSDP2 and
  DDP have the computing stream wait for the last reduction, Megatron-LM and DeepSpeed need all of them for clipping.
  What the step does there (clipping first) it does in program order: no update comes before the gradients are clipped.
- A group of parameters is either sharded or gathered: it is gathered again once its first gathering was released.
- The gathers of a backward pass are issued behind those of its forward pass, on the same streams.
- DDP's reducer reduces its buckets in their order, and copies them out, bucket by bucket, when backward has ended.
"""

from collections.abc import Container, Mapping
from itertools import pairwise
from typing import Final

from lagom_overlap.workload import CommOp, Iteration, MemoryBound, Op, Phase
from lagom_overlap.workload.gathers import begins_of_gathers, gathers_by_group, users_of_gathers
from lagom_overlap.workload.ops import BACKWARD_PHASES, FORWARD_PHASES, data_deps
from lagom_overlap.workload.streams import ALL_GATHER_COPY_IN, COMPUTE, DDP_REDUCER

FSDP2: Final = "FSDP2"
DDP: Final = "DDP"


def framework_of(iteration: Iteration) -> str | None:
    """Whose step this is, by the streams that only that framework has; None if none is recognised."""
    streams = {op.stream for op in iteration.ops}
    if ALL_GATHER_COPY_IN in streams:
        return FSDP2
    return DDP if DDP_REDUCER in streams else None


def framework_arcs(iteration: Iteration) -> list[tuple[str, str]]:
    """Arcs (from, to) that the frameworks' steps keep; all point along program order."""
    return [*_optimizer_arcs(iteration), *_gather_arcs(iteration), *_reducer_arcs(iteration)]


def _optimizer_arcs(iteration: Iteration) -> list[tuple[str, str]]:
    """The optimizer's first operator waits for what nothing in backward reads, the others for those before."""
    ops = {op.name: op for op in iteration.ops}
    heads = [
        op.name
        for op in iteration.ops
        if op.origin.phase is Phase.OPTIMIZER
        and not any(ops[dep].origin.phase is Phase.OPTIMIZER for dep in op.deps)
        and not isinstance(op, CommOp)
    ]
    if not heads:
        return []
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    read = {dep for op in iteration.ops if op.origin.phase in BACKWARD_PHASES for dep in op.deps}
    ends = [op.name for op in iteration.ops if op.origin.phase in BACKWARD_PHASES and op.name not in read]
    first = heads[0]
    updates = [op.name for op in iteration.ops if op.origin.phase is Phase.OPTIMIZER and not isinstance(op, CommOp)]
    ahead = {later: earlier for earlier, later in pairwise(updates)}
    return [
        *((end, first) for end in ends if place[end] < place[first]),
        *((ahead[other], other) for other in heads[1:]),
    ]


def _gather_arcs(iteration: Iteration) -> list[tuple[str, str]]:
    """Each gather of a group waits for the release of the one before, and backward's first one for forward's last."""
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    begins, users = begins_of_gathers(iteration), users_of_gathers(iteration)
    groups = gathers_by_group(iteration)
    waits = {later.name: list(users[earlier.name]) for group in groups for earlier, later in pairwise(group)}
    last_forward: dict[int, str] = {}
    for gather in sorted((op for group in groups for op in group), key=lambda op: place[op.name]):
        batch = gather.origin.microbatch
        if gather.origin.phase in FORWARD_PHASES:
            last_forward[batch] = gather.name
        elif batch in last_forward:
            waits.setdefault(gather.name, []).append(last_forward[batch])
    arcs = []
    for name, earlier in waits.items():
        begin = begins[name]
        arcs += [(one, begin) for one in dict.fromkeys(earlier) if place[one] < place[begin]]
    return arcs


def _reducer_arcs(iteration: Iteration) -> list[tuple[str, str]]:
    """DDP's: each reduction behind the one before; the copies out behind all that backward computes, in their order."""
    reductions: dict[str, list[Op]] = {}
    for comm in iteration.comms:
        if comm.stream.startswith(DDP_REDUCER) and comm.origin.phase in BACKWARD_PHASES:
            reductions.setdefault(comm.communicator, []).append(comm)
    if not reductions:
        return []
    ops = {op.name: op for op in iteration.ops}
    reduced = {op.name for group in reductions.values() for op in group}
    backward = [op for op in iteration.ops if op.origin.phase in BACKWARD_PHASES and op.name not in reduced]
    copies = [op for op in backward if _copies_out(op, ops, reduced)]
    copying = {op.name for op in copies}
    computing = [op for op in backward if op.name not in copying]
    read = {dep for op in computing for dep in op.deps}
    arcs = [pair for group in reductions.values() for pair in pairwise(group)]
    arcs += pairwise(copies)
    arcs += [(op, copies[0]) for op in computing if op.name not in read] if copies else []
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    return [(one.name, other.name) for one, other in arcs if place[one.name] < place[other.name]]


def _copies_out(op: Op, ops: Mapping[str, Op], reduced: Container[str]) -> bool:
    """Whether an operator copies a reduced bucket to where the optimizer reads gradients."""
    is_copy = not isinstance(op, CommOp) and isinstance(op.work, MemoryBound) and op.stream == COMPUTE
    needed = data_deps(op, ops)
    return is_copy and bool(needed) and all(dep in reduced for dep in needed)
