"""Units gathered before their use and reduced after their backward, without copies: DeepSpeed ZeRO, FSDP1, programs.

Stage 3 gathers in both passes and frees, stages 1 and 2 gather once per step: their parameters were updated at the end
of the step before. Unit k + `prefetch` is gathered when unit k begins. A program that no framework issues says each
gather just before its use and waits for nothing else.
"""

from collections.abc import Sequence

from lagom_overlap.workload.ops import Phase
from lagom_overlap.workload.step.issue import StepCollectives
from lagom_overlap.workload.step.parameter_units import ParamUnit, Weight
from lagom_overlap.workload.streams import COMPUTE


class Layerwise:
    """Parameters and gradients travel by unit; `order` are all units of the step in the order of their forward."""

    def __init__(self, comms: StepCollectives, order: Sequence[ParamUnit], *, prefetch: int) -> None:
        self._comms, self._graph = comms, comms.graph
        self._order, self._prefetch = [unit for unit in order if not unit.is_root], prefetch
        self._places = {unit.key: place for place, unit in enumerate(self._order)}
        self._stage = comms.shape.layout.zero_stage
        self._ready: dict[str, str] = {}
        self._last = comms.num_batches - 1

    def begin(self, batch: int) -> None:
        """Nothing is gathered before the first unit begins."""

    def before(self, units: Sequence[ParamUnit], phase: Phase, batch: int) -> None:
        """A layer or a table begins."""
        waits = self._comms.rules.waits_for_use
        is_held = units[-1].key in self._ready
        for unit in units:
            self._gather(unit, phase, batch)
        if waits and not (units[-1].is_root and is_held and phase is Phase.FORWARD):
            self._ahead(units[-1], phase, batch)
        ready = {unit.key: self._ready[unit.key] for unit in units if self._ready.get(unit.key)}
        if waits:
            self._graph.hold_back(COMPUTE, ready.values())
        self._comms.whole(units, phase, batch, ready)

    def _ahead(self, unit: ParamUnit, phase: Phase, batch: int) -> None:
        backward = phase is Phase.BACKWARD
        ends = len(self._order) if backward else -1
        place = ends if unit.is_root else self._places[unit.key]
        for step in range(1, self._prefetch + 1):
            other = place - step if backward else place + step
            if 0 <= other < len(self._order):
                self._gather(self._order[other], phase, batch)

    def _gather(self, unit: ParamUnit, phase: Phase, batch: int) -> None:
        if unit.key in self._ready or self._comms.shards(unit) == 1:
            return
        if phase is Phase.BACKWARD and unit.module == "embed":  # a lookup's backward reads no table
            return
        if self._comms.rules.waits_for_use:
            self._graph.clock.wait_stream(self._comms.rules.gather_stream, COMPUTE)
        gathered = self._ready[unit.key] = self._comms.gather(unit, phase, batch)
        self._graph.gathered(gathered)

    def after_forward(self, units: Sequence[ParamUnit]) -> None:
        """Stage 3 frees what is not used again at once: all but the last unit, where backward begins."""
        if self._stage == 3:
            for unit in units:
                if unit is not self._order[-1] and not unit.is_root:
                    self._ready.pop(unit.key, None)

    def listens(self, batch: int) -> bool:
        """Gradients travel when the unit's backward has ended."""
        return False

    def gradient(self, unit: ParamUnit, weight: Weight, batch: int) -> None:
        """Gradients travel when the unit's backward has ended."""

    def after_backward(self, units: Sequence[ParamUnit], batch: int) -> None:
        """A layer's backward has ended: its gradients travel, and stage 3 frees its parameters."""
        comms = self._comms
        last = batch == self._last
        for unit in units:
            if self._stage == 3:
                self._ready.pop(unit.key, None)
            each = self._stage >= (2 if comms.rules.reduces_shards_at_once else 3)
            if not last and not each:
                continue
            if comms.rules.waits_for_use:
                self._graph.clock.wait_stream(comms.rules.reduce_stream, COMPUTE)
            reduced = comms.scatter_unit(unit, unit.gradients, batch)
            if last:
                reduced = comms.sum_unit(unit, reduced, batch)
            comms.reduced.setdefault(unit.key, []).extend(reduced)

    def after_chunk(self, units: Sequence[ParamUnit], batch: int) -> None:
        """All has been issued with its layer."""

    def end(self) -> None:
        """The optimizer waits for the reductions."""
        if self._comms.rules.waits_for_use:
            self._graph.clock.wait_stream(COMPUTE, self._comms.rules.reduce_stream)

    def updated(self, unit: ParamUnit) -> tuple[int, tuple[str, ...]]:
        """A share of the parameters."""
        return -(-unit.num_params // self._comms.shards(unit)), tuple(self._comms.reduced[unit.key])
