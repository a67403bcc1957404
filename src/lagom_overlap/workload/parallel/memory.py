"""Bytes that one GPU needs: parameters, gradients, optimizer, activations.

Activations follow Korthikanti et al. (arXiv 2205.05198, section 4): s b h (10 + 24/t + 5 a s / (h t)) per layer, all
of it over t with sequence parallelism, without the scores under selective recomputation or flash attention, and only
the layer's input under full recomputation (plus one layer that is being computed again). Here the terms are counted
from the model's own shapes (gated MLPs, fewer key-value heads, experts); for a GPT they give the formula.

Not counted: the CUDA context, communication buffers, fragmentation of the allocator.
"""

from dataclasses import dataclass

from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.layout import MAX_ZERO_STAGE, ParallelLayout, Recompute
from lagom_overlap.workload.parallel.schedule import most_in_flight, stage_slots
from lagom_overlap.workload.parallel.stage import StagePlan, layer_params_per_gpu
from lagom_overlap.workload.precision import MIXED, Precision

OPTIMIZER_BYTES = 12
"""Adam in mixed precision, per parameter: FP32 copy and two moments."""
LOGIT_BYTES = 6
"""Per logit of the last stage: 2-byte logits and their FP32 softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one GPU of a stage at its peak."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def layer_activation_bytes(
    model: TransformerModel, layout: ParallelLayout, seq_len: int, recompute: Recompute, element_bytes: int = 2
) -> int:
    """What one layer keeps of one micro-batch for its backward."""
    tokens, h, t = layout.micro_batch * seq_len // layout.context, model.hidden, layout.tensor
    around = t if layout.sequence_parallel else 1
    if recompute is Recompute.FULL:
        return element_bytes * tokens * h // around
    masks = (1 if model.dropout else 0) * 2
    whole = tokens * h * (4 * element_bytes + masks) // around
    visits = model.experts_per_token or 1
    ffn = model.ffn * visits + model.shared_ffn
    up = ffn * (2 if model.gated else 1)
    inner_columns = model.qkv_columns + model.attention_columns + up + ffn
    if recompute is Recompute.PRODUCTS:  # queries, values, attention's result and one half of a gated product stay
        inner_columns = (model.num_heads + model.num_kv_heads) * model.head_dim + model.attention_columns + up // 2
        whole //= 4  # only the layer's input of what is as wide as the hidden size
    inner = element_bytes * tokens * inner_columns // t
    if model.num_experts:
        inner += 2 * element_bytes * tokens * visits * h
    scores = 0
    if not layout.flash_attention and recompute is Recompute.NONE:
        per_score = element_bytes + (element_bytes + 1 if model.dropout else 0)
        scores = per_score * layout.micro_batch * model.num_heads * seq_len * seq_len // t
    return whole + inner + scores


def stage_memory(
    model: TransformerModel, layout: ParallelLayout, stage: StagePlan, seq_len: int, precision: Precision = MIXED
) -> StageMemory:
    """The peak of one GPU of a stage."""
    element_bytes = precision.parameter.num_bytes
    zero = layout.zero_stage
    params, shard = stage.num_params, stage.shard_params(layout)
    in_flight = most_in_flight(stage_slots(layout, stage.rank))
    kept = layer_activation_bytes(model, layout, seq_len, layout.recompute, element_bytes)
    if layout.recompute is Recompute.LAYERS:  # every second one keeps all of it, the others their input
        input_only = layer_activation_bytes(model, layout, seq_len, Recompute.FULL, element_bytes)
        kept = (kept + input_only) // 2
    activations = in_flight * stage.layers_per_chunk * kept
    if layout.recompute is not Recompute.NONE:
        activations += layer_activation_bytes(model, layout, seq_len, Recompute.NONE, element_bytes)
    if stage.has_head:
        activations += LOGIT_BYTES * layout.micro_batch * seq_len // layout.context * model.vocab // layout.tensor
    gathered = 0
    if zero == MAX_ZERO_STAGE:
        experts = model.expert_layer_params // (layout.tensor * layout.expert)
        whole = layer_params_per_gpu(model, layout) - (experts if layout.replicas == layout.expert else 0)
        gathered = min(layout.prefetch + 1, stage.num_layers) * whole
    return StageMemory(
        parameter_bytes=element_bytes * (shard + gathered if zero == MAX_ZERO_STAGE else params),
        gradient_bytes=precision.reduction.num_bytes * (shard if zero >= 2 else params),
        optimizer_bytes=OPTIMIZER_BYTES * (shard if zero >= 1 else params),
        activation_bytes=activations,
    )
