"""What a simulated step is made of: slots of micro-batches, computation, launch gaps, communicators, the optimizer.

A communicator's time is exposed while the stream of computations stands still for it: until it ends, or one that waits
for it. One that runs meanwhile and keeps nobody waiting is not. What computations take beyond their time alone is
shared out over what overlaps them, by how long it does. Copies into a gather's buffer, which have a stream of their
own, count with the communicator that they serve.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from lagom_overlap.sim.framework import FrameworkModel
from lagom_overlap.workload import CommOp, Iteration, Op, Phase
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.step.groups import PIPELINE, SHARDS
from lagom_overlap.workload.streams import COMPUTE

_FORWARD = (Phase.FORWARD, Phase.LOSS)
_OF_EMBEDDING: Final = ("head.embed", "head.positions")
_TOTAL: Final = 0
_EXPOSED: Final = 1
_STRETCHED: Final = 2


@dataclass(frozen=True, slots=True)
class CommTimes:
    """Seconds of a communicator: running, computations standing still for it, and what it stretched computation by."""

    total_s: float = 0.0
    exposed_s: float = 0.0
    stretched_s: float = 0.0

    def __add__(self, other: "CommTimes") -> "CommTimes":
        return CommTimes(
            self.total_s + other.total_s, self.exposed_s + other.exposed_s, self.stretched_s + other.stretched_s
        )

    def __mul__(self, factor: float) -> "CommTimes":
        return CommTimes(self.total_s * factor, self.exposed_s * factor, self.stretched_s * factor)


@dataclass(slots=True)
class _Batch:
    """One micro-batch's computation, launch gaps and communicators; the optimizer's communication goes to the last.

    `comms` are the parts of `CommTimes` by communicator.
    """

    compute_s: float = 0.0
    host_s: float = 0.0
    comms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts of a step that was built with `num_built` micro-batches; slots by chunk, of the one that repeats."""

    num_built: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: float
    batches: tuple[_Batch, ...]

    def _weights(self, num: int) -> list[int]:
        """How often each built micro-batch counts in `num` of them: the one that repeats is second of three."""
        weights = [1] * self.num_built
        weights[min(1, self.num_built - 1)] += num - self.num_built
        return weights

    def over_batches(self, num: int, name: str) -> float:
        """A sum over `num` micro-batches."""
        return float(sum(w * getattr(batch, name) for w, batch in zip(self._weights(num), self.batches, strict=True)))

    def comms(self, num: int) -> dict[str, CommTimes]:
        """Every communicator's time over `num` micro-batches."""
        found: dict[str, CommTimes] = {}
        for weight, batch in zip(self._weights(num), self.batches, strict=True):
            for name, times in batch.comms.items():
                found[name] = found.get(name, CommTimes()) + CommTimes(*times) * weight
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A built step with when its operators ran: start, end and launch gap (s, by name) of each, in issue order.

    `waits` are the framework's waits beyond the operators' `deps`, by name.
    """

    iteration: Iteration
    waits: Mapping[str, Sequence[str]]
    starts_s: Sequence[float]
    ends_s: Sequence[float]
    host_s: Mapping[str, float]

    @property
    def makespan_s(self) -> float:
        """From the first start, which is 0, to the last end."""
        return max(self.ends_s)

    def rows(self) -> Iterable[tuple[Op, float, float]]:
        """Operators with start and end (s)."""
        return zip(self.iteration.ops, self.starts_s, self.ends_s, strict=True)


def parts_of(step: SimulatedStep, price: FrameworkModel, layout: ParallelLayout) -> StepParts:
    """The parts of a simulated step."""
    num_built = 1 + max(op.origin.microbatch for op in step.iteration.ops)
    batches = tuple(_Batch() for _ in range(num_built))
    others = sorted([row for row in step.rows() if row[0].stream != COMPUTE], key=itemgetter(1))
    optimizer_s = _computations(step, others, price, batches)
    _communicators(step, others, batches)
    forward_s, backward_s = _slots(step, layout, num_built)
    return StepParts(
        num_built=num_built, forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s, batches=batches
    )


def _batch_of(op: Op, batches: tuple[_Batch, ...]) -> _Batch:
    return batches[-1] if op.origin.phase is Phase.OPTIMIZER else batches[op.origin.microbatch]


def _computations(
    step: SimulatedStep,
    others: Sequence[tuple[Op, float, float]],
    price: FrameworkModel,
    batches: tuple[_Batch, ...],
) -> float:
    """Adds computation, launch gaps and what others, by start, stretch it by; the optimizer's seconds."""
    active: list[tuple[Op, float, float]] = []  # others that run while a computation does, which come one by one
    coming, optimizer_s = 0, 0.0
    for op, start_s, end_s in step.rows():
        if op.stream != COMPUTE or isinstance(op, CommOp):
            continue
        lasted_s = end_s - start_s
        if op.origin.phase is Phase.OPTIMIZER:
            optimizer_s += lasted_s
            continue
        batch, alone_s, gap_s = batches[op.origin.microbatch], price.alone_s(op), step.host_s.get(op.name, 0.0)
        batch.compute_s += alone_s
        batch.host_s += gap_s
        active = [row for row in active if row[2] > start_s]
        while coming < len(others) and others[coming][1] < end_s:
            active.append(others[coming])
            coming += 1
        shares: dict[str, float] = {}
        for other, begin_s, until_s in active:
            both_s = min(end_s, until_s) - max(start_s, begin_s)
            if both_s > 0:
                name = _served(other)
                shares[name] = shares.get(name, 0.0) + both_s
        whole_s = sum(shares.values())
        for name, share_s in shares.items():
            batch.comms[name][_STRETCHED] += (lasted_s - alone_s - gap_s) * share_s / whole_s
    return optimizer_s


def _served(op: Op) -> str:
    return op.communicator if isinstance(op, CommOp) else SHARDS


def _communicators(step: SimulatedStep, others: Sequence[tuple[Op, float, float]], batches: tuple[_Batch, ...]) -> None:
    """Adds what communicators take, and for how long the stream of computations stands still for them."""
    for op, start_s, end_s in others:
        if isinstance(op, CommOp):
            _batch_of(op, batches).comms[op.communicator][_TOTAL] += end_s - start_s
    waits = _Waits(step)
    until_s = 0.0  # the end of what has computed so far
    for number, (op, start_s, end_s) in enumerate(step.rows()):
        if op.stream == COMPUTE:
            if start_s > until_s:
                waits.charge(waits.latest(number), until_s, start_s, batches)
            until_s = max(until_s, end_s)
    end_s = step.makespan_s
    if end_s > until_s:
        waits.charge(step.ends_s.index(end_s), until_s, end_s, batches)


class _Waits:
    """Whom the operators of a step wait for, and to whom time is charged in which computations wait.

    A computation starts when the last operator that it waits for ends. The time before is that operator's, as far back
    as it ran; before it started it waited itself, for one queued before it or for a copy, whose the time before is.
    What else runs meanwhile keeps nobody waiting.
    """

    def __init__(self, step: SimulatedStep) -> None:
        self._step, self._place = step, {op.name: number for number, op in enumerate(step.iteration.ops)}
        self._before: list[int | None] = []
        last: dict[str, int] = {}
        for number, op in enumerate(step.iteration.ops):
            self._before.append(last.get(op.stream))
            last[op.stream] = number

    def latest(self, number: int) -> int | None:
        """Of those that an operator waits for, the one that ends last."""
        op, before = self._step.iteration.ops[number], self._before[number]
        named = (*op.deps, *self._step.waits.get(op.name, ()))
        found = [self._place[name] for name in named] + ([] if before is None else [before])
        return max(found, key=self._step.ends_s.__getitem__, default=None)

    def charge(self, number: int | None, from_s: float, to_s: float, batches: tuple[_Batch, ...]) -> None:
        """Shares out the time between, which ends with the end of operator `number`."""
        while number is not None and to_s > from_s:
            op, ends_s = self._step.iteration.ops[number], self._step.ends_s[number]
            begins_s = max(from_s, self._step.starts_s[number])
            if op.stream != COMPUTE:
                _batch_of(op, batches).comms[_served(op)][_EXPOSED] += max(0.0, min(to_s, ends_s) - begins_s)
            number, to_s = self.latest(number), begins_s


def _slots(step: SimulatedStep, layout: ParallelLayout, num_built: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of the forward and the backward of each chunk, of the micro-batch that repeats.

    A slot lasts from the end of the one before to its last computation's, or to its transfer's where the stage waits.
    """
    chunk_of = _chunks(step.iteration, layout.chunks)
    ends: dict[tuple[int, bool, int], float] = {}
    begin, batch, forward, chunk = None, 0, True, 0
    for op, start_s, end_s in step.rows():
        sends = isinstance(op, CommOp) and op.communicator == PIPELINE
        if op.origin.phase is Phase.OPTIMIZER or (op.stream != COMPUTE and (not sends or layout.overlap_p2p)):
            continue
        if op.origin.microbatch != batch:
            batch, chunk, forward = op.origin.microbatch, 0, True
        is_forward = op.origin.phase in _FORWARD
        if op.origin.layer is not None and not sends:
            chunk = chunk_of[op.origin.layer]
        elif _is_of_head(op):  # its chunk may have no layers
            chunk = layout.chunks - 1
        forward = is_forward
        begin = start_s if begin is None else begin
        ends[batch, forward, chunk] = max(ends.get((batch, forward, chunk), 0.0), end_s)
    times: dict[tuple[int, bool, int], float] = {}
    before = begin or 0.0
    for key, end in ends.items():
        times[key] = end - before
        before = end
    steady = min(1, max(0, num_built - 2))
    forward_s = tuple(times[steady, True, chunk] for chunk in range(layout.chunks))
    return forward_s, tuple(times[steady, False, chunk] for chunk in range(layout.chunks))


def _is_of_head(op: Op) -> bool:
    module = op.origin.module
    return op.origin.layer is None and module.startswith("head.") and not module.startswith(_OF_EMBEDDING)


def _chunks(iteration: Iteration, num_chunks: int) -> dict[int, int]:
    """The chunk of each layer: those of one follow each other, between two are the other stages'."""
    found: dict[int, int] = {}
    for layer in sorted({op.origin.layer for op in iteration.ops if op.origin.layer is not None}):
        found[layer] = 0 if num_chunks == 1 or not found else found.get(layer - 1, max(found.values()) + 1)
    return found
