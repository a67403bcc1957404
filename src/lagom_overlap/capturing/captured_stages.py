"""Pipeline parallelism: the parts of one stage, captured for one micro-batch, in the order of a schedule.

A stage's module receives its input from the stage before and sends its output to the next; autograd does the same with
gradients the other way. Both are collectives (`send_recv`) of the capture, with their data dependences. `pipelined`
repeats the captured micro-batch as `workload.parallel.schedule` orders it and runs the optimizer once.

Left out: adding a micro-batch's gradients to those before it (elementwise; backward of the first one only writes), and
when the other stages are ready: a receive takes its own time, as if the sender were never late.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lagom_overlap.errors import JobError
from lagom_overlap.workload import Buffer, Iteration, Op, Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.ops import BACKWARD_PHASES
from lagom_overlap.workload.parallel import Slot


class _Receive(torch.autograd.Function):
    """An activation from another rank of the group; its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, source: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.source, ctx.group = source, group
        received = torch.empty_like(like)
        dist.recv(received, source, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dist.send(gradients[0].contiguous(), ctx.source, group=ctx.group)
        return None, None, None


class _Send(torch.autograd.Function):
    """An activation to another rank of the group; its gradient comes back from there.

    What it returns stands for the loss: a scalar whose gradient nobody reads.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, target: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.target, ctx.group = target, group
        ctx.save_for_backward(value)
        dist.send(value, target, group=group)
        return value.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (value,) = ctx.saved_tensors
        received = torch.empty_like(value)
        dist.recv(received, ctx.target, group=ctx.group)
        return received, None, None


_receive: Callable[..., torch.Tensor] = _Receive.apply
_send: Callable[..., torch.Tensor] = _Send.apply


class CapturedStage(nn.Module):
    """A part of a model between two others; `source` and `target` are global ranks, None at the ends.

    `like` has the shape and type of what is received.
    """

    def __init__(
        self,
        body: nn.Module,
        group: dist.ProcessGroup,
        *,
        source: int | None,
        target: int | None,
        like: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.body = body
        self._group = group
        self._source, self._target = source, target
        self._like = like

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        """`x` is the batch on the first stage and is not looked at on others."""
        if self._source is not None:
            assert self._like is not None
            x = _receive(self._like, self._source, self._group)
        value: torch.Tensor = self.body(x)
        if self._target is not None:
            value = _send(value, self._target, self._group)
        return value


def pipelined(chunks: Sequence[IssuedStep], slots: Iterable[Slot], *, name: str) -> IssuedStep:
    """One rank's step: `chunks[c]` is a captured micro-batch of its model chunk c; `slots` say what runs when.

    Raises:
        JobError: if a slot names a chunk that there is not.
    """
    order = tuple(slots)
    beyond = [slot.chunk for slot in order if not 0 <= slot.chunk < len(chunks)]
    if beyond:
        raise JobError(f"the schedule names chunk {beyond[0]}, there are {len(chunks)}")
    micro_batches = sorted({slot.micro_batch for slot in order})
    ops: list[Op] = []
    waits: dict[str, tuple[str, ...]] = {}
    for slot in order:
        for op in chunks[slot.chunk].iteration.ops:
            if op.origin.phase is not Phase.OPTIMIZER and (op.origin.phase in BACKWARD_PHASES) != slot.forward:
                ops.append(_copied(op, slot))
                known = chunks[slot.chunk].waits.get(op.name, ())
                waits[ops[-1].name] = tuple(_name(wait, slot.micro_batch, slot.chunk) for wait in known)
    for number, chunk in enumerate(chunks):
        ops += _optimizer(chunk.iteration, number, micro_batches)
    issued: set[str] = set()
    for op in ops:  # a wait for what this order issues later is none of this schedule
        waits[op.name] = tuple(wait for wait in waits.get(op.name, ()) if wait in issued)
        issued.add(op.name)
    buffers = [buffer for number, chunk in enumerate(chunks) for buffer in _buffers(chunk, number, micro_batches)]
    groups: dict[str, tuple[int, ...]] = {}
    for chunk in chunks:
        groups |= chunk.groups
    return IssuedStep(
        iteration=Iteration(
            name, tuple(ops), True, tuple(buffers), sum(chunk.iteration.resident_bytes for chunk in chunks)
        ),
        num_ranks=chunks[0].num_ranks,
        groups=groups,
        waits={name: names for name, names in waits.items() if names},
        notes=("Receives do not wait for other stages; micro-batches' gradients are not added up.",),
    )


def _name(name: str, micro_batch: int, chunk: int) -> str:
    return f"mb{micro_batch}.c{chunk}.{name}"


def _copied(op: Op, slot: Slot) -> Op:
    shards = op.shards
    if shards is not None:
        inputs = [
            replace(use, source=_name(use.source, slot.micro_batch, slot.chunk)) if use.source else use
            for use in shards.inputs
        ]
        shards = replace(shards, inputs=tuple(inputs))
    return replace(
        op,
        name=_name(op.name, slot.micro_batch, slot.chunk),
        deps=tuple(_name(dep, slot.micro_batch, slot.chunk) for dep in op.deps),
        origin=replace(op.origin, microbatch=slot.micro_batch),
        shards=shards,
    )


def _optimizer(iteration: Iteration, chunk: int, micro_batches: Sequence[int]) -> list[Op]:
    """The optimizer's operators, once; they wait for the gradients of every micro-batch."""
    own = {op.name for op in iteration.ops if op.origin.phase is Phase.OPTIMIZER}

    def named(dep: str) -> list[str]:
        return [f"c{chunk}.{dep}"] if dep in own else [_name(dep, number, chunk) for number in micro_batches]

    return [
        replace(op, name=f"c{chunk}.{op.name}", deps=tuple(name for dep in op.deps for name in named(dep)), shards=None)
        for op in iteration.ops
        if op.name in own
    ]


def _buffers(capture: IssuedStep, chunk: int, micro_batches: Sequence[int]) -> list[Buffer]:
    """A micro-batch's memory, once per micro-batch; what the optimizer reads (gradients) is one for all of them."""
    phases: Mapping[str, Phase | None] = {op.name: op.origin.phase for op in capture.iteration.ops}
    kept = []
    for buffer in capture.iteration.buffers:
        if phases[buffer.maker] is Phase.OPTIMIZER:
            users = tuple(f"c{chunk}.{user}" for user in buffer.users)
            kept.append(replace(buffer, name=f"c{chunk}.{buffer.name}", maker=f"c{chunk}.{buffer.maker}", users=users))
            continue
        shared = [user for user in buffer.users if phases[user] is Phase.OPTIMIZER]
        for number in micro_batches[: 1 if shared else None]:
            users = tuple(f"c{chunk}.{user}" if user in shared else _name(user, number, chunk) for user in buffer.users)
            kept.append(
                replace(
                    buffer,
                    name=_name(buffer.name, number, chunk),
                    maker=_name(buffer.maker, number, chunk),
                    users=users,
                )
            )
    return kept
