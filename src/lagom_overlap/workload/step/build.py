"""A training step of a named model on one rank, as its framework issues it.

The model's operators with every data dependence (`layer`), around which the framework's rules (`rules`) put gathers,
reductions and copies on the streams that it uses (`fsdp2`, `layerwise`, `buckets`); at the end gradients are clipped
where asked, and each unit's parameters are updated. One stage of a pipeline is built by the same function: micro-batch
after micro-batch through its chunks, each followed by the transfer to its neighbour; stages are run against each other
in `sim.pipeline`.

Departures: a tied table of a pipeline is summed between its stages after the reductions; norms' backward is one pass;
tokens are spread evenly over experts; there is no data loading.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import CommOp, MemoryBound, Op, Origin, Phase
from lagom_overlap.workload.parallel.layout import Dispatcher, ParallelLayout, check_model
from lagom_overlap.workload.parallel.memory import OPTIMIZER_BYTES
from lagom_overlap.workload.parallel.stage import chunk_layers
from lagom_overlap.workload.precision import Precision
from lagom_overlap.workload.step.buckets import Buckets
from lagom_overlap.workload.step.chunk import Chunk
from lagom_overlap.workload.step.fsdp2 import Fsdp2
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.groups import PIPELINE, SHARDS, TENSOR, TIED, StepGroups
from lagom_overlap.workload.step.issue import Issuer, StepCollectives
from lagom_overlap.workload.step.layerwise import Layerwise
from lagom_overlap.workload.step.mtp import MtpOps
from lagom_overlap.workload.step.operators import StepOps, StepShape
from lagom_overlap.workload.step.rolled import RolledStep, Scope
from lagom_overlap.workload.step.rules import PROGRAM_ORDER, IssueRules, Sharding
from lagom_overlap.workload.step.tables import TableOps
from lagom_overlap.workload.step.tape import GRADIENT, INPUT, LayerTape, LayerTapes, Part, outside_of
from lagom_overlap.workload.step.units import ParamUnit, Unit, Weight
from lagom_overlap.workload.streams import COMPUTE

_NORM_BYTES: Final = 4
"""Of the traffic per gradient of clipping: FP32 read once for its norm."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A chunk's operators of one micro-batch, between its forward and its backward; of its layers what they read."""

    tables: TableOps
    inputs: dict[int, str]
    mtp: list[MtpOps]


class _Build:
    """Runs the hooks of a framework around a stage's operators."""

    def __init__(
        self,
        shape: StepShape,
        rules: IssueRules,
        tapes: LayerTapes,
        *,
        rank: int,
        num_batches: int,
        explicit_prefetch: int | None,
    ) -> None:
        self.shape, self._rules, self._rank, self._num_batches = shape, rules, rank, num_batches
        layout = shape.layout
        self._tapes, self.graph = tapes, StepGraph(tapes.works)
        layers = chunk_layers(shape.model, layout)
        places = [chunk * layout.pipeline + rank for chunk in range(layout.chunks)]
        self.chunks = [Chunk(shape, place, layers[place]) for place in places]
        self.units = [unit for chunk in self.chunks for unit in chunk.in_order()]
        self.comms = StepCollectives(self.graph, shape, rules, num_batches)
        self._issuer = self._issuer_of(explicit_prefetch)

    def _issuer_of(self, explicit_prefetch: int | None) -> Issuer:
        layout, sharding = self.shape.layout, self._rules.sharding
        if sharding is Sharding.FSDP2:
            if layout.prefetch > 1:
                explicit_prefetch = layout.prefetch
            return Fsdp2(self.comms, self.units, explicit=explicit_prefetch)
        if sharding is Sharding.BUCKETS and layout.zero_stage <= 1:
            return Buckets(self.comms, self.units)
        return Layerwise(self.comms, self.units, prefetch=layout.prefetch)

    def run(self, *, clips: bool) -> None:
        for batch in range(self._num_batches):
            self._issuer.begin(batch)
            ops = [self._forward(chunk, batch) for chunk in self.chunks]
            for chunk, made in zip(reversed(self.chunks), reversed(ops), strict=True):
                self._backward(chunk, batch, made)
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

        def on_gradient(weight: Weight, made: str) -> None:
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
            self._send(f"mb{batch}.chunk{chunk.place}.send", x, Phase.FORWARD, batch)
        return _Made(tables, inputs, mtp)

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
        for name, made in tape.partial.items():
            weights[name].partial = [scope.name_of(made)]
        self._after(units, batch)
        return scope.name_of(tape.input_gradient)

    def _tape(self, chunk: Chunk, layer: int, batch: int) -> LayerTape:
        silent, cuts = chunk.silent_in(layer), self._issuer.listens(batch)
        return self._tapes.of(
            chunk.kinds[layer], layer, batch, chunk.weights[layer], chunk.units[layer], silent=silent, cuts=cuts
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
            for name, made in part.gradients:
                weight = weights[name]
                weight.partial = []
                weight.gradients.append(scope.name_of(made))
                if self._issuer.listens(batch):
                    self._issuer.gradient(unit_of[name], weight, batch)
        return scope

    def _mtp_forward(self, chunk: Chunk, batch: int, inputs: dict[int, str], x: str) -> list[MtpOps]:
        """Predictions come before the model's own head; each reads the hidden state of the one before."""
        made: list[MtpOps] = []
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
            ops.head(x)
            made.append(ops)
        return made

    def _mtp_backward(self, chunk: Chunk, batch: int, made: _Made, gradient: str) -> str:
        """The gradient of the model's last layer's output: its own head's, and what the first prediction adds."""
        inner = ""
        for depth in reversed(range(len(chunk.mtp_layers))):
            ops, unit = made.mtp[depth], chunk.mtp_units[depth]
            self._issuer.before([unit], Phase.BACKWARD, batch)
            own = ops.head_backward(ops.loss_backward())
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
            gradient = self._mtp_backward(chunk, batch, made, gradient)
        for layer in reversed(chunk.own_layers):
            gradient = self._layer_backward(chunk, layer, batch, made.inputs[layer], gradient)
        if chunk.is_first:
            own = [unit for unit in chunk.of_embed() if not unit.is_root]
            if own:
                self._issuer.before(own, Phase.BACKWARD, batch)
            tables.embed_backward(gradient)
            self._after(chunk.of_embed(), batch)
        else:
            self._send(f"mb{batch}.chunk{chunk.place}.send_d", gradient, Phase.BACKWARD, batch)

    def _after(self, units: Sequence[ParamUnit], batch: int) -> None:
        if units:
            self._issuer.after_backward(units, batch)

    def _send(self, name: str, source: str, phase: Phase, batch: int) -> None:
        """A transfer to the neighbour; the stage waits for it unless transfers overlap."""
        layout = self.shape.layout
        num_bytes = self.shape.tokens * self.shape.model.hidden * self.shape.element_bytes
        if layout.sequence_parallel or layout.scatter_gather:
            num_bytes //= layout.tensor
        self.graph.comm(
            name,
            self.shape.groups.collective(CollectiveKind.SEND_RECV, num_bytes, PIPELINE),
            PIPELINE,
            origin=Origin(phase=phase, microbatch=batch, module="pipeline"),
            deps=(source,),
        )
        if not layout.overlap_p2p:
            self.graph.hold_back(COMPUTE, [name])

    def _sum_tied(self) -> None:
        """First and last stage hold the same table, tied or that of multi-token prediction: gradients are added."""
        model, layout = self.shape.model, self.shape.layout
        if not (model.tied_embeddings or model.mtp_layers) or layout.pipeline == 1:
            return
        tables = [unit for chunk in self.chunks for unit in chunk.tables]
        for unit in tables if model.tied_embeddings else [unit for unit in tables if unit.module == "embed"]:
            num_bytes = model.vocab * model.hidden // layout.tensor * self.shape.precision.reduction.num_bytes
            made = self.graph.comm(
                f"{unit.key}.tied_reduce",
                self.shape.groups.collective(CollectiveKind.ALL_REDUCE, num_bytes, TIED),
                TIED,
                origin=Origin(phase=Phase.OPTIMIZER, module=unit.module),
                deps=self._issuer.updated(unit)[1],
            )
            self.graph.hold_back(COMPUTE, [made])
            self.comms.reduced[unit.key] = [made]

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
        total = 0
        for unit in self.units:
            share = -(-unit.num_params // self.comms.shards(unit))
            if self._rules.sharding is not Sharding.FSDP2:  # there the FP32 copy is the parameter
                total += precision.parameter.num_bytes * (share if stage == 3 else unit.num_params)
            total += precision.reduction.num_bytes * (share if stage >= 2 else unit.num_params)
            total += OPTIMIZER_BYTES * share
        return total


def _groups(layout: ParallelLayout) -> StepGroups:
    return StepGroups(
        tensor=layout.tensor,
        shard=layout.shard,
        replicas=layout.replicas // layout.shard,
        expert=layout.expert,
        pipeline=layout.pipeline,
        context=layout.context,
        expert_tensor=layout.expert_tensor,
    )


def _check(model: TransformerModel, layout: ParallelLayout, seq_len: int, rules: IssueRules) -> None:
    check_model(model, layout, seq_len)
    if rules.sharding is Sharding.FSDP2 and layout.replicas > 1 and layout.zero_stage < 2:
        raise JobError(f"parallel.zero_stage is {layout.zero_stage}: {rules.name} shards parameters, must be 2 or 3")
    if rules.sharding is Sharding.BUCKETS and layout.replicate > 1:
        raise JobError(
            f"parallel.replicate is {layout.replicate}, must be 1 with framework {rules.name}: hybrid sharding is "
            "modelled for FSDP and DeepSpeed"
        )
    if model.mtp_layers and (not rules.trains_mtp or layout.zero_stage > 1):
        raise JobError(
            f"model {model.name!r} has multi-token prediction, which is modelled for Megatron-LM with zero_stage 0 or "
            f"1, not for {rules.name} with {layout.zero_stage}: set model.mtp_layers = 0"
        )
    if not rules.mixture.fuses_moves and (layout.fused_experts or layout.dispatcher is Dispatcher.CAPACITY):
        key = "fused_experts" if layout.fused_experts else "dispatcher = capacity"
        raise JobError(f"parallel.{key} is modelled for Megatron-LM; the framework is {rules.name}")


class StepBuilder:
    """Builds steps of `model` under `layout`, as `rules` issue them; what stages have in common is recorded once.

    Of a precision, and of whether gradients are clipped, None is the framework's default.

    Raises:
        JobError: if the layout does not fit the model, or the framework does not shard so.
    """

    def __init__(
        self,
        model: TransformerModel,
        layout: ParallelLayout,
        *,
        seq_len: int,
        rules: IssueRules,
        precision: Precision | None = None,
        unit: Unit = Unit.LAYER,
        clips: bool | None = None,
    ) -> None:
        _check(model, layout, seq_len, rules)
        self._rules, self._clips = rules, rules.clips if clips is None else clips
        self._shape = StepShape(
            model=model,
            layout=layout,
            groups=_groups(layout),
            seq_len=seq_len,
            precision=precision or rules.precision,
            unit=unit,
            accumulation=rules.accumulation,
            traffic=rules.traffic,
            casts=rules.casts,
            hides_tensor=rules.hides_tensor,
            sequence_first=rules.sequence_first,
            mixture=rules.mixture,
            joint_products=rules.joint_products,
            casts_before_gathers=rules.casts_before_gathers,
            stops_recompute=rules.stops_recompute,
            ring=rules.ring,
        )
        self._tapes = LayerTapes(self._shape)

    def rolled(
        self, rank: int = 0, num_micro_batches: int | None = None, explicit_prefetch: int | None = None
    ) -> RolledStep:
        """One step on one rank of pipeline stage `rank`.

        `num_micro_batches` runs fewer or more than the layout's. `explicit_prefetch` names as many of FSDP2's units to
        prefetch by hand.
        """
        shape, layout = self._shape, self._shape.layout
        num = layout.num_micro_batches if num_micro_batches is None else num_micro_batches
        build = _Build(shape, self._rules, self._tapes, rank=rank, num_batches=num, explicit_prefetch=explicit_prefetch)
        build.run(clips=self._clips)
        used = dict.fromkeys(op.communicator for op in build.graph.ops if isinstance(op, CommOp))
        return build.graph.finish(
            step_name(shape.model, layout),
            num_ranks=layout.num_gpus,
            resident_bytes=build.resident_bytes(),
            groups={name: shape.groups.ranks(name) for name in used},
        )


def build_step(
    model: TransformerModel,
    layout: ParallelLayout,
    *,
    seq_len: int,
    rules: IssueRules,
    precision: Precision | None = None,
    rank: int = 0,
    num_micro_batches: int | None = None,
    unit: Unit = Unit.LAYER,
    clips: bool | None = None,
    explicit_prefetch: int | None = None,
) -> IssuedStep:
    """One whole step: arguments and errors are `StepBuilder`'s and its `rolled`'s."""
    builder = StepBuilder(model, layout, seq_len=seq_len, rules=rules, precision=precision, unit=unit, clips=clips)
    return builder.rolled(rank, num_micro_batches, explicit_prefetch).unrolled()


def program_step(
    model: TransformerModel,
    layout: ParallelLayout,
    *,
    seq_len: int,
    gpus_per_node: int,
    unit: Unit = Unit.LAYER,
    precision: Precision | None = None,
) -> Iteration:
    """The step as a program says it, before any framework issues it: what the planners' papers begin with.

    Raises:
        JobError: as `build_step`, or if the layout has a pipeline.
    """
    if layout.pipeline > 1:
        raise JobError(f"step: parallel.pipeline is {layout.pipeline}, must be 1: a program is one rank's whole step")
    if layout.overlap_experts:
        raise JobError("step: parallel.overlap_experts is true, must be false: a program says what reads what")
    built = build_step(model, layout, seq_len=seq_len, rules=PROGRAM_ORDER, unit=unit, precision=precision)
    placed = built.on_nodes_of(gpus_per_node).iteration
    return replace(placed, ops=tuple(_on_stated_nodes(op, gpus_per_node) for op in placed.ops))


def _on_stated_nodes(op: Op, gpus_per_node: int) -> Op:
    """Planners that take a group apart by nodes need their number said, also of consecutive ranks."""
    if not isinstance(op, CommOp) or op.collective.num_nodes is not None:
        return op
    nodes = -(-op.collective.num_ranks // gpus_per_node)
    if op.collective.num_ranks % nodes:
        return op
    return replace(op, collective=replace(op.collective, num_nodes=nodes))


def step_name(model: TransformerModel, layout: ParallelLayout) -> str:
    """The model with the degrees that are not 1."""
    words = [model.name]
    words += [f"tp{layout.tensor}"] if layout.tensor > 1 else []
    words += [f"pp{layout.pipeline}"] if layout.pipeline > 1 else []
    words += [f"cp{layout.context}"] if layout.context > 1 else []
    if layout.data > 1:
        kind = {0: "dp", 3: "fsdp"}.get(layout.zero_stage, f"zero{layout.zero_stage}-")
        words += [f"dp{layout.replicate}"] if layout.replicate > 1 else []
        words.append(f"{kind}{layout.data // layout.replicate}")
    words += [f"ep{layout.expert}"] if layout.expert > 1 else []
    return "-".join(words)
