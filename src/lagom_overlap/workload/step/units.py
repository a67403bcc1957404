"""Matrices of the model, and the units in which parameters are gathered and gradients reduced."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import Phase
from lagom_overlap.workload.parallel.layout import ParallelLayout
from lagom_overlap.workload.parallel.stage import expert_params_per_gpu, layer_params_per_gpu


class Unit(StrEnum):
    """What one collective of parameters or gradients holds: a layer's (FSDP2) or a matrix (Centauri, Fig. 12)."""

    LAYER = "layer"
    MATRIX = "matrix"


@dataclass(slots=True)
class Weight:
    """A matrix [inputs, outputs] on one rank, or `num_matrices` of them (experts).

    `parts` are the names and columns of the matrices that it stands for where each has a product of its own.
    `gathered` names what brought it, by phase and micro-batch; `gradients` are its gradients' operators, one per
    micro-batch.
    """

    name: str
    inputs: int
    outputs: int
    num_matrices: int = 1
    is_expert: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    gathered: dict[tuple[Phase, int], str] = field(default_factory=dict)
    gradients: list[str] = field(default_factory=list)

    @property
    def num_params(self) -> int:
        """Elements."""
        return self.inputs * self.outputs * self.num_matrices


@dataclass(slots=True)
class ParamUnit:
    """Matrices that travel together with the small parameters around them; experts' apart, whose ranks differ.

    `key` names it in operators (`layer3`, `layer3.experts`, `embed`), `module` in origins; `layer` is None for tables.
    """

    key: str
    module: str
    layer: int | None
    weights: list[Weight]
    num_params: int
    is_expert: bool = False
    is_root: bool = False

    @property
    def gradients(self) -> list[str]:
        """The last micro-batch's gradients."""
        return [weight.gradients[-1] for weight in self.weights]


def layer_weights(model: TransformerModel, layout: ParallelLayout, *, joint: bool = True) -> dict[str, Weight]:
    """The matrices of a layer on one rank; unless `joint`, q, k and v, and gate and up, have a product each."""
    h, tensor, factor = model.hidden, layout.tensor, 2 if model.gated else 1
    heads, kv_heads = model.num_heads // tensor, max(1, model.num_kv_heads // tensor)
    found = [
        _joined("qkv", h, {"q": heads * model.head_dim} | dict.fromkeys("kv", kv_heads * model.head_dim), joint=joint),
        Weight("out", heads * model.head_dim, h),
    ]
    width = model.shared_ffn if model.num_experts else model.ffn
    if model.num_experts:
        local, ffn = model.num_experts // layout.expert, model.ffn // tensor
        found += [
            Weight("router", h, model.num_experts),
            Weight("expert_up", h, ffn * factor, local, is_expert=True),
            Weight("expert_down", ffn, h, local, is_expert=True),
        ]
    if width:
        gate_up = {"gate": width // tensor, "up": width // tensor} if model.gated else {"up": width // tensor}
        found += [_joined("up", h, gate_up, joint=joint), Weight("down", width // tensor, h)]
    return {weight.name: weight for weight in found}


def _joined(name: str, inputs: int, columns: dict[str, int], *, joint: bool) -> Weight:
    parts = () if joint or len(columns) == 1 else tuple(columns.items())
    return Weight(name, inputs, sum(columns.values()), parts=parts)


def layer_units(
    model: TransformerModel, layout: ParallelLayout, layer: int, weights: Sequence[Weight], unit: Unit
) -> list[ParamUnit]:
    """The units of a layer; with units of a matrix the small parameters do not travel."""
    module = f"layers.{layer}"
    if unit is Unit.MATRIX:
        return [
            ParamUnit(f"layer{layer}.{w.name}", f"{module}.{w.name}", layer, [w], w.num_params, w.is_expert)
            for w in weights
        ]
    experts = [weight for weight in weights if weight.is_expert]
    num_expert_params = expert_params_per_gpu(model, layout)
    dense = layer_params_per_gpu(model, layout) - num_expert_params
    units = [ParamUnit(f"layer{layer}", module, layer, [w for w in weights if not w.is_expert], dense)]
    if experts:
        units.append(
            ParamUnit(f"layer{layer}.experts", f"{module}.experts", layer, experts, num_expert_params, is_expert=True)
        )
    return units


def table_units(
    model: TransformerModel, layout: ParallelLayout, *, embed: Weight | None, head: Weight | None, tied: bool
) -> list[ParamUnit]:
    """The embedding, and the head with the norm before it; one unit where their table is one."""
    tensor = layout.tensor
    positions = model.learned_positions * model.hidden
    norm = model.hidden * (2 if model.norm_bias else 1)
    table = model.vocab * model.hidden // tensor
    if tied and embed is not None and head is not None:
        return [ParamUnit("root", "root", None, [embed, head], table + positions + norm, is_root=True)]
    units = []
    if embed is not None:
        units.append(ParamUnit("embed", "embed", None, [embed], table + positions))
    if head is not None:
        units.append(ParamUnit("head", "head", None, [head], table + norm + model.vocab * model.head_bias // tensor))
    return units
