"""What a framework adds around the operators of a step: gathers, reductions, copies, and what waits for them."""

from collections.abc import Sequence
from typing import Final, Protocol

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.fsdp2.hooks import reduce_communicator
from lagom_overlap.workload.ops import Origin, Phase
from lagom_overlap.workload.sharding import ShardSpec
from lagom_overlap.workload.step.axes import moved_axes
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.operators import StepShape, memory_bound
from lagom_overlap.workload.step.parameter_units import ParamUnit, Unit, Weight
from lagom_overlap.workload.step.rank_groups import EXPERT_REPLICAS, REPLICAS, SHARDS
from lagom_overlap.workload.step.rules import IssueRules
from lagom_overlap.workload.streams import COMPUTE

_NAMES: Final = {
    CollectiveKind.ALL_GATHER: "gather",
    CollectiveKind.REDUCE_SCATTER: "scatter",
    CollectiveKind.ALL_REDUCE: "reduce",
}


class IssueHooks(Protocol):
    """A framework's hooks around the units of a step, called in the order in which the host runs them."""

    def begin(self, batch: int) -> None:
        """A micro-batch begins."""

    def before(self, units: Sequence[ParamUnit], phase: Phase, batch: int) -> None:
        """A layer or a table is about to run; afterwards `Weight.gathered` names what brings its parameters."""

    def after_forward(self, units: Sequence[ParamUnit]) -> None:
        """The forward of a layer or a table has been issued."""

    def listens(self, batch: int) -> bool:
        """Whether it is told of gradients in a micro-batch, and may issue something then."""

    def gradient(self, unit: ParamUnit, weight: Weight, batch: int) -> None:
        """A matrix's gradient has been issued."""

    def after_backward(self, units: Sequence[ParamUnit], batch: int) -> None:
        """The backward of a layer or a table has been issued."""

    def after_chunk(self, units: Sequence[ParamUnit], batch: int) -> None:
        """The backward of a model chunk has been issued, `units` in the order of its forward."""

    def end(self) -> None:
        """The last backward has been issued."""

    def updated(self, unit: ParamUnit) -> tuple[int, tuple[str, ...]]:
        """How many of the unit's parameters this rank updates, and what made their gradients."""


class StepCollectives:
    """Names and sizes of the collectives of parameters and gradients."""

    def __init__(self, graph: StepGraph, shape: StepShape, rules: IssueRules, num_batches: int) -> None:
        self.graph, self.shape, self.rules, self.num_batches = graph, shape, rules, num_batches
        self.reduced: dict[str, list[str]] = {}

    def group(self, unit: ParamUnit) -> str:
        """Over which ranks a unit's parameters are shared out."""
        return EXPERT_REPLICAS if unit.is_expert and self.shape.groups.expert > 1 else SHARDS

    def shards(self, unit: ParamUnit) -> int:
        """In how many shares its parameters and optimizer state lie; 1: whole."""
        if not self.shape.layout.zero_stage:
            return 1
        return self.shape.groups.size(self.group(unit))

    def origin(self, unit: ParamUnit, phase: Phase, batch: int, what: str) -> Origin:
        """Where an operator of a unit belongs."""
        return Origin(phase=phase, layer=unit.layer, microbatch=batch, module=f"{unit.module}.{what}")

    def _name(self, key: str, batch: int, what: str) -> str:
        return f"mb{batch}.{key}{'_' if self.shape.unit is Unit.MATRIX else '.'}{what}"

    def gather(self, unit: ParamUnit, phase: Phase, batch: int, deps: Sequence[str] = ()) -> str:
        """The gather of a unit's parameters."""
        backward = phase is Phase.BACKWARD
        what = "gather_d" if backward else "gather"
        num_bytes = unit.num_params * self.shape.precision.parameter.num_bytes
        return self.graph.comm(
            self._name(unit.key, batch, what),
            self.shape.groups.collective(CollectiveKind.ALL_GATHER, num_bytes, self.group(unit)),
            self.group(unit),
            origin=self.origin(unit, phase, batch, what),
            deps=deps,
            stream=self.rules.gather_stream,
            shards=self._cuttable(unit, deps, gathers=True),
        )

    def reduce(
        self,
        units: Sequence[ParamUnit],
        kind: CollectiveKind,
        group: str,
        num_elements: int,
        *,
        batch: int,
        deps: Sequence[str],
        key: str | None = None,
        cut: int = 1,
        stream: str | None = None,
    ) -> str:
        """A reduction of `num_elements` gradients, of which a scatter has left one `cut`-th."""
        first, what = units[0], _NAMES[kind]
        is_apart = kind is CollectiveKind.REDUCE_SCATTER and self.shape.layout.separate_reduce_group
        num_bytes = num_elements // cut * self.shape.precision.reduction.num_bytes
        return self.graph.comm(
            self._name(key or first.key, batch, what),
            self.shape.groups.collective(kind, num_bytes, group),
            reduce_communicator(group) if is_apart else group,
            origin=self.origin(first, Phase.BACKWARD, batch, what),
            deps=deps,
            stream=self.rules.reduce_stream if stream is None else stream,
            shards=self._cuttable(first, deps, gathers=False, cut=cut) if len(units) == 1 else None,
        )

    def scatter_unit(self, unit: ParamUnit, deps: Sequence[str], batch: int) -> list[str]:
        """A unit's gradients are scattered over those who share it; the results, or `deps` where nobody shares."""
        if self.shards(unit) == 1:
            return list(deps)
        return [
            self.reduce(
                [unit], CollectiveKind.REDUCE_SCATTER, self.group(unit), unit.num_params, batch=batch, deps=deps
            )
        ]

    def sum_unit(self, unit: ParamUnit, deps: Sequence[str], batch: int) -> list[str]:
        """What a unit's scatter has left is summed over its replicas; the results, or `deps` where it has none."""
        cut, groups, stream = self.shards(unit), self.shape.groups, self.rules.sum_stream
        group = EXPERT_REPLICAS if unit.is_expert and groups.expert > 1 else REPLICAS
        if (group == self.group(unit) and cut > 1) or groups.size(group) == 1:
            return list(deps)
        if stream is not None:
            self.graph.clock.wait_stream(stream, self.rules.reduce_stream)
        return [
            self.reduce(
                [unit],
                CollectiveKind.ALL_REDUCE,
                group,
                unit.num_params,
                batch=batch,
                deps=deps,
                cut=cut,
                stream=stream,
            )
        ]

    def _cuttable(self, unit: ParamUnit, deps: Sequence[str], *, gathers: bool, cut: int = 1) -> ShardSpec | None:
        weight = unit.weights[0]
        if len(unit.weights) > 1 or unit.num_params != weight.num_params:
            return None
        if len(deps) > 1 or weight.num_matrices > 1:
            return None
        rows, columns = (weight.outputs, weight.inputs) if gathers else (weight.inputs, weight.outputs)
        share = cut if cut > 1 else self.shape.groups.shard
        return moved_axes(deps[0] if deps else "", max(1, rows // share), columns)

    def whole(self, units: Sequence[ParamUnit], phase: Phase, batch: int, ready: dict[str, str]) -> None:
        """Tells the matrices of units what brought them."""
        for unit in units:
            if unit.key in ready:
                for weight in unit.weights:
                    weight.gathered[phase, batch] = ready[unit.key]

    def copy(self, name: str, num_bytes: int, origin: Origin, deps: Sequence[str], stream: str = COMPUTE) -> str:
        """A copy of memory."""
        return self.graph.comp(name, memory_bound(max(1, num_bytes)), origin, deps, stream=stream)
