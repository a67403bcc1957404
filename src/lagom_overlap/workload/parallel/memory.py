"""Bytes that one GPU needs: parameters, gradients, optimizer, activations.

Activations follow Korthikanti et al. (arXiv 2205.05198, section 4): s b h (10 + 24/t + 5 a s / (h t)) per layer, all
of it over t with sequence parallelism, without the scores under selective recomputation or flash attention, and only
the layer's input under full recomputation (plus the rest of one layer that is computed again). Here the terms are
counted from the model's own shapes (gated MLPs, fewer key-value heads, experts); for a GPT they give the formula.
Where PyTorch itself runs the step (`eager_memory`), what it holds besides is counted, at the fullest moment.

Not counted: the CUDA context, NCCL's buffers, fragmentation of the allocator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.workload.fsdp2.hooks import BACKWARD_PREFETCH
from lagom_overlap.workload.layer_kinds import LayerKind, Mixer, Mlp
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.eager_memory import (
    MASTER_BYTES,
    MOMENT_BYTES,
    EagerStep,
    StepSizes,
    cached_bytes,
    extra_layer_bytes,
    moments,
)
from lagom_overlap.workload.parallel.layout import MAX_ZERO_STAGE, ParallelLayout, Recompute, RecomputeModule
from lagom_overlap.workload.parallel.schedule import most_in_flight
from lagom_overlap.workload.parallel.stage import StagePlan, expert_params_per_gpu, layer_params_per_gpu
from lagom_overlap.workload.precision import MIXED, Precision

OPTIMIZER_BYTES = 12
"""Adam in mixed precision, per parameter: FP32 copy and two moments."""
LOGIT_BYTES = 6
"""Per logit of the last stage: 2-byte logits and their FP32 softmax."""
_MADE_AGAIN: Final = (Recompute.FULL, Recompute.PRODUCTS)
"""Of these ways every layer runs inside a checkpoint, which keeps no copy of its parameters."""
STATE_BYTES = 4
"""Per element of a state that Mamba's scan hands from chunk to chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one GPU of a stage at its peak.

    `transient_bytes`, known where PyTorch itself runs the step, comes and goes: gathered parameters, what is reduced,
    what the loss, a layer's backward or the update makes. `cached_bytes` is what PyTorch reserves beyond all of it.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    transient_bytes: int = 0
    cached_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that is allocated."""
        lasting_bytes = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
        return lasting_bytes + self.transient_bytes

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch's allocator has asked the driver for by the end of a step."""
        return self.total_bytes + self.cached_bytes


def layer_activation_bytes(
    model: TransformerModel,
    layout: ParallelLayout,
    seq_len: int,
    recompute: Recompute,
    *,
    precision: Precision = MIXED,
    kind: LayerKind | None = None,
    weighs_inside: bool = False,
) -> int:
    """What one layer keeps of one micro-batch for its backward; by default one of the model's last kind.

    With products in FP8 an operand is kept as it was cast, but for the attention's result, which attention keeps too.
    `weighs_inside`: the router's weights scale the experts' activations, so that what comes back is not kept.
    """
    element_bytes = precision.parameter.num_bytes
    operand_bytes = 1 if precision.products.is_narrow else element_bytes
    kind = kind or model.layer_kinds[-1]
    tokens, h, t = layout.micro_batch * seq_len // layout.context, model.hidden, layout.tensor
    around = t if layout.sequence_parallel else 1
    if recompute is Recompute.FULL:
        return element_bytes * tokens * h // around
    again = layout.recompute_modules if recompute is Recompute.SELECTIVE else ()
    mask = 1 if model.dropout else 0
    each = element_bytes + (0 if RecomputeModule.LAYERNORM in again else operand_bytes) + mask
    whole = tokens * h * kind.num_parts * each // around
    inner_columns, whole_columns = _inner_columns(model, kind, again)
    acted = 0 if recompute is Recompute.PRODUCTS else _acted_columns(model, kind, again)
    if recompute is Recompute.PRODUCTS:  # queries, values, attention's result and one half of a gated product stay
        inner_columns = (model.num_heads + model.num_kv_heads) * model.head_dim + model.attention_columns
        inner_columns += model.dense_width * (2 if model.gated else 1) // 2
        whole //= 4  # only the layer's input of what is as wide as the hidden size
    inner = tokens * (element_bytes * inner_columns + operand_bytes * acted) // t
    inner += element_bytes * tokens * whole_columns // around
    if kind.mlp is Mlp.EXPERTS and RecomputeModule.MOE not in again:
        back = tokens * model.experts_per_token * model.expert_width // t  # of the tokens that this rank sends
        inner += back * (layout.expert_tensor * operand_bytes + (0 if weighs_inside else element_bytes))
    scores = 0
    keeps_scores = recompute in (Recompute.NONE, Recompute.LAYERS) or (again and RecomputeModule.CORE_ATTN not in again)
    if not layout.flash_attention and keeps_scores and kind.mixer is Mixer.ATTENTION:
        per_score = element_bytes + (element_bytes + 1 if model.dropout else 0)
        scores = per_score * layout.micro_batch * model.num_heads * seq_len * seq_len // t
    return whole + inner + scores


def prediction_activation_bytes(
    model: TransformerModel, layout: ParallelLayout, seq_len: int, *, precision: Precision = MIXED
) -> int:
    """What one multi-token prediction keeps of a micro-batch around its layers.

    Counted from NVIDIA/Megatron-LM @d98e8a6, `core/transformer/multi_token_prediction.py`: the inputs of the norms of
    the next token's embedding and of the hidden state before it, the two joined, which the projection reads, and the
    input of the last norm. Fully recomputed, a prediction keeps the first two, and nothing of its layers.
    """
    element_bytes = precision.parameter.num_bytes
    operand_bytes = 1 if precision.products.is_narrow else element_bytes
    rows = layout.micro_batch * seq_len // layout.context
    each = 2 * element_bytes
    if layout.recompute is not Recompute.FULL:
        each += 2 * operand_bytes + element_bytes
    return rows * model.hidden * each // (layout.tensor if layout.sequence_parallel else 1)


def _inner_columns(model: TransformerModel, kind: LayerKind, again: Sequence[RecomputeModule]) -> tuple[int, int]:
    """Columns that a layer keeps between its projections but those of activations: cut, and not cut."""
    columns = {Mixer.NONE: 0, Mixer.ATTENTION: model.qkv_columns + model.attention_columns}
    columns[Mixer.WINDOW] = columns[Mixer.ATTENTION]
    whole = 0
    if model.latent is not None:
        a = model.latent
        kept_columns = (
            0 if RecomputeModule.MLA_UP_PROJ in again else 3 * a.qk_head_dim + 2 * a.v_head_dim - a.qk_rope_head_dim
        )
        columns[Mixer.LATENT] = model.num_heads * (kept_columns + a.v_head_dim)
        whole = a.down_columns if kind.mixer is Mixer.LATENT else 0
    if model.mamba is not None:
        m = model.mamba
        states = m.inner * m.state_dim // m.chunk * STATE_BYTES // 2
        columns[Mixer.MAMBA] = m.in_columns + m.conv_columns + 2 * m.inner + states
    factor = 2 if model.gated else 1
    inner = columns[kind.mixer]
    if kind.mlp is Mlp.MLP and RecomputeModule.MLP not in again:
        inner += model.dense_width * factor
    if kind.mlp is Mlp.EXPERTS and RecomputeModule.MOE not in again:
        inner += (model.ffn * model.experts_per_token + model.shared_ffn) * factor
    return inner, whole


def _acted_columns(model: TransformerModel, kind: LayerKind, again: Sequence[RecomputeModule]) -> int:
    """Columns of the activations that a layer keeps for its last products."""
    if kind.mlp is Mlp.MLP:
        return 0 if RecomputeModule.MLP in again else model.dense_width
    if kind.mlp is Mlp.NONE or RecomputeModule.MOE in again:
        return 0
    visited = 0 if RecomputeModule.MOE_ACT in again else model.ffn * model.experts_per_token
    return visited + model.shared_ffn


def _made_first(model: TransformerModel, layout: ParallelLayout, kind: LayerKind) -> int:
    """Parameters of a layer whose gradients are there when backward has passed its MLP."""
    if kind.mlp is not Mlp.MLP:
        return layer_params_per_gpu(model, layout, kind)
    return (3 if model.gated else 2) * model.hidden * model.dense_width // layout.tensor


def _kept_units(model: TransformerModel, layout: ParallelLayout, kinds: Sequence[LayerKind], table: int) -> list[int]:
    """Parameters of FSDP2's units, embedding, layers, head, which those hold from their forward to their backward.

    Of all of them with `zero_stage` 1 and 2; else of the last `kept_units`. Experts are a unit of their own if their
    ranks share them out. A tied table is the root's, which never frees it.
    """
    is_shared = layout.expert_ranks > layout.expert
    apart = 0 if model.tied_embeddings else table
    kept: list[int] = [0] * (len(kinds) + 2)
    left = layout.kept_units if layout.zero_stage == MAX_ZERO_STAGE else 2 * len(kept)
    for place in reversed(range(len(kept))):
        if place in (0, len(kinds) + 1):
            sizes = [apart] if apart else []
        else:
            whole = layer_params_per_gpu(model, layout, kinds[place - 1])
            experts = expert_params_per_gpu(model, layout, kinds[place - 1])
            sizes = [experts, whole - experts] if experts and is_shared else [whole]
        kept[place] = sum(sizes[: max(0, left)])
        left -= len(sizes)
    return kept


def stage_memory(
    model: TransformerModel,
    layout: ParallelLayout,
    stage: StagePlan,
    seq_len: int,
    precision: Precision = MIXED,
    *,
    weighs_inside: bool = False,
    stays_whole: bool = False,
    eager: EagerStep | None = None,
) -> StageMemory:
    """The peak of one GPU of a stage; where PyTorch itself runs the step, at its fullest moment.

    `stays_whole`: between the first forward and the last backward gradients and parameters are whole under every
    `zero_stage` (FSDP2 in a pipeline); only the optimizer is sharded then.
    """
    element_bytes = precision.parameter.num_bytes
    zero = min(layout.zero_stage, 1) if stays_whole else layout.zero_stage
    params, shard = stage.num_params, stage.shard_params(layout)
    in_flight = most_in_flight(layout, stage.rank)
    kinds = {model.kind_of(layer) for layers in stage.chunks for layer in layers}

    def kept(kind: LayerKind, recompute: Recompute) -> int:
        activations = layer_activation_bytes(
            model, layout, seq_len, recompute, precision=precision, kind=kind, weighs_inside=weighs_inside
        )
        return activations + (
            0 if eager is None else extra_layer_bytes(model, layout, seq_len, kind, facts=eager, recompute=recompute)
        )

    by_kind = {kind: kept(kind, layout.recompute) for kind in kinds}
    if layout.recompute is Recompute.LAYERS:  # every second one keeps all of it, the others their input
        by_kind = {kind: (by_kind[kind] + kept(kind, Recompute.FULL)) // 2 for kind in kinds}
    predictions = stage.num_predictions * prediction_activation_bytes(model, layout, seq_len, precision=precision)

    def kept_by(layers: range) -> int:
        inside = [layer for layer in layers if layer < model.num_layers or layout.recompute is not Recompute.FULL]
        around = predictions if layers.stop > model.num_layers else 0
        return around + sum(by_kind[model.kind_of(layer)] for layer in inside)

    activations = in_flight * max(map(kept_by, stage.chunks))
    again = 0
    if layout.recompute is not Recompute.NONE:
        # What is made again joins what is kept of the same layer; of a layer that is made again whole, its input.
        is_whole = layout.recompute in (Recompute.FULL, Recompute.LAYERS)
        spared = {kind: kept(kind, Recompute.FULL) for kind in kinds} if is_whole else by_kind
        again = max((kept(kind, Recompute.NONE) - spared[kind] for kind in kinds), default=0)
    if eager is not None:
        own = shard if zero >= 1 else params
        stage_kinds = [model.kind_of(layer) for layers in stage.chunks for layer in layers]
        tokens, table = layout.micro_batch * seq_len // layout.context, model.vocab * model.hidden // layout.tensor
        is_whole = eager.in_buckets or stays_whole or not zero
        kept_units = _kept_units(model, layout, stage_kinds, table) if not is_whole else [0, 0]
        sizes = StepSizes(
            params=params,
            own=own,
            element_bytes=element_bytes,
            reduced_bytes=precision.reduction.num_bytes,
            kept_bytes=activations,
            layer_bytes=max(by_kind.values(), default=0),
            again_bytes=again,
            layer=max((layer_params_per_gpu(model, layout, kind) for kind in kinds), default=0),
            layers=sum(layer_params_per_gpu(model, layout, kind) for kind in stage_kinds),
            num_layers=len(stage_kinds),
            made=max((_made_first(model, layout, kind) for kind in kinds), default=0),
            copied=table if layout.recompute in _MADE_AGAIN else params - (table if stage.rank == 0 else 0),
            head=table if stage.has_head else 0,
            embedding=table if stage.rank == 0 else 0,
            logits=tokens * model.vocab // layout.tensor if stage.has_head else 0,
            rows=tokens * model.hidden if stage.has_head else 0,
            inside_bytes=element_bytes * tokens * 2 * model.hidden,
            accumulates=layout.num_micro_batches > 1,
            is_whole=is_whole,
            ahead=layout.backward_prefetch or BACKWARD_PREFETCH,
            has_list=layout.backward_prefetch > 0,
            ahead_forward=layout.forward_prefetch,
            kept_layers=sum(kept_units[1:-1]),
            kept_head=kept_units[-1],
            kept_embedding=kept_units[0],
            root=table if model.tied_embeddings and not is_whole else 0,
            reduce_buffers=layout.reduce_buffers,
            holds_gradients_whole=stays_whole,
            is_trained=not layout.frozen,
            is_loss_cut=layout.tensor > 1,
        )
        peak = max(moments(sizes, eager), key=lambda moment: moment.num_bytes)
        return StageMemory(
            parameter_bytes=MASTER_BYTES * (params if eager.in_buckets else own),
            gradient_bytes=peak.gradients,
            optimizer_bytes=0 if layout.frozen else MOMENT_BYTES * own,
            activation_bytes=peak.activations,
            transient_bytes=peak.transient,
            cached_bytes=cached_bytes(sizes, eager),
        )
    activations += again
    if stage.has_head:
        tokens = layout.micro_batch * seq_len // layout.context
        activations += (1 + model.mtp_layers) * LOGIT_BYTES * tokens * model.vocab // layout.tensor
        if model.mtp_layers:  # what the head reads, put together for all losses
            around = layout.tensor if layout.sequence_parallel else 1
            activations += (1 + model.mtp_layers) * element_bytes * tokens * model.hidden // around
    gathered = 0
    if zero == MAX_ZERO_STAGE:
        is_local = layout.expert_ranks == layout.expert
        parts = (
            layer_params_per_gpu(model, layout, kind) - (expert_params_per_gpu(model, layout, kind) if is_local else 0)
            for kind in kinds
        )
        whole = max(parts, default=0)
        gathered = min(layout.prefetch + 1, stage.num_layers) * whole
    return StageMemory(
        parameter_bytes=element_bytes * (shard + gathered if zero == MAX_ZERO_STAGE else params),
        gradient_bytes=0 if layout.frozen else precision.reduction.num_bytes * (shard if zero >= 2 else params),
        optimizer_bytes=0 if layout.frozen else OPTIMIZER_BYTES * (shard if zero >= 1 else params),
        activation_bytes=activations,
    )
