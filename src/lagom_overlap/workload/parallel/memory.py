"""Bytes that one GPU needs: parameters, gradients, optimizer, activations.

Activations follow Korthikanti et al. (arXiv 2205.05198, section 4): s b h (10 + 24/t + 5 a s / (h t)) per layer, all
of it over t with sequence parallelism, without the scores under selective recomputation or flash attention, and only
the layer's input under full recomputation (plus one layer that is being computed again). Here the terms are counted
from the model's own shapes (gated MLPs, fewer key-value heads, experts); for a GPT they give the formula.

Not counted: the CUDA context, communication buffers, fragmentation of the allocator.
"""

from dataclasses import dataclass

from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.layer import ELEMENT_BYTES, layer_params_per_gpu
from lagom_overlap.workload.parallel.layout import MAX_ZERO_STAGE, ParallelLayout, Recompute
from lagom_overlap.workload.parallel.schedule import most_in_flight, stage_slots
from lagom_overlap.workload.parallel.stage import StagePlan

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


def layer_activation_bytes(model: TransformerModel, layout: ParallelLayout, seq_len: int, recompute: Recompute) -> int:
    """What one layer keeps of one micro-batch for its backward."""
    tokens, h, t = layout.micro_batch * seq_len, model.hidden, layout.tensor
    around = t if layout.sequence_parallel else 1
    if recompute is Recompute.FULL:
        return ELEMENT_BYTES * tokens * h // around
    masks = (1 if model.dropout else 0) * 2
    whole = tokens * h * (4 * ELEMENT_BYTES + masks) // around
    visits = model.experts_per_token or 1
    ffn = model.ffn * visits + model.shared_ffn
    up = ffn * (2 if model.gated else 1)
    inner = ELEMENT_BYTES * tokens * (model.qkv_columns + model.attention_columns + up + ffn) // t
    if model.num_experts:
        inner += 2 * ELEMENT_BYTES * tokens * visits * h
    scores = 0
    if not layout.flash_attention and recompute is Recompute.NONE:
        per_score = ELEMENT_BYTES + (ELEMENT_BYTES + 1 if model.dropout else 0)
        scores = per_score * layout.micro_batch * model.num_heads * seq_len * seq_len // t
    return whole + inner + scores


def stage_memory(model: TransformerModel, layout: ParallelLayout, stage: StagePlan, seq_len: int) -> StageMemory:
    """The peak of one GPU of a stage."""
    zero = layout.zero_stage
    params, shard = stage.num_params, stage.shard_params(layout)
    in_flight = most_in_flight(stage_slots(layout, stage.rank))
    per_chunk = stage.layers_per_chunk * layer_activation_bytes(model, layout, seq_len, layout.recompute)
    activations = in_flight * per_chunk
    if layout.recompute is not Recompute.NONE:
        activations += layer_activation_bytes(model, layout, seq_len, Recompute.NONE)
    if stage.has_head:
        activations += LOGIT_BYTES * layout.micro_batch * seq_len * model.vocab // layout.tensor
    gathered = 0
    if zero == MAX_ZERO_STAGE:
        experts = model.expert_layer_params // (layout.tensor * layout.expert)
        whole = layer_params_per_gpu(model, layout) - (experts if layout.data == layout.expert else 0)
        gathered = min(layout.prefetch + 1, stage.num_layers) * whole
    return StageMemory(
        parameter_bytes=ELEMENT_BYTES * (shard + gathered if zero == MAX_ZERO_STAGE else params),
        gradient_bytes=layout.gradient_bytes * (shard if zero >= 2 else params),
        optimizer_bytes=OPTIMIZER_BYTES * (shard if zero >= 1 else params),
        activation_bytes=activations,
    )
