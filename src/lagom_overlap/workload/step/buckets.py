"""Gradients reduced in buckets during the last backward: DDP, Megatron-LM with or without its distributed optimizer.

A bucket closes when the gradients in it reach its size, in the order in which they are ready (DDP rebuilds its buckets
so after the first step; Megatron's are cut from the end of the buffer). Without overlap there is one bucket, reduced
after the last backward. ZeRO 1 scatters instead of reducing and gathers parameters before the next forward, with
nothing with it, or in forward's order behind it (`overlap_parameters`: Megatron-Core's `start_param_sync`); ZeRO 2
and 3 are not Megatron's: they are issued layerwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.ops import Phase
from lagom_overlap.workload.step.issue import StepCollectives
from lagom_overlap.workload.step.parameter_units import ParamUnit, Weight
from lagom_overlap.workload.step.rank_groups import EXPERT_REPLICAS, REPLICAS
from lagom_overlap.workload.streams import COMPUTE


@dataclass(slots=True)
class _Bucket:
    """Gradients that wait for their bucket to close: how many, what made them, whose."""

    num_elements: int = 0
    made: list[str] = field(default_factory=list)
    units: list[ParamUnit] = field(default_factory=list)


class Buckets:
    """Replicated parameters; `order` are all units of the step in the order of their forward."""

    def __init__(self, comms: StepCollectives, order: Sequence[ParamUnit]) -> None:
        self._comms, self._graph, self._order = comms, comms.graph, list(order)
        layout, rules = comms.shape.layout, comms.rules
        self._overlaps, self._size = layout.overlap_gradients, layout.bucket_bytes
        # DDP has a smaller first bucket where `bucket_cap_mb` is not given (`nn/parallel/distributed.py`, 2.13).
        is_default = layout.bucket_bytes == rules.bucket_bytes
        self._first = (rules.first_bucket_bytes if is_default else None) or layout.bucket_bytes
        self._open: dict[str, _Bucket] = {}
        self._num_closed: dict[str, int] = {}
        self._issued: list[tuple[str, str, int, list[ParamUnit]]] = []
        self._ready: dict[str, str] = {}

    def begin(self, batch: int) -> None:
        """With a sharded optimizer parameters are gathered first; computations wait for all of them, or for theirs."""
        if batch:
            return
        for unit in self._order:
            if self._comms.shards(unit) > 1:
                gathered = self._comms.gather(unit, Phase.FORWARD, 0)
                self._graph.gathered(gathered)
                self._ready[unit.key] = gathered
        if not self._comms.shape.layout.overlap_parameters:
            self._graph.hold_back(COMPUTE, self._ready.values())

    def before(self, units: Sequence[ParamUnit], phase: Phase, batch: int) -> None:
        """Parameters are whole."""
        self._comms.whole(units, phase, batch, self._ready)

    def after_forward(self, units: Sequence[ParamUnit]) -> None:
        """They stay so."""

    def listens(self, batch: int) -> bool:
        """Buckets fill in the last micro-batch."""
        return batch == self._comms.num_batches - 1

    def gradient(self, unit: ParamUnit, weight: Weight, batch: int) -> None:
        """A gradient goes to the bucket of its ranks; the last matrix of a unit takes its small parameters along."""
        comms = self._comms
        group = EXPERT_REPLICAS if unit.is_expert and comms.shape.groups.expert > 1 else REPLICAS
        if comms.shards(unit) > 1:
            group = comms.group(unit)
        if batch < comms.num_batches - 1:
            return
        if comms.shape.groups.size(group) == 1:
            comms.reduced.setdefault(unit.key, []).append(weight.gradients[-1])
            return
        bucket = self._open.setdefault(group, _Bucket())
        done = sum(1 for other in unit.weights if len(other.gradients) == comms.num_batches)
        small = unit.num_params - sum(other.num_params for other in unit.weights) if done == len(unit.weights) else 0
        bucket.num_elements += max(0, weight.num_params + small)
        bucket.made.append(weight.gradients[-1])
        if unit not in bucket.units:
            bucket.units.append(unit)
        limit = self._size if self._num_closed.get(group) else self._first
        if self._overlaps and bucket.num_elements * comms.shape.precision.reduction.num_bytes >= limit:
            self._close(group, batch)

    def after_backward(self, units: Sequence[ParamUnit], batch: int) -> None:
        """Buckets close by their size alone."""

    def after_chunk(self, units: Sequence[ParamUnit], batch: int) -> None:
        """Buckets close by their size alone."""

    def _close(self, group: str, batch: int) -> None:
        comms, bucket = self._comms, self._open.pop(group)
        number = self._num_closed[group] = self._num_closed.get(group, 0) + 1
        key = f"{group}.bucket{number - 1}"
        moved = bucket.num_elements * comms.shape.precision.reduction.num_bytes
        gradients = tuple(bucket.made)
        if comms.rules.copies_buckets:
            origin = comms.origin(bucket.units[0], Phase.BACKWARD, batch, "bucket_copy_in")
            gradients = (comms.copy(f"mb{batch}.{key}.copy_in", 2 * moved, origin, gradients),)
        scatters = comms.shards(bucket.units[0]) > 1
        kind = CollectiveKind.REDUCE_SCATTER if scatters else CollectiveKind.ALL_REDUCE
        self._graph.clock.wait_stream(comms.rules.reduce_stream, COMPUTE)
        reduced = comms.reduce(bucket.units, kind, group, bucket.num_elements, batch=batch, deps=gradients, key=key)
        if comms.rules.waits_for_buckets:
            self._graph.hold_back(COMPUTE, [reduced])
        self._issued.append((key, reduced, moved, bucket.units))

    def end(self) -> None:
        """What is left is reduced, computations wait for all of it, and copied buckets are copied out."""
        batch = self._comms.num_batches - 1
        for group in list(self._open):
            self._close(group, batch)
        self._graph.hold_back(COMPUTE, [reduced for _, reduced, _, _ in self._issued])
        for key, reduced, moved, units in self._issued:
            gradient = reduced
            if self._comms.rules.copies_buckets:
                origin = self._comms.origin(units[0], Phase.BACKWARD, batch, "bucket_copy_out")
                gradient = self._comms.copy(f"mb{batch}.{key}.copy_out", 2 * moved, origin, (reduced,))
            for unit in units:
                self._comms.reduced.setdefault(unit.key, []).append(gradient)

    def updated(self, unit: ParamUnit) -> tuple[int, tuple[str, ...]]:
        """All parameters, or a share of them."""
        return -(-unit.num_params // self._comms.shards(unit)), tuple(dict.fromkeys(self._comms.reduced[unit.key]))
