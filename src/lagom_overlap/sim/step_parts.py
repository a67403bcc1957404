"""What a simulated step is made of: slots of micro-batches, computation, launch gaps, communicators, the optimizer.

A communicator's time is exposed while the stream of computations stands still for it: until it ends, or one that waits
for it. One that runs meanwhile and keeps nobody waiting is not. What computations take beyond their time alone is
shared out over what overlaps them, by how long it does. Copies into a gather's buffer, which have a stream of their
own, count with the communicator that they serve.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.sim.columns import Columns
from lagom_overlap.sim.framework import FrameworkModel
from lagom_overlap.workload import CommOp, Op, Phase
from lagom_overlap.workload.ops import FORWARD_PHASES
from lagom_overlap.workload.step.rank_groups import PIPELINE, SHARDS
from lagom_overlap.workload.streams import COMPUTE

Seconds = NDArray[np.float64]
Numbers = NDArray[np.intp]

_OF_EMBEDDING: Final = ("head.embed", "head.positions")
_TOTAL: Final = 0
"""A column of a communicator's times: in all..."""
_EXPOSED: Final = 1
"""...exposed..."""
_STRETCHED: Final = 2
"""...and what its collectives stretch of computations."""


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
    """The parts of a step that was built with `num_built` micro-batches; slots by chunk, of the one that repeats.

    `first_forward_s` are those of the first micro-batch, from the step's begin. `forward_sends_s` and
    `backward_sends_s` are what of a slot comes behind its last computation: a transfer that the stage waits for.
    """

    num_built: int
    first_forward_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_sends_s: tuple[float, ...]
    backward_sends_s: tuple[float, ...]
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
        by_name: dict[str, CommTimes] = {}
        for weight, batch in zip(self._weights(num), self.batches, strict=True):
            for name, times in batch.comms.items():
                by_name[name] = by_name.get(name, CommTimes()) + CommTimes(*times) * weight
        return by_name


class StepWaits:
    """Of each operator how many it waits for, and how far before it each of them was issued, as negative distances."""

    def __init__(self, numbers: Sequence[int], distances: Sequence[int]) -> None:
        self._firsts, self._distances = list(accumulate(numbers, initial=0)), distances

    def of(self, number: int) -> list[int]:
        """Whom an operator waits for: what it reads, what its stream was held back for, the one before it there."""
        first, end = self._firsts[number : number + 2]
        return [number + distance for distance in self._distances[first:end]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A step in columns with when its operators ran: start, end and launch gap (s) of each, in issue order."""

    columns: Columns
    waits: StepWaits
    starts_s: Seconds
    ends_s: Seconds
    host_s: Seconds

    @property
    def makespan_s(self) -> float:
        """From the first start, which is 0, to the last end."""
        return float(self.ends_s.max())

    @property
    def repeats(self) -> int:
        """The micro-batch that stands for all but the first and the last; with fewer than three the first."""
        return min(1, max(0, int(self.columns.batches.max()) - 1))

    def op(self, number: int) -> Op:
        """The operator of that place in issue order."""
        operator: Op = self.columns.distinct[int(self.columns.of[number])]
        return operator

    def lasted_s(self, number: int) -> float:
        """From its start to its end."""
        return float(self.ends_s[number] - self.starts_s[number])


def parts_of(step: SimulatedStep, price: FrameworkModel, chunks: int, *, waits_for_sends: bool) -> StepParts:
    """The parts of a simulated step of that many model chunks. Sums are made in the order of issue."""
    columns = step.columns
    num_built = 1 + int(columns.batches.max())
    updates = columns.flags(lambda op: op.origin.phase is Phase.OPTIMIZER)
    on_stream = columns.flags(lambda op: op.stream == COMPUTE)
    computes = on_stream & ~columns.flags(_is_comm)
    lasted_s = step.ends_s - step.starts_s
    comps, optimizer = np.flatnonzero(computes & ~updates), np.flatnonzero(computes & updates)
    others = np.flatnonzero(~on_stream)
    others = others[np.argsort(step.starts_s[others], kind="stable")]
    alone_s = columns.values(lambda op: 0.0 if isinstance(op, CommOp) else price.alone_s(op))
    stretch_s = lasted_s - alone_s - step.host_s
    batch_of = columns.batches[comps]
    batches = tuple(
        _Batch(*sums)
        for sums in zip(
            np.bincount(batch_of, alone_s[comps], num_built).tolist(),
            np.bincount(batch_of, step.host_s[comps], num_built).tolist(),
            strict=True,
        )
    )
    for batch, name, seconds in _stretched(step, comps, others, stretch_s):
        batches[batch].comms[name][_STRETCHED] += seconds
    _communicators(step, np.flatnonzero(on_stream), others, batches)
    slots = _slots(step, chunks, num_built, on_stream & ~updates, waits_for_sends=waits_for_sends)
    return StepParts(
        num_built=num_built,
        first_forward_s=slots.first_forward_s,
        forward_s=slots.steady_s[:chunks],
        backward_s=slots.steady_s[chunks:],
        forward_sends_s=slots.sends_s[:chunks],
        backward_sends_s=slots.sends_s[chunks:],
        optimizer_s=sum(lasted_s[optimizer].tolist()),
        batches=batches,
    )


def _is_comm(op: Op) -> bool:
    return isinstance(op, CommOp)


def _served(op: Op) -> str:
    return op.communicator if isinstance(op, CommOp) else SHARDS


def _stretched(
    step: SimulatedStep, comps: Numbers, others: Numbers, stretch_s: Seconds
) -> Iterator[tuple[int, str, float]]:
    """What each computation was stretched by, shared out over those that ran next to it: micro-batch, name, seconds."""
    starts_s, ends_s = step.starts_s[comps], step.ends_s[comps]
    names = list(dict.fromkeys(map(_served, step.columns.distinct)))
    served = step.columns.numbers(lambda op: names.index(_served(op)))[others]
    # One after the other on their stream: what runs next to an operator follows each other.
    first = np.searchsorted(ends_s, step.starts_s[others], side="right")
    num = np.maximum(0, np.searchsorted(starts_s, step.ends_s[others]) - first)
    pairs = np.repeat(np.arange(len(others)), num)
    comp = np.arange(len(pairs)) + np.repeat(first - (np.cumsum(num) - num), num)
    both_s = np.minimum(ends_s[comp], step.ends_s[others][pairs])
    both_s -= np.maximum(starts_s[comp], step.starts_s[others][pairs])
    keys, at, which = np.unique(comp * len(names) + served[pairs], return_index=True, return_inverse=True)
    share_s = np.bincount(which, both_s, len(keys))
    order = np.lexsort((at, keys // len(names)))  # by computation, then as their first one comes
    comp, name, share_s = keys[order] // len(names), keys[order] % len(names), share_s[order]
    whole_s = np.bincount(comp, share_s, len(comps))[comp]
    seconds = stretch_s[comps][comp] * share_s / whole_s
    of = step.columns.batches[comps][comp] * len(names) + name
    sums = np.bincount(of, seconds)
    for key in np.unique(of).tolist():
        yield key // len(names), names[key % len(names)], float(sums[key])


def _communicators(step: SimulatedStep, stream: Numbers, others: Numbers, batches: tuple[_Batch, ...]) -> None:
    """Adds what communicators take, and for how long the stream of computations stands still for them."""
    for number in others.tolist():
        op = step.op(number)
        if isinstance(op, CommOp):
            _batch_of(step, number, batches).comms[op.communicator][_TOTAL] += step.lasted_s(number)
    until_s = np.maximum.accumulate(np.concatenate(([0.0], step.ends_s[stream])))
    for at in np.flatnonzero(step.starts_s[stream] > until_s[:-1]).tolist():
        number = int(stream[at])
        _charge(step, _latest(step, number), float(until_s[at]), float(step.starts_s[number]), batches)
    if step.makespan_s > until_s[-1]:
        _charge(step, int(step.ends_s.argmax()), float(until_s[-1]), step.makespan_s, batches)


def _batch_of(step: SimulatedStep, number: int, batches: tuple[_Batch, ...]) -> _Batch:
    return batches[-1 if step.op(number).origin.phase is Phase.OPTIMIZER else step.columns.batches[number]]


def _latest(step: SimulatedStep, number: int) -> int | None:
    """Of those that an operator waits for, the one that ends last."""
    return max(step.waits.of(number), key=step.ends_s.__getitem__, default=None)


def _charge(step: SimulatedStep, number: int | None, from_s: float, to_s: float, batches: tuple[_Batch, ...]) -> None:
    """Shares out time in which computations wait, and which ends with the end of operator `number`.

    A computation starts when the last operator that it waits for ends. The time before is that operator's, as far back
    as it ran; before it started it waited itself, for one queued before it or for a copy, whose the time before is.
    What else runs meanwhile keeps nobody waiting.
    """
    while number is not None and to_s > from_s:
        op, begins_s = step.op(number), max(from_s, float(step.starts_s[number]))
        if op.stream != COMPUTE:
            waited_s = max(0.0, min(to_s, float(step.ends_s[number])) - begins_s)
            _batch_of(step, number, batches).comms[_served(op)][_EXPOSED] += waited_s
        number, to_s = _latest(step, number), begins_s


class _Slots(NamedTuple):
    """Seconds of each chunk's first forward, and of its forward and backward of the micro-batch that repeats.

    `sends_s` is what of the latter comes behind the last computation.
    """

    first_forward_s: tuple[float, ...]
    steady_s: tuple[float, ...]
    sends_s: tuple[float, ...]


def _slots(
    step: SimulatedStep, chunks: int, num_built: int, computes: NDArray[np.bool_], *, waits_for_sends: bool
) -> _Slots:
    """A slot lasts from the end of the one before to its last computation's, or its transfer's if the stage waits."""
    columns = step.columns
    sends = columns.flags(lambda op: isinstance(op, CommOp) and op.communicator == PIPELINE)
    counted = np.flatnonzero(computes | sends if waits_for_sends else computes)
    batch_of, layers = columns.batches[counted], columns.layers[counted]
    # An operator's chunk is that of its layer, of the head the last one, else that of the operator before it.
    chunk = np.full(len(counted), -1)
    chunk[np.flatnonzero(np.diff(batch_of, prepend=-1))] = 0
    in_layer = (layers >= 0) & ~sends[counted]
    of_layer, heads = _chunks(columns.layers, chunks), columns.flags(_is_of_head)[counted] & (layers < 0)
    chunk[in_layer] = of_layer[layers[in_layer]]
    if not heads.any() and of_layer.max() < chunks - 1:  # the embedding's chunk has no layers
        chunk[in_layer] += 1
        chunk[columns.flags(_is_of_embedding)[counted] & (layers < 0)] = 0
    chunk[heads] = chunks - 1  # nor need the head's
    chunk = chunk[np.maximum.accumulate(np.where(chunk >= 0, np.arange(len(chunk)), 0))]
    is_backward = ~columns.flags(lambda op: op.origin.phase in FORWARD_PHASES)[counted]
    keys = (2 * batch_of + is_backward) * chunks + chunk
    ends_s, computed_s = np.zeros((2, 2 * num_built * chunks))
    np.maximum.at(ends_s, keys, step.ends_s[counted])
    np.maximum.at(computed_s, keys[~sends[counted]], step.ends_s[counted][~sends[counted]])
    order = list(dict.fromkeys(keys.tolist()))
    begins_s = dict(zip(order, [float(step.starts_s[counted[0]]), *ends_s[order].tolist()], strict=False))
    first = [float(ends_s[key]) - (begins_s[key] if key != order[0] else 0.0) for key in range(chunks)]
    # The backward of an embedding that is alone in its chunk, and frozen, has no operator.
    steady_keys = range(2 * step.repeats * chunks, 2 * (step.repeats + 1) * chunks)
    times = [float(ends_s[key]) - begins_s[key] if key in begins_s else 0.0 for key in steady_keys]
    sent = [float(ends_s[key] - max(computed_s[key], begins_s.get(key, 0.0))) for key in steady_keys]
    return _Slots(tuple(first), tuple(times), tuple(sent))


def _is_of_head(op: Op) -> bool:
    module = op.origin.module
    return module.startswith("head.") and not module.startswith(_OF_EMBEDDING)


def _is_of_embedding(op: Op) -> bool:
    return op.origin.module.startswith(_OF_EMBEDDING)


def _chunks(layers: Numbers, num_chunks: int) -> Numbers:
    """The chunk of each layer: those of one follow each other, between two are the other stages'; the last is -1."""
    numbers = np.unique(layers[layers >= 0])
    chunk_of = np.full(numbers.max(initial=-1) + 2, -1)
    chunk_of[numbers] = np.cumsum(np.diff(numbers, prepend=numbers[:1]) > 1) if num_chunks > 1 else 0
    return chunk_of
