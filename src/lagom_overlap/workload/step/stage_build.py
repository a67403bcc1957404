"""One pipeline stage's step as it is issued: micro-batch after micro-batch through its chunks, the framework around."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.ops import MemoryBound, Origin, Phase
from lagom_overlap.workload.parallel.memory import OPTIMIZER_BYTES
from lagom_overlap.workload.parallel.stage import chunk_layers
from lagom_overlap.workload.step.buckets import Buckets
from lagom_overlap.workload.step.fsdp2 import Fsdp2Issuer
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.issue import IssueHooks, StepCollectives
from lagom_overlap.workload.step.layerwise import Layerwise
from lagom_overlap.workload.step.model_chunk import Chunk
from lagom_overlap.workload.step.model_ends import TableOps
from lagom_overlap.workload.step.mtp import MtpOps
from lagom_overlap.workload.step.operators import StepOps, StepShape
from lagom_overlap.workload.step.parameter_units import ParamUnit, Weight
from lagom_overlap.workload.step.rank_groups import PIPELINE, SHARDS, TENSOR, TIED
from lagom_overlap.workload.step.rolled import Scope
from lagom_overlap.workload.step.rules import IssueRules, Sharding
from lagom_overlap.workload.step.tape import GRADIENT, INPUT, LayerTape, LayerTapes, LayerUse, Part, outside_of
from lagom_overlap.workload.streams import COMPUTE

_NORM_BYTES: Final = 4
"""Of the traffic per gradient of clipping: FP32 read once for its norm."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A chunk's operators of one micro-batch, between its forward and its backward; of its layers what they read."""

    tables: TableOps
    inputs: dict[int, str]
    mtp: list[MtpOps]


class StageBuild:
    """Runs the hooks of a framework around a stage's operators."""

    def __init__(
        self,
        shape: StepShape,
        rules: IssueRules,
        tapes: LayerTapes,
        *,
        rank: int,
        num_batches: int,
    ) -> None:
        self.shape, self._rules, self._rank, self._num_batches = shape, rules, rank, num_batches
        layout = shape.layout
        self._tapes, self.graph = tapes, StepGraph(tapes.works)
        layers = chunk_layers(shape.model, layout)
        places = [chunk * layout.pipeline + rank for chunk in range(layout.chunks)]
        self.chunks = [Chunk(shape, place, layers[place]) for place in places]
        self.units = [unit for chunk in self.chunks for unit in chunk.in_order()]
        self.comms = StepCollectives(self.graph, shape, rules, num_batches)
        self._issuer = self._issuer_of()

    def _issuer_of(self) -> IssueHooks:
        layout, sharding = self.shape.layout, self._rules.sharding
        if sharding is Sharding.FSDP2:
            return Fsdp2Issuer(self.comms, self.units)
        if sharding is Sharding.BUCKETS and layout.zero_stage <= 1:
            return Buckets(self.comms, self.units)
        return Layerwise(self.comms, self.units, prefetch=layout.prefetch)

    def run(self, *, clips: bool) -> None:
        """Issues the whole step."""
        for batch in range(self._num_batches):
            self._issuer.begin(batch)
            ops = [self._forward(chunk, batch) for chunk in self.chunks]
            for chunk, ops_of_chunk in zip(reversed(self.chunks), reversed(ops), strict=True):
                self._backward(chunk, batch, ops_of_chunk)
        if self.shape.layout.frozen:
            return
        self._issuer.end()
        self._sum_tied()
        reduced = tuple(name for unit in self.units for name in self._issuer.updated(unit)[1])
        if clips:
            reduced = self._clip(reduced)
        for unit in self.units:
            self._update(unit, reduced if clips else ())

    def _announce(self, ops: StepOps, units: Sequence[ParamUnit], batch: int) -> None:
        """Has the framework told of each weight's gradient."""
        unit_of = {weight.name: unit for unit in units for weight in unit.weights}

        def on_gradient(weight: Weight, gradient: str) -> None:
            self._issuer.gradient(unit_of[weight.name], weight, batch)

        ops.on_gradient = on_gradient

    def _forward(self, chunk: Chunk, batch: int) -> _Made:
        tables = TableOps(self.graph, self.shape, layer=None, batch=batch, weights=chunk.shared)
        tables.silent = chunk.silent(None)
        self._announce(tables, chunk.tables, batch)
        x = ""
        if chunk.is_first:
            self._issuer.before(chunk.of_embed(), Phase.FORWARD, batch)
            x = tables.embed()
            self._issuer.after_forward(chunk.of_embed())
        inputs: dict[int, str] = {}
        for layer in chunk.own_layers:
            x = self._layer_forward(chunk, layer, batch, inputs, x)
        mtp = self._mtp_forward(chunk, batch, inputs, x)
        if chunk.is_last:
            self._issuer.before(chunk.of_head(), Phase.FORWARD, batch)
            x = tables.head(x)
            self._issuer.after_forward(chunk.of_head())
        else:
            sent = [x, *(ops.made["norm"] for ops in mtp)]
            self._send(f"mb{batch}.chunk{chunk.place}.send", sent, Phase.FORWARD, batch, self._num_states(chunk.place))
        return _Made(tables, inputs, mtp)

    def _num_states(self, place: int) -> int:
        """Hidden states that leave a chunk: the model's, and behind the predictions' chunk one of each of them."""
        return 1 + self.shape.model.mtp_layers * (place >= self.shape.layout.mtp_chunk)

    def _layer_forward(self, chunk: Chunk, layer: int, batch: int, inputs: dict[int, str], x: str) -> str:
        units = chunk.units[layer]
        self._issuer.before(units, Phase.FORWARD, batch)
        inputs[layer] = x
        tape = self._tape(chunk, layer, batch)
        scope = self._play(tape.forward, chunk, layer, batch, {INPUT: x})
        self._issuer.after_forward(units)
        return scope.name_of(tape.output)

    def _layer_backward(self, chunk: Chunk, layer: int, batch: int, x: str, gradient: str) -> str:
        units, weights = chunk.units[layer], chunk.weights[layer]
        self._issuer.before(units, Phase.BACKWARD, batch)
        tape = self._tape(chunk, layer, batch)
        scope = self._play((*tape.recompute, *tape.backward), chunk, layer, batch, {INPUT: x, GRADIENT: gradient})
        for name, partial in tape.partial.items():
            weights[name].partial = [scope.name_of(partial)]
        self._after(units, batch)
        return scope.name_of(tape.input_gradient)

    def _tape(self, chunk: Chunk, layer: int, batch: int) -> LayerTape:
        return self._tapes.of(
            LayerUse(
                kind=chunk.kinds[layer],
                layer=layer,
                batch=batch,
                weights=chunk.weights[layer],
                units=chunk.units[layer],
                silent=chunk.silent_in(layer),
                cuts=self._issuer.listens(batch),
            )
        )

    def _play(self, parts: Sequence[Part], chunk: Chunk, layer: int, batch: int, outside: dict[str, str]) -> Scope:
        """Issues what was recorded of a layer, and announces gradients where they are ready."""
        weights = chunk.weights[layer]
        unit_of = {weight.name: unit for unit in chunk.units[layer] for weight in unit.weights}
        scope = Scope(
            layer=layer,
            batch=batch,
            prefix=f"mb{batch}.layer{layer}.",
            earlier=f"mb{batch - 1}.layer{layer}.",
            module=f"layers.{layer}.",
            outside=outside | outside_of(chunk.units[layer], batch),
        )
        for part in parts:
            self.graph.repeat(part.segment, scope)
            for name, gradient in part.gradients:
                weight = weights[name]
                weight.partial = []
                weight.gradients.append(scope.name_of(gradient))
                if self._issuer.listens(batch):
                    self._issuer.gradient(unit_of[name], weight, batch)
        return scope

    def _mtp_forward(self, chunk: Chunk, batch: int, inputs: dict[int, str], x: str) -> list[MtpOps]:
        """Predictions come before the model's own head; each reads the hidden state of the one before."""
        heads: list[MtpOps] = []
        for depth, numbers in enumerate(chunk.mtp_layers):
            unit = chunk.mtp_units[depth]
            weights = chunk.shared | {weight.name: weight for weight in unit.weights}
            ops = MtpOps(self.graph, self.shape, depth=depth, layer=numbers[0], batch=batch, weights=weights)
            ops.silent = chunk.silent(depth)
            self._announce(ops, [unit, *chunk.tables], batch)
            self._issuer.before([unit], Phase.FORWARD, batch)
            x = ops.enter(x)
            for layer in numbers:
                x = self._layer_forward(chunk, layer, batch, inputs, x)
            if chunk.is_last:
                ops.head(x)
            else:
                ops.norm(x)
            heads.append(ops)
        return heads or self._mtp_heads(chunk, batch)

    def _mtp_heads(self, chunk: Chunk, batch: int) -> list[MtpOps]:
        """The losses of predictions whose layers an earlier chunk has: their hidden states come with the model's."""
        heads, model = [], self.shape.model
        for depth in range(chunk.num_heads - 1):
            layer = model.num_layers + depth * len(model.mtp_kinds)
            ops = MtpOps(self.graph, self.shape, depth=depth, layer=layer, batch=batch, weights=chunk.shared)
            ops.silent = chunk.silent(depth)
            self._announce(ops, chunk.tables, batch)
            ops.logits("")
            heads.append(ops)
        return heads

    def _mtp_backward(self, chunk: Chunk, batch: int, made: _Made, gradient: str) -> str:
        """The gradient of the model's last layer's output: its own head's, and what the first prediction adds."""
        inner = ""
        for depth in reversed(range(len(chunk.mtp_layers))):
            ops, unit = made.mtp[depth], chunk.mtp_units[depth]
            self._issuer.before([unit], Phase.BACKWARD, batch)
            own = ops.head_backward(ops.loss_backward()) if chunk.is_last else ops.norm_backward("")
            if inner:
                own = ops.summed("output_sum_d", inner, own)
            for layer in reversed(chunk.mtp_layers[depth]):
                own = self._layer_backward(chunk, layer, batch, made.inputs[layer], own)
            inner = ops.enter_backward(own)
            self._after([unit], batch)
        return made.mtp[0].summed("input_sum_d", inner, gradient) if inner else gradient

    def _backward(self, chunk: Chunk, batch: int, made: _Made) -> None:
        gradient, tables = "", made.tables
        if chunk.is_last:
            loss_d = tables.loss_backward()
            self._issuer.before(chunk.of_head(), Phase.BACKWARD, batch)
            gradient = tables.head_backward(loss_d)
            self._after([unit for unit in chunk.of_head() if unit not in chunk.of_embed()], batch)
        arriving: list[str] = []
        if chunk.mtp_layers:
            gradient = self._mtp_backward(chunk, batch, made, gradient)
        else:
            arriving = [ops.logits_backward(ops.loss_backward()) for ops in reversed(made.mtp)]
        for layer in reversed(chunk.own_layers):
            gradient = self._layer_backward(chunk, layer, batch, made.inputs[layer], gradient)
        if chunk.is_first:
            own = [unit for unit in chunk.of_embed() if not unit.is_root]
            if own:
                self._issuer.before(own, Phase.BACKWARD, batch)
            tables.embed_backward(gradient)
            self._after(chunk.of_embed(), batch)
        else:
            sent = [gradient, *arriving]
            states = self._num_states(chunk.place - 1)
            self._send(f"mb{batch}.chunk{chunk.place}.send_d", sent, Phase.BACKWARD, batch, states)
        self._issuer.after_chunk(chunk.in_order(), batch)

    def _after(self, units: Sequence[ParamUnit], batch: int) -> None:
        if units:
            self._issuer.after_backward(units, batch)

    def _send(self, name: str, sources: Sequence[str], phase: Phase, batch: int, num_states: int) -> None:
        """A transfer of hidden states to the neighbour; the stage waits for it unless transfers overlap."""
        layout = self.shape.layout
        num_bytes = num_states * self.shape.tokens * self.shape.model.hidden * self.shape.element_bytes
        if layout.sequence_parallel or layout.scatter_gather:
            num_bytes //= layout.tensor
        self.graph.comm(
            name,
            self.shape.groups.collective(CollectiveKind.SEND_RECV, num_bytes, PIPELINE),
            PIPELINE,
            origin=Origin(phase=phase, microbatch=batch, module="pipeline"),
            deps=sources,
        )
        if not (layout.overlap_p2p or self._rules.queues_transfers(layout)):
            self.graph.hold_back(COMPUTE, [name])

    def _sum_tied(self) -> None:
        """Two stages hold the same table, tied or that of multi-token prediction: gradients are added."""
        model, layout = self.shape.model, self.shape.layout
        if not (model.tied_embeddings or model.mtp_layers) or layout.pipeline == 1:
            return
        tables = [unit for chunk in self.chunks for unit in chunk.tables]
        for unit in tables if model.tied_embeddings else [unit for unit in tables if unit.module == "embed"]:
            num_bytes = model.vocab * model.hidden // layout.tensor * self.shape.precision.reduction.num_bytes
            summed = self.graph.comm(
                f"{unit.key}.tied_reduce",
                self.shape.groups.collective(CollectiveKind.ALL_REDUCE, num_bytes, TIED),
                TIED,
                origin=Origin(phase=Phase.OPTIMIZER, module=unit.module),
                deps=self._issuer.updated(unit)[1],
            )
            self.graph.hold_back(COMPUTE, [summed])
            self.comms.reduced[unit.key] = [summed]

    def _clip(self, reduced: tuple[str, ...]) -> tuple[str, ...]:
        """The norm of all gradients, its sum over the ranks that share them, and the scaling of all."""
        share, origin = (
            sum(self._issuer.updated(unit)[0] for unit in self.units),
            Origin(phase=Phase.OPTIMIZER, module="clip"),
        )
        norm = self.graph.comp("clip.norm", MemoryBound(_NORM_BYTES * share), origin, reduced)
        groups = self.shape.groups
        group = SHARDS if self.shape.layout.zero_stage and groups.size(SHARDS) > 1 else TENSOR
        if groups.size(group) > 1:
            call = groups.collective(CollectiveKind.ALL_REDUCE, 4, group)
            norm = self.graph.comm("clip.reduce", call, group, origin=origin, deps=(norm,))
            self.graph.hold_back(COMPUTE, [norm])
        work = MemoryBound((self._rules.clip_bytes - _NORM_BYTES) * share)
        return (self.graph.comp("clip.scale", work, origin, (norm,)),)

    def _update(self, unit: ParamUnit, clipped: tuple[str, ...]) -> None:
        share, reduced = self._issuer.updated(unit)
        origin = Origin(phase=Phase.OPTIMIZER, layer=unit.layer, module=unit.module)
        work = MemoryBound(max(1, self._rules.optimizer_bytes * share))
        self.graph.comp(f"{unit.key}.update", work, origin, (*reduced, *clipped))

    def resident_bytes(self) -> int:
        """Parameters, gradients and optimizer state that stay on the rank."""
        stage, precision = self.shape.layout.zero_stage, self.shape.precision
        shards_gradients = stage >= 2 and not self._rules.stays_whole(self.shape.layout)
        total = 0
        for unit in self.units:
            share = -(-unit.num_params // self.comms.shards(unit))
            if self._rules.sharding is not Sharding.FSDP2:  # there the FP32 copy is the parameter
                total += precision.parameter.num_bytes * (share if stage == 3 else unit.num_params)
            if not self.shape.layout.frozen:
                total += precision.reduction.num_bytes * (share if shards_gradients else unit.num_params)
                total += OPTIMIZER_BYTES * share
        return total
