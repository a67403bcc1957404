"""What a simulated step is made of: slots of micro-batches, computation, launch gaps, communicators, the optimizer.

A communicator's time is exposed while it runs and the stream of computations does not; what computations take beyond
their time alone is shared out over what overlaps them, by how long it does. Copies into a gather's buffer, which
have a stream of their own, count with the communicator that they serve.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from lagom_overlap.sim.framework import FrameworkModel
from lagom_overlap.workload import CommOp, Op, Phase
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.step.groups import PIPELINE, SHARDS
from lagom_overlap.workload.step.rolled import RolledStep
from lagom_overlap.workload.streams import COMPUTE

_FORWARD = (Phase.FORWARD, Phase.LOSS)
_OF_EMBEDDING: Final = ("head.embed", "head.positions")
_TOTAL: Final = 0
_EXPOSED: Final = 1
_STRETCHED: Final = 2


@dataclass(frozen=True, slots=True)
class CommTimes:
    """Seconds of a communicator: running, running while nothing computed, and what it stretched computation by."""

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
    """A step with when its operators ran: start, end and launch gap (s) of each, in issue order."""

    step: RolledStep
    starts_s: Sequence[float]
    ends_s: Sequence[float]
    host_s: Sequence[float]

    @property
    def makespan_s(self) -> float:
        """From the first start, which is 0, to the last end."""
        return max(self.ends_s)

    def rows(self) -> Iterator[tuple[Op, int, int | None, float, float]]:
        """Operators with micro-batch, layer, start and end (s)."""
        return zip(self.step.ops, self.step.batches, self.step.layers, self.starts_s, self.ends_s, strict=True)


@dataclass(frozen=True, slots=True)
class _Other:
    """An operator next to the stream of computations: what it serves, where it counts, when it ran (s)."""

    served: str
    batch: _Batch
    start_s: float
    end_s: float
    is_comm: bool


def parts_of(step: SimulatedStep, price: FrameworkModel, layout: ParallelLayout) -> StepParts:
    """The parts of a simulated step."""
    num_built = 1 + max(step.step.batches)
    batches = tuple(_Batch() for _ in range(num_built))
    others = [
        _Other(
            op.communicator if isinstance(op, CommOp) else SHARDS,
            batches[-1 if op.origin.phase is Phase.OPTIMIZER else batch],
            start_s,
            end_s,
            isinstance(op, CommOp),
        )
        for op, batch, _, start_s, end_s in step.rows()
        if op.stream != COMPUTE
    ]
    others.sort(key=attrgetter("start_s"))
    optimizer_s = _computations(step, others, price, batches)
    _communicators(step, others)
    forward_s, backward_s = _slots(step, layout, num_built)
    return StepParts(
        num_built=num_built, forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s, batches=batches
    )


def _computations(
    step: SimulatedStep, others: Sequence[_Other], price: FrameworkModel, batches: tuple[_Batch, ...]
) -> float:
    """Adds computation, launch gaps and what others, by start, stretch it by; the optimizer's seconds."""
    active: list[_Other] = []  # others that run while a computation does, which come one by one
    coming, optimizer_s = 0, 0.0
    for (op, place, _, start_s, end_s), gap_s in zip(step.rows(), step.host_s, strict=True):
        if op.stream != COMPUTE or isinstance(op, CommOp):
            continue
        lasted_s = end_s - start_s
        if op.origin.phase is Phase.OPTIMIZER:
            optimizer_s += lasted_s
            continue
        batch, alone_s = batches[place], price.alone_s(op)
        batch.compute_s += alone_s
        batch.host_s += gap_s
        if active:
            active = [other for other in active if other.end_s > start_s]
        while coming < len(others) and others[coming].start_s < end_s:
            active.append(others[coming])
            coming += 1
        if not active:
            continue
        shares: dict[str, float] = {}
        for other in active:
            both_s = min(end_s, other.end_s) - max(start_s, other.start_s)
            if both_s > 0:
                shares[other.served] = shares.get(other.served, 0.0) + both_s
        whole_s = sum(shares.values())
        for name, share_s in shares.items():
            batch.comms[name][_STRETCHED] += (lasted_s - alone_s - gap_s) * share_s / whole_s
    return optimizer_s


def _communicators(step: SimulatedStep, others: Sequence[_Other]) -> None:
    """Adds what communicators, by start, take, and what of it nothing hides."""
    idle, until = [], 0.0
    for op, _, _, start_s, end_s in step.rows():
        if op.stream == COMPUTE:
            if start_s > until:
                idle.append((until, start_s))
            until = max(until, end_s)
    idle.append((until, float("inf")))
    covered = 0.0  # what several hide at once counts once
    place = 0
    for other in others:
        exposed_s, start_s, end_s = 0.0, other.start_s, other.end_s
        while place and idle[place][0] > start_s:
            place -= 1
        while idle[place][1] <= start_s:
            place += 1
        at = place
        while at < len(idle) and idle[at][0] < end_s:
            begin, end = max(idle[at][0], start_s, covered), min(idle[at][1], end_s)
            exposed_s += max(0.0, end - begin)
            at += 1
        covered = max(covered, end_s)
        times = other.batch.comms[other.served]
        times[_TOTAL] += end_s - start_s if other.is_comm else 0.0
        times[_EXPOSED] += exposed_s


def _slots(step: SimulatedStep, layout: ParallelLayout, num_built: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of the forward and the backward of each chunk, of the micro-batch that repeats.

    A slot lasts from the end of the one before to its last computation's, or to its transfer's where the stage waits.
    """
    chunk_of = _chunks(step.step.layers, layout.chunks)
    ends: dict[tuple[int, bool, int], float] = {}
    begin, batch, chunk = None, 0, 0
    for op, of_batch, layer, start_s, end_s in step.rows():
        sends = isinstance(op, CommOp) and op.communicator == PIPELINE
        if op.origin.phase is Phase.OPTIMIZER or (op.stream != COMPUTE and (not sends or layout.overlap_p2p)):
            continue
        if of_batch != batch:
            batch, chunk = of_batch, 0
        if layer is not None and not sends:
            chunk = chunk_of[layer]
        elif _is_of_head(op, layer):  # its chunk may have no layers
            chunk = layout.chunks - 1
        begin = start_s if begin is None else begin
        key = batch, op.origin.phase in _FORWARD, chunk
        ends[key] = max(ends.get(key, 0.0), end_s)
    times: dict[tuple[int, bool, int], float] = {}
    before = begin or 0.0
    for key, end in ends.items():
        times[key] = end - before
        before = end
    steady = min(1, max(0, num_built - 2))
    forward_s = tuple(times[steady, True, chunk] for chunk in range(layout.chunks))
    return forward_s, tuple(times[steady, False, chunk] for chunk in range(layout.chunks))


def _is_of_head(op: Op, layer: int | None) -> bool:
    module = op.origin.module
    return layer is None and module.startswith("head.") and not module.startswith(_OF_EMBEDDING)


def _chunks(layers: Sequence[int | None], num_chunks: int) -> dict[int, int]:
    """The chunk of each layer: those of one follow each other, between two are the other stages'."""
    found: dict[int, int] = {}
    for layer in sorted({layer for layer in layers if layer is not None}):
        found[layer] = 0 if num_chunks == 1 or not found else found.get(layer - 1, max(found.values()) + 1)
    return found
