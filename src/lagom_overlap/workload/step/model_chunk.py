"""A model chunk of a pipeline stage: its layers, the tables at the model's ends, multi-token prediction.

Predictions and the head may be in different chunks: the losses of all are made where the head is.
"""

from lagom_overlap.workload.parallel.stage import expert_params_per_gpu, layer_params_per_gpu
from lagom_overlap.workload.step.operators import StepShape
from lagom_overlap.workload.step.parameter_units import (
    ParamUnit,
    Unit,
    Weight,
    layer_units,
    layer_weights,
    mtp_unit,
    table_units,
)


class Chunk:
    """A model chunk of the stage: its layers, and the tables at the model's ends."""

    def __init__(self, shape: StepShape, place: int, layers: range) -> None:
        self.place = place
        self.is_first, self.is_last = place == 0, place == shape.layout.num_chunks - 1
        model = shape.model
        table = model.vocab // shape.layout.tensor
        depths = range(model.mtp_layers if place == shape.layout.mtp_chunk else 0)
        self.num_heads = 1 + model.mtp_layers if self.is_last else 0
        has_embed = self.is_first or (len(depths) > 0 and not model.tied_embeddings)
        self.embed = Weight("embed", table, model.hidden) if has_embed else None
        self.head = Weight("logits", model.hidden, table) if self.is_last else None
        joint = shape.joint_products
        self.kinds = {layer: model.kind_of(layer) for layer in layers}
        each = len(model.mtp_kinds) if depths else 0
        first = model.num_layers
        self.mtp_layers = [range(first + depth * each, first + (depth + 1) * each) for depth in depths]
        self.own_layers = [layer for layer in layers if layer < first]
        sizes = {
            kind: (layer_params_per_gpu(model, shape.layout, kind), expert_params_per_gpu(model, shape.layout, kind))
            for kind in set(self.kinds.values())
        }
        self.weights: dict[int, dict[str, Weight]] = {}
        self.units: dict[int, list[ParamUnit]] = {}
        for layer, kind in self.kinds.items():
            if model.mtp_repeats and layer >= first + each:  # the first prediction's again
                self.weights[layer], self.units[layer] = self.weights[layer - each], self.units[layer - each]
                continue
            self.weights[layer] = layer_weights(model, shape.layout, kind, joint=joint)
            self.units[layer] = layer_units(layer, list(self.weights[layer].values()), shape.unit, *sizes[kind])
        mtp_units = [mtp_unit(model, shape.layout, depth) for depth in depths[: model.num_mtp_held]]
        self.mtp_units = mtp_units * len(depths) if model.mtp_repeats else mtp_units
        self.tables = table_units(
            model,
            shape.layout,
            embed=self.embed,
            head=self.head,
            tied=model.tied_embeddings and shape.unit is Unit.LAYER,
        )

    @property
    def shared(self) -> dict[str, Weight]:
        """The tables' matrices by what they are for; a prediction's tied embedding is the last stage's head."""
        tables = {weight.name: weight for weight in (self.embed, self.head) if weight is not None}
        if self.mtp_units and self.head is not None:
            tables.setdefault("embed", self.head)
        return tables

    def of_embed(self) -> list[ParamUnit]:
        """Those that hold the embedding."""
        return [unit for unit in self.tables if self.embed in unit.weights]

    def of_head(self) -> list[ParamUnit]:
        """Those that hold the head."""
        return [unit for unit in self.tables if self.head in unit.weights]

    def silent(self, depth: int | None) -> frozenset[str]:
        """Matrices whose gradients others add to later: of prediction `depth`, or of the model's own ends (None).

        Backward begins with the model's own head and goes through the predictions from the last; the embedding of the
        model's start comes last of all.
        """
        names: set[str] = set()
        if self.num_heads > 1 and (depth != 0 or self.shared.get("embed") is self.head):
            names.add("logits")
        if depth is not None and (depth > 0 or self.is_first):
            names.add("embed")
        if depth and self.mtp_units and self.mtp_units[depth] is self.mtp_units[0]:
            names.add("mtp_proj")
        return frozenset(names)

    def silent_in(self, layer: int) -> frozenset[str]:
        """The same of a layer: all of one that an earlier prediction runs too, whose backward comes later."""
        if not self.mtp_units:
            return frozenset()
        numbers = [number for number, units in self.units.items() if units is self.units[layer]]
        return frozenset(self.weights[layer]) if layer != numbers[0] else frozenset()

    def in_order(self) -> list[ParamUnit]:
        """The units in the order of forward; a tied table comes first."""
        inner = [unit for units in self.units.values() for unit in units]
        last = [unit for unit in self.of_head() if unit not in self.of_embed()]
        every_unit = [*self.of_embed(), *inner, *self.mtp_units, *last]
        return list({unit.key: unit for unit in every_unit}.values())
