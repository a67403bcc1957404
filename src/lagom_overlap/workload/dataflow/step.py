"""A whole training step of a dense transformer or a mixture of experts, one rank, with every data dependence.

Program order is that of the plain framework: a layer after the other, parameters gathered just before their first use,
gradients reduced just after the last product that makes them, the optimizer at the end.

- `zero_stage` 0: gradients all-reduced, the optimizer on every rank. 1 and 2: parameters gathered at their first use in
  forward (they were updated at the end of the step before), gradients scattered, the optimizer on a share. 3: gathered
  again in backward. Gradients travel after the last micro-batch; with stage 3 after every one.
- `shard` consecutive data-parallel ranks share parameters; where there are more ranks, gradients are also summed over
  the replicas (hybrid sharding; Centauri's DP + FSDP).
- Experts: an all-to-all before and one after them, tokens spread evenly.

Departures: norms' parameters do not travel; a norm's backward adds the residual's gradient; experts' parameters are
reduced over data / expert ranks and never sharded; no recomputation, no dropout; the pipeline is one stage; tied
tables are two.
"""

from collections.abc import Sequence

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.dataflow.axes import elementwise_axes, moved_axes
from lagom_overlap.workload.dataflow.builder import StepBuilder
from lagom_overlap.workload.dataflow.groups import StepGroups
from lagom_overlap.workload.dataflow.layer import LayerBuilder
from lagom_overlap.workload.dataflow.units import Unit, Weight, parts_of
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import MemoryBound, Origin, Phase
from lagom_overlap.workload.parallel.layer import ELEMENT_BYTES
from lagom_overlap.workload.parallel.layout import ParallelLayout, check_model
from lagom_overlap.workload.parallel.memory import OPTIMIZER_BYTES

ADAM_BYTES = 30
"""Moved per parameter: gradient (4), FP32 copy and moments read and written (24), the 2-byte parameter written."""

_NAMES = {
    CollectiveKind.ALL_GATHER: "gather",
    CollectiveKind.REDUCE_SCATTER: "scatter",
    CollectiveKind.ALL_REDUCE: "reduce",
}


class _Step:
    def __init__(
        self, model: TransformerModel, layout: ParallelLayout, groups: StepGroups, seq_len: int, unit: Unit
    ) -> None:
        self._model, self._layout, self._groups = model, layout, groups
        self._seq_len, self._unit = seq_len, unit
        self._build = StepBuilder()
        self._layers = [self._layer_weights(layer) for layer in range(model.num_layers)]
        table = model.vocab // layout.tensor
        self._embed = {"embed": Weight("embed", None, table, model.hidden)}
        self._head = {"logits": Weight("logits", None, model.hidden, table)}
        self._reduced: dict[int, list[str]] = {}

    def _layer_weights(self, layer: int) -> dict[str, Weight]:
        model, h, tensor = self._model, self._model.hidden, self._layout.tensor
        factor = 2 if model.gated else 1
        found = [
            Weight("qkv", layer, h, model.qkv_columns // tensor),
            Weight("out", layer, model.attention_columns // tensor, h),
        ]
        width = model.shared_ffn if model.num_experts else model.ffn
        if model.num_experts:
            local = model.num_experts // self._layout.expert
            found += [
                Weight("router", layer, h, model.num_experts),
                Weight("expert_up", layer, h, model.ffn * factor, local, is_expert=True),
                Weight("expert_down", layer, model.ffn, h, local, is_expert=True),
            ]
        if width:
            found += [
                Weight("up", layer, h, width // tensor * factor),
                Weight("down", layer, width // tensor, h),
            ]
        return {weight.name: weight for weight in found}

    @property
    def all_weights(self) -> list[Weight]:
        layers = [weight for weights in self._layers for weight in weights.values()]
        return [self._embed["embed"], *layers, self._head["logits"]]

    def run(self) -> StepBuilder:
        for batch in range(self._layout.num_micro_batches):
            self._micro_batch(batch)
        for weight_part in self._parts():
            self._update(weight_part)
        return self._build

    def _parts(self) -> list[list[Weight]]:
        sets = [self._embed, *self._layers, self._head]
        return [part for weights in sets for part in parts_of(list(weights.values()), self._unit)]

    def _micro_batch(self, batch: int) -> None:
        last = batch == self._layout.num_micro_batches - 1
        self._gather(self._embed, Phase.FORWARD, batch)
        tables = self._builder(None, batch, self._embed | self._head)
        x = tables.embed()
        layers = [self._builder(k, batch, weights) for k, weights in enumerate(self._layers)]
        for weights, layer in zip(self._layers, layers, strict=True):
            self._gather(weights, Phase.FORWARD, batch)
            x = layer.forward(x)
        self._gather(self._head, Phase.FORWARD, batch)
        self._head["logits"].gathered.setdefault(
            (Phase.BACKWARD, batch), self._head["logits"].gathered.get((Phase.FORWARD, batch), "")
        )
        gradient = tables.head(x)
        self._reduce(self._head, batch, last)
        for weights, layer in zip(reversed(self._layers), reversed(layers), strict=True):
            self._gather(weights, Phase.BACKWARD, batch)
            gradient = layer.backward(gradient)
            self._reduce(weights, batch, last)
        tables.embed_backward(gradient)
        self._reduce(self._embed, batch, last)

    def _builder(self, layer: int | None, batch: int, weights: dict[str, Weight]) -> LayerBuilder:
        return LayerBuilder(
            self._build,
            self._model,
            self._layout,
            self._groups,
            seq_len=self._seq_len,
            unit=self._unit,
            layer=layer,
            batch=batch,
            weights=weights,
        )

    def _gather(self, weights: dict[str, Weight], phase: Phase, batch: int) -> None:
        stage = self._layout.zero_stage
        if stage == 0 or self._groups.shard == 1:
            return
        dense = [weight for weight in weights.values() if not weight.is_expert]
        if stage < 3 and (batch or phase is Phase.BACKWARD):
            for weight in dense:
                weight.gathered[phase, batch] = weight.gathered[Phase.FORWARD, 0]
            return
        for part in parts_of(dense, self._unit):
            name = self._comm(
                part,
                CollectiveKind.ALL_GATHER,
                "fsdp",
                element_bytes=ELEMENT_BYTES,
                deps=(),
                phase=phase,
                batch=batch,
            )
            for weight in part:
                weight.gathered[phase, batch] = name

    def _reduce(self, weights: dict[str, Weight], batch: int, last: bool) -> None:
        stage = self._layout.zero_stage
        if not last and stage < 3:
            return
        for part in parts_of(list(weights.values()), self._unit):
            made, cut = [weight.gradients[-1] for weight in part], 1
            group = "edp" if part[0].is_expert and self._groups.expert > 1 else "dp"
            if group == "dp" and stage and self._groups.shard > 1:
                made, cut = (
                    [self._gradient_comm(part, CollectiveKind.REDUCE_SCATTER, "fsdp", made, batch=batch)],
                    self._groups.shard,
                )
            if self._groups.size(group) > 1 and last:
                made = [self._gradient_comm(part, CollectiveKind.ALL_REDUCE, group, made, batch=batch, cut=cut)]
            self._reduced.setdefault(id(part[0]), []).extend(made)

    def _gradient_comm(
        self, part: Sequence[Weight], kind: CollectiveKind, group: str, deps: Sequence[str], *, batch: int, cut: int = 1
    ) -> str:
        size = self._layout.gradient_bytes
        return self._comm(part, kind, group, element_bytes=size, deps=deps, phase=Phase.BACKWARD, batch=batch, cut=cut)

    def _comm(
        self,
        part: Sequence[Weight],
        kind: CollectiveKind,
        group: str,
        *,
        element_bytes: int,
        deps: Sequence[str],
        phase: Phase,
        batch: int,
        cut: int = 1,
    ) -> str:
        """A collective of a part's parameters or gradients, of which a scatter left one `cut`-th."""
        first, layer = part[0], part[0].layer
        kind_name = _NAMES[kind] + ("_d" if phase is Phase.BACKWARD and kind is CollectiveKind.ALL_GATHER else "")
        experts = "experts_" if first.is_expert else ""
        what = f"{first.name}_{kind_name}" if self._unit is Unit.MATRIX or layer is None else experts + kind_name
        where = "head" if layer is None else f"layer{layer}"
        num_bytes = sum(weight.num_params for weight in part) * element_bytes // cut
        module = f"{where}.{what}" if layer is None else f"layers.{layer}.{what}"
        cuttable = len(part) == 1 and first.num_matrices == 1 and len(deps) <= 1
        spec = None
        if cuttable:
            gathers = kind is CollectiveKind.ALL_GATHER
            rows, columns = (first.outputs, first.inputs) if gathers else (first.inputs, first.outputs)
            share = cut if kind is CollectiveKind.ALL_REDUCE else self._groups.shard
            spec = moved_axes(deps[0] if deps else "", max(1, rows // share), columns)
        return self._build.comm(
            f"mb{batch}.{where}.{what}",
            self._groups.collective(kind, num_bytes, group),
            group,
            origin=Origin(phase=phase, layer=layer, microbatch=batch, module=module),
            deps=deps,
            shards=spec,
        )

    def _update(self, part: Sequence[Weight]) -> None:
        first, layer = part[0], part[0].layer
        where = "head" if layer is None else f"layer{layer}"
        sharded = self._layout.zero_stage and not first.is_expert
        params = sum(weight.num_params for weight in part) // (self._groups.shard if sharded else 1)
        what = first.name if self._unit is Unit.MATRIX or layer is None else "experts" if first.is_expert else "dense"
        self._build.comp(
            f"{where}.{what}.update",
            MemoryBound(max(1, ADAM_BYTES * params)),
            Origin(phase=Phase.OPTIMIZER, layer=layer, module=f"{where}.{what}"),
            elementwise_axes(self._reduced[id(first)], max(1, params)),
        )

    def resident_bytes(self) -> int:
        """Parameters, gradients and optimizer state that stay on the rank."""
        total = 0
        for weight in self.all_weights:
            shard = 1 if weight.is_expert else self._groups.shard
            stage = self._layout.zero_stage
            total += weight.num_params * ELEMENT_BYTES // (shard if stage == 3 else 1)
            total += weight.num_params * self._layout.gradient_bytes // (shard if stage >= 2 else 1)
            total += weight.num_params * OPTIMIZER_BYTES // (shard if stage >= 1 else 1)
        return total


def dataflow_iteration(
    model: TransformerModel,
    layout: ParallelLayout,
    *,
    seq_len: int,
    gpus_per_node: int,
    shard: int | None = None,
    unit: Unit = Unit.LAYER,
) -> Iteration:
    """One step of `model` under `layout` on one rank; `shard` None: all data-parallel ranks share (if any stage does).

    Raises:
        JobError: if the layout does not fit the model, has a pipeline, or `shard` does not divide the data ranks.
    """
    check_model(model, layout, seq_len)
    if layout.pipeline > 1:
        raise JobError(f"data flow: parallel.pipeline is {layout.pipeline}, must be 1: a step is one stage")
    if shard is None:
        shard = layout.data if layout.zero_stage else 1
    if shard < 1 or layout.data % shard:
        raise JobError(f"data flow: shard is {shard}, must divide parallel.data ({layout.data})")
    if shard > 1 and not layout.zero_stage:
        raise JobError(f"data flow: shard is {shard} with parallel.zero_stage 0, which shards nothing; must be 1")
    groups = StepGroups(
        tensor=layout.tensor,
        shard=shard,
        replicas=layout.data // shard,
        expert=layout.expert,
        gpus_per_node=gpus_per_node,
    )
    step = _Step(model, layout, groups, seq_len, unit)
    build = step.run()
    name = f"{model.name}-tp{layout.tensor}-dp{layout.data}-zero{layout.zero_stage}"
    return Iteration(
        name, tuple(build.ops), is_dataflow=True, buffers=build.buffers(), resident_bytes=step.resident_bytes()
    )
