"""The operators that FSDP2's hooks issue (PyTorch 2.13, `_fsdp_collectives.py`); when, says `workload.fsdp2.hooks`.

`unshard`: cast and copy the shard in on the copy-in stream, gather on the gather stream. `wait_for_unshard`: copy out
on the stream of computations. `post_backward`: copy in, reduce on its own stream. The layout's `forward_prefetch`,
`backward_prefetch`, `kept_units`, `reduce_buffers` and `separate_reduce_group` are calls of `FSDPModule`; a list of one
in forward issues the same gathers earlier.

In a pipeline (`torch/distributed/pipelining/stage.py`, `backward_maybe_with_nosync`, `perform_reduce_grad`) backwards
leave parameters whole and add whole gradients in the reductions' precision; behind a chunk's last backward its units
are reduced one after the other.

Departures: experts' units follow their layer's, as modules of their own would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.workload.fsdp2.hooks import (
    BACKWARD_PREFETCH,
    FORWARD_PREFETCH,
    GATHER_STREAMS,
    GatherHooks,
    awaited_reduction,
    prefetched,
)
from lagom_overlap.workload.ops import Phase
from lagom_overlap.workload.step.issue import StepCollectives
from lagom_overlap.workload.step.parameter_units import ParamUnit, Weight
from lagom_overlap.workload.streams import ALL_GATHER, ALL_GATHER_COPY_IN, ALL_REDUCE, COMPUTE, REDUCE_SCATTER

_STORED_BYTES: Final = 4
"""Sharded parameters and their gradients are kept in FP32."""


@dataclass(frozen=True, slots=True)
class _Gathering:
    """A unit's parameters in one phase of a micro-batch."""

    unit: ParamUnit
    phase: Phase
    batch: int

    @property
    def parameters(self) -> str:
        return self.unit.key

    @property
    def is_forward(self) -> bool:
        return self.phase is not Phase.BACKWARD


class Fsdp2Issuer:
    """Fully sharded units; `order` are all units of the step in the order of their forward."""

    def __init__(self, comms: StepCollectives, order: Sequence[ParamUnit]) -> None:
        self._comms, self._graph, self._layout = comms, comms.graph, comms.shape.layout
        self._order = [unit for unit in order if not unit.is_root]
        self._places = {unit.key: place for place, unit in enumerate(self._order)}
        self._told = [unit for unit in self._order if comms.shards(unit) > 1]
        kept = self._told[max(0, len(self._told) - self._layout.kept_units) :] if self._layout.kept_units else []
        self._kept = {unit.key for unit in kept}
        self._roots = [unit for unit in order if unit.is_root]
        self._pending: dict[str, str] = {}
        self._ready: dict[str, str] = {}
        self._hooks: GatherHooks[_Gathering] = GatherHooks(self)
        self._reductions: list[str] = []
        self._stays_whole = comms.rules.stays_whole(self._layout)
        self._sums: dict[str, tuple[str, ...]] = {}

    def begin(self, batch: int) -> None:
        """The root's pre-forward: its own parameters come first."""
        self._hooks.begin_forward(batch)
        for root in self._roots:
            self._unshard_and_wait(_Gathering(root, Phase.FORWARD, batch))

    def before(self, units: Sequence[ParamUnit], phase: Phase, batch: int) -> None:
        """A module's pre-forward or pre-backward hook."""
        if phase is Phase.BACKWARD:
            self._hooks.end_forward()
        for unit in units:
            if not unit.is_root:
                self._unshard_and_wait(_Gathering(unit, phase, batch))
        for unit in units[-1:] if phase is Phase.FORWARD else units:
            self._prefetch(unit, phase, batch)
        self._comms.whole(units, phase, batch, self._ready)

    def _prefetch(self, unit: ParamUnit, phase: Phase, batch: int) -> None:
        """What is unsharded after a unit's copy-out."""
        is_forward = phase is not Phase.BACKWARD
        count = self._layout.forward_prefetch if is_forward else self._layout.backward_prefetch
        if count and unit in self._told:  # the units in its list, of which kept ones have nothing to gather in backward
            place = self._told.index(unit)
            before = [other for other in self._told[:place] if other.key not in self._kept]
            units, place = (self._told, place) if is_forward else (before, len(before))
        else:
            count, units = FORWARD_PREFETCH if is_forward else BACKWARD_PREFETCH, self._order
            place = len(units) if unit.is_root else self._places[unit.key]
        for other in prefetched(units, place, count, is_forward=is_forward):
            self._hooks.unshard(_Gathering(other, phase, batch))

    def gather(self, gathering: _Gathering) -> None:
        """Casts the shard, copies it in and gathers; a unit that has no shards is whole."""
        unit, phase, batch = gathering.unit, gathering.phase, gathering.batch
        comms, shards = self._comms, self._comms.shards(unit)
        if shards == 1:
            self._ready[unit.key] = ""
            return
        tail = "_d" if phase is Phase.BACKWARD else ""
        share, wide = -(-unit.num_params // shards), comms.shape.precision.parameter.num_bytes
        deps: tuple[str, ...] = ()
        if wide != _STORED_BYTES:
            origin = comms.origin(unit, phase, batch, "cast")
            name, moved = f"mb{batch}.{unit.key}.cast{tail}", share * (_STORED_BYTES + wide)
            deps = (comms.copy(name, moved, origin, (), ALL_GATHER_COPY_IN),)
        origin = comms.origin(unit, phase, batch, "copy_in")
        copied = comms.copy(f"mb{batch}.{unit.key}.copy_in{tail}", 2 * share * wide, origin, deps, ALL_GATHER_COPY_IN)
        self._graph.clock.wait_stream(ALL_GATHER, ALL_GATHER_COPY_IN)
        gathered = comms.gather(unit, phase, batch, (copied,))
        self._graph.gathered(gathered)
        self._pending[unit.key] = gathered

    def wait_for_computations(self, batch: int) -> None:
        """The gather streams wait for all that was computed so far."""
        for stream in GATHER_STREAMS:
            self._graph.clock.wait_stream(stream, COMPUTE)

    def hold_back(self, name: str) -> None:
        """The gather streams wait for an operator."""
        for stream in GATHER_STREAMS:
            self._graph.hold_back(stream, [name])

    def _unshard_and_wait(self, gathering: _Gathering) -> None:
        self._hooks.unshard(gathering)
        unit, phase, batch = gathering.unit, gathering.phase, gathering.batch
        gathered = self._pending.pop(unit.key, None)
        if gathered is None:
            return
        comms = self._comms
        self._hooks.before_copy_out(gathering)
        self._graph.hold_back(COMPUTE, [gathered])
        moved = 2 * unit.num_params * comms.shape.precision.parameter.num_bytes
        name = f"mb{batch}.{unit.key}.copy_out{'' if gathering.is_forward else '_d'}"
        copied = comms.copy(name, moved, comms.origin(unit, phase, batch, "copy_out"), (gathered,))
        self._graph.gathered(copied)
        self._ready[unit.key] = copied
        self._hooks.after_copy_out(gathering, copied)

    def after_forward(self, units: Sequence[ParamUnit]) -> None:
        """A module's post-forward hook: all but the root's parameters are freed, and those that the user has kept."""
        for unit in units:
            if not unit.is_root and self._layout.zero_stage == 3 and unit.key not in self._kept:
                self._reshard(unit)

    def _reshard(self, unit: ParamUnit) -> None:
        self._ready.pop(unit.key, None)
        self._hooks.reshard(unit.key)

    def listens(self, batch: int) -> bool:
        """Gradients travel when the unit's backward has ended."""
        return False

    def gradient(self, unit: ParamUnit, weight: Weight, batch: int) -> None:
        """Gradients travel when the unit's backward has ended."""

    def after_backward(self, units: Sequence[ParamUnit], batch: int) -> None:
        """A module's post-backward hook."""
        for unit in reversed(units):
            if self._stays_whole:
                self._add(unit, batch)
            else:
                self._reshard(unit)
                self._reduce(unit, batch)

    def _add(self, unit: ParamUnit, batch: int) -> None:
        """Whole gradients of micro-batches are added; the first one is cast where it is reduced in another format."""
        comms, precision = self._comms, self._comms.shape.precision
        gradient_bytes, summed = precision.gradient.num_bytes, precision.reduction.num_bytes
        before = self._sums.get(unit.key, ())
        if not before and gradient_bytes == summed:
            self._sums[unit.key] = tuple(unit.gradients)
            return
        moved = gradient_bytes + 2 * summed if before else gradient_bytes + summed
        origin = comms.origin(unit, Phase.BACKWARD, batch, "accumulate")
        name = f"mb{batch}.{unit.key}.accumulate"
        self._sums[unit.key] = (comms.copy(name, unit.num_params * moved, origin, (*unit.gradients, *before)),)

    def after_chunk(self, units: Sequence[ParamUnit], batch: int) -> None:
        """A stage's `perform_reduce_grad`, behind the last backward."""
        if self._stays_whole and batch == self._comms.num_batches - 1:
            for unit in units:
                self._reshard(unit)
                self._reduce(unit, batch)

    def _reduce(self, unit: ParamUnit, batch: int) -> None:
        comms, precision = self._comms, self._comms.shape.precision
        earlier = awaited_reduction(self._reductions, len(self._reductions), self._layout.reduce_buffers)
        if earlier is not None:
            self._graph.hold_back(COMPUTE, [earlier])
        origin = comms.origin(unit, Phase.BACKWARD, batch, "reduce_copy_in")
        read = precision.reduction if self._stays_whole else precision.gradient
        moved = unit.num_params * (read.num_bytes + precision.reduction.num_bytes)
        made_by = self._sums.get(unit.key, unit.gradients)
        copied = comms.copy(f"mb{batch}.{unit.key}.reduce_copy_in", moved, origin, made_by)
        self._graph.clock.wait_stream(REDUCE_SCATTER, COMPUTE)
        scattered = comms.scatter_unit(unit, [copied], batch)
        self._reductions.append(scattered[0])
        reduced = comms.sum_unit(unit, scattered, batch)
        before = comms.reduced.get(unit.key, [])
        if before and reduced != [copied]:  # the sum over micro-batches
            share = -(-unit.num_params // comms.shards(unit))
            stream = REDUCE_SCATTER if reduced == scattered else ALL_REDUCE
            name = f"mb{batch}.{unit.key}.accumulate"
            origin = comms.origin(unit, Phase.BACKWARD, batch, "accumulate")
            reduced = [comms.copy(name, 3 * _STORED_BYTES * share, origin, (*reduced, *before), stream)]
        comms.reduced[unit.key] = reduced

    def end(self) -> None:
        """The root's final callback: computations wait for the last reduction."""
        for stream in (REDUCE_SCATTER, ALL_REDUCE):
            self._graph.clock.wait_stream(COMPUTE, stream)

    def updated(self, unit: ParamUnit) -> tuple[int, tuple[str, ...]]:
        """A share of the parameters."""
        return -(-unit.num_params // self._comms.shards(unit)), tuple(self._comms.reduced[unit.key])
