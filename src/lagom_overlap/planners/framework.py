"""What a framework's step waits for beyond its data flow, whatever the order: plans for it keep that.

Data flow alone would let an optimizer's bookkeeping run before the forward pass, and a second gather of parameters
before the first has begun. No framework runs that:

- `optimizer.step()` is called when `backward()` has returned, which is when every gradient has been reduced: FSDP2 and
  DDP have the computing stream wait for the last reduction, Megatron-LM and DeepSpeed need all of them for clipping.
  What the step does there (clipping first) it does in program order: no update comes before the gradients are clipped.
- A group of parameters is either sharded or gathered: it is gathered again once its first gathering was released.
- The gathers of a backward pass are issued behind those of its forward pass, on the same streams.
"""

from itertools import pairwise
from typing import Final

from lagom_overlap.workload import CommOp, Iteration, Phase
from lagom_overlap.workload.gathers import begins_of_gathers, gathers_by_group, users_of_gathers
from lagom_overlap.workload.streams import ALL_GATHER_COPY_IN

FSDP2: Final = "FSDP2"
_BACKWARD = (Phase.BACKWARD, Phase.WEIGHT_GRAD, Phase.RECOMPUTE)
_FORWARD = (Phase.FORWARD, Phase.LOSS)


def framework_of(iteration: Iteration) -> str | None:
    """Whose step this is, by the streams that only that framework has; None if none is recognised."""
    return FSDP2 if any(op.stream == ALL_GATHER_COPY_IN for op in iteration.ops) else None


def framework_arcs(iteration: Iteration) -> list[tuple[str, str]]:
    """Arcs (from, to) that the frameworks' steps keep; all point along program order."""
    return [*_optimizer_arcs(iteration), *_gather_arcs(iteration)]


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
    read = {dep for op in iteration.ops if op.origin.phase in _BACKWARD for dep in op.deps}
    ends = [op.name for op in iteration.ops if op.origin.phase in _BACKWARD and op.name not in read]
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
        if gather.origin.phase in _FORWARD:
            last_forward[batch] = gather.name
        elif batch in last_forward:
            waits.setdefault(gather.name, []).append(last_forward[batch])
    arcs = []
    for name, earlier in waits.items():
        begin = begins[name]
        arcs += [(one, begin) for one in dict.fromkeys(earlier) if place[one] < place[begin]]
    return arcs
