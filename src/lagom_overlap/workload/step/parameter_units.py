"""Matrices of the model, and the units in which parameters are gathered and gradients reduced."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lagom_overlap.workload.layer_kinds import LayerKind, Mixer, Mlp
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import Phase
from lagom_overlap.workload.parallel.layout import ParallelLayout
from lagom_overlap.workload.parallel.stage import mtp_params_per_gpu


class Unit(StrEnum):
    """What one collective of parameters or gradients holds: a layer's (FSDP2) or a matrix (Centauri, Fig. 12)."""

    LAYER = "layer"
    MATRIX = "matrix"


@dataclass(slots=True)
class Weight:
    """A matrix [inputs, outputs] on one rank, or `num_matrices` of them (experts).

    `parts` are the names and columns of the matrices that it stands for where each has a product of its own.
    `gathered` names what brought it, by phase and micro-batch; `gradients` are its gradients' operators, one per
    micro-batch, to which `partial` ones of the same micro-batch were added.
    """

    name: str
    inputs: int
    outputs: int
    num_matrices: int = 1
    is_expert: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    gathered: dict[tuple[Phase, int], str] = field(default_factory=dict)
    gradients: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)

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


def layer_weights(
    model: TransformerModel, layout: ParallelLayout, kind: LayerKind, *, joint: bool = True
) -> dict[str, Weight]:
    """The matrices of a layer on one rank; unless `joint`, q, k and v, and gate and up, have a product each."""
    weights = _mixer_weights(model, layout, kind.mixer, joint=joint)
    width = {Mlp.MLP: model.dense_width, Mlp.EXPERTS: model.shared_ffn, Mlp.NONE: 0}[kind.mlp] // layout.tensor
    if kind.mlp is Mlp.EXPERTS:
        h, local, ffn = model.hidden, model.num_experts // layout.expert, model.ffn // layout.expert_tensor
        weights += [
            Weight("router", h, model.num_experts),
            Weight("expert_up", model.expert_width, ffn * (2 if model.gated else 1), local, is_expert=True),
            Weight("expert_down", ffn, model.expert_width, local, is_expert=True),
        ]
        if model.expert_hidden:
            weights += [Weight("expert_enter", h, model.expert_hidden), Weight("expert_leave", model.expert_hidden, h)]
    if width:
        gate_up = {"gate": width, "up": width} if model.gated else {"up": width}
        weights += [_joined("up", model.hidden, gate_up, joint=joint), Weight("down", width, model.hidden)]
    return {weight.name: weight for weight in weights}


def _mixer_weights(model: TransformerModel, layout: ParallelLayout, mixer: Mixer, *, joint: bool) -> list[Weight]:
    h, tensor = model.hidden, layout.tensor
    heads = model.num_heads // tensor
    if mixer is Mixer.NONE:
        return []
    if mixer is Mixer.LATENT:
        assert model.latent is not None
        a = model.latent
        wide = heads * a.qk_head_dim
        queries = [Weight("q", h, wide)]  # no latent of theirs
        if a.q_lora_rank:
            queries = [Weight("q_down", h, a.q_lora_rank), Weight("q_up", a.q_lora_rank, wide)]
        return [
            Weight("kv_down", h, a.kv_lora_rank + a.qk_rope_head_dim),
            *queries,
            Weight("kv_up", a.kv_lora_rank, heads * (a.qk_nope_head_dim + a.v_head_dim)),
            Weight("out", heads * a.v_head_dim, h),
        ]
    if mixer is Mixer.MAMBA:
        assert model.mamba is not None
        return [Weight("mamba_in", h, model.mamba.in_columns // tensor), Weight("out", model.mamba.inner // tensor, h)]
    kv_heads = max(1, model.num_kv_heads // tensor)
    columns = {"q": heads * model.head_dim} | dict.fromkeys("kv", kv_heads * model.head_dim)
    return [_joined("qkv", h, columns, joint=joint), Weight("out", heads * model.head_dim, h)]


def _joined(name: str, inputs: int, columns: dict[str, int], *, joint: bool) -> Weight:
    parts = () if joint or len(columns) == 1 else tuple(columns.items())
    return Weight(name, inputs, sum(columns.values()), parts=parts)


def layer_units(
    layer: int, weights: Sequence[Weight], unit: Unit, num_params: int, num_expert_params: int
) -> list[ParamUnit]:
    """The units of a layer of so many parameters, of which experts'; units of a matrix have no small parameters."""
    module = f"layers.{layer}"
    if unit is Unit.MATRIX:
        return [
            ParamUnit(f"layer{layer}.{w.name}", f"{module}.{w.name}", layer, [w], w.num_params, w.is_expert)
            for w in weights
        ]
    experts = [weight for weight in weights if weight.is_expert]
    dense = [weight for weight in weights if not weight.is_expert]
    units = [ParamUnit(f"layer{layer}", module, layer, dense, num_params - num_expert_params)]
    if experts:
        units.append(
            ParamUnit(f"layer{layer}.experts", f"{module}.experts", layer, experts, num_expert_params, is_expert=True)
        )
    return units


def mtp_unit(model: TransformerModel, layout: ParallelLayout, depth: int) -> ParamUnit:
    """What a multi-token prediction has around its layers: a projection of two hidden sizes to one, three norms."""
    projection = Weight("mtp_proj", 2 * model.hidden, model.hidden // layout.tensor)
    return ParamUnit(f"mtp{depth}", f"mtp.{depth}", None, [projection], mtp_params_per_gpu(model, layout))


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
