"""Which part of the model a pipeline stage holds: its layers, the embedding on the first, the head on the last."""

from dataclasses import dataclass

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import Gemm, MemoryBound
from lagom_overlap.workload.parallel.layer import ELEMENT_BYTES, layer_params_per_gpu
from lagom_overlap.workload.parallel.layout import ParallelLayout
from lagom_overlap.workload.parallel.steps import Access, CommStep, ComputeStep, GroupKind, Pass, Step, Touch

CROSS_ENTROPY_BYTES = 36
"""Per logit, forward: cast to FP32 (6), maximum (4), subtraction (8), exponential (8), sum (2), quotient (8)."""
CROSS_ENTROPY_BACKWARD_BYTES = 22
"""Per logit: minus one hot (8), times the loss's gradient (8), cast to 2 bytes (6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A pipeline stage: layers per chunk, whether it begins with the embedding and ends with the head, parameters.

    `num_params` and `num_expert_params` are per GPU; the latter are part of the former and are reduced over data /
    expert ranks only. `layer_share` is the layers' share of the parameters, the rest are tables. `tied_params` are
    embedding gradients summed between first and last stage.
    """

    rank: int
    layers_per_chunk: int
    chunks: int
    has_embedding: bool
    has_head: bool
    num_params: int
    num_expert_params: int
    tied_params: int
    layer_share: float

    def shard_params(self, layout: ParallelLayout) -> int:
        """Parameters per GPU when they are sharded: all ranks share the dense ones, data / expert ranks the experts."""
        dense = self.num_params - self.num_expert_params
        return dense // layout.data + self.num_expert_params * layout.expert // layout.data

    def reduced_params(self, layout: ParallelLayout) -> int:
        """Parameters whose reduction over all data ranks sends as much as reducing each over its own ranks does."""
        if layout.data == 1:
            return 0
        dense = self.num_params - self.num_expert_params
        return dense + self.num_expert_params * (layout.data - layout.expert) // (layout.data - 1)

    @property
    def num_layers(self) -> int:
        """Layers of all its chunks."""
        return self.layers_per_chunk * self.chunks


def plan_stages(model: TransformerModel, layout: ParallelLayout) -> tuple[StagePlan, ...]:
    """The stages of a layout that `check_model` has accepted."""
    per_chunk = model.num_layers // layout.num_chunks
    num_layers = per_chunk * layout.chunks
    layer = layer_params_per_gpu(model, layout)
    experts = model.expert_layer_params // (layout.tensor * layout.expert)
    table = model.vocab * model.hidden // layout.tensor
    stages = []
    for rank in range(layout.pipeline):
        first, last = rank == 0, rank == layout.pipeline - 1
        params = num_layers * layer
        params += (table + model.learned_positions * model.hidden) * first
        params += (0 if model.tied_embeddings and first else table) * last
        tied = table if model.tied_embeddings and layout.pipeline > 1 and (first or last) else 0
        stages.append(
            StagePlan(
                rank=rank,
                layers_per_chunk=per_chunk,
                chunks=layout.chunks,
                has_embedding=first,
                has_head=last,
                num_params=params,
                num_expert_params=num_layers * experts,
                tied_params=tied,
                layer_share=num_layers * layer / params,
            )
        )
    return tuple(stages)


def _touch(name: str, num_bytes: int, access: Access = Access.STREAM, num_launches: int = 1) -> ComputeStep:
    return ComputeStep(name, Touch(MemoryBound(num_bytes), access), num_launches)


def embedding_passes(model: TransformerModel, layout: ParallelLayout, seq_len: int) -> tuple[Pass, Pass]:
    """Forward and backward of the embedding on one GPU; its vocabulary is cut by tensor parallelism."""
    elements = layout.micro_batch * seq_len * model.hidden
    forward: list[Step] = [_touch("lookup", 4 * elements, num_launches=3)]
    if layout.tensor > 1:
        kind = CollectiveKind.REDUCE_SCATTER if layout.sequence_parallel else CollectiveKind.ALL_REDUCE
        forward.append(CommStep("embedding_reduce", kind, elements * ELEMENT_BYTES, GroupKind.TENSOR))
    whole = elements // layout.tensor if layout.sequence_parallel else elements
    if model.learned_positions:
        forward.append(_touch("positions", 6 * whole, num_launches=2))
    if model.dropout:
        forward.append(_touch("embedding_dropout", 5 * whole))
    table = model.vocab * model.hidden // layout.tensor
    backward: list[Step] = [
        _touch("scatter", 8 * elements + 2 * ELEMENT_BYTES * table, num_launches=4),
    ]
    return Pass(tuple(forward)), Pass(tuple(backward))


def head_passes(model: TransformerModel, layout: ParallelLayout, seq_len: int) -> tuple[Pass, Pass]:
    """Forward and backward of the last norm, the logits and the cross entropy in FP32, on one GPU."""
    tokens, h = layout.micro_batch * seq_len, model.hidden
    columns = model.vocab // layout.tensor
    whole = tokens // layout.tensor if layout.sequence_parallel else tokens
    gather: list[Step] = []
    if layout.sequence_parallel:
        num_bytes = tokens * h * ELEMENT_BYTES
        gather = [CommStep("logits_gather", CollectiveKind.ALL_GATHER, num_bytes, GroupKind.TENSOR)]
    forward: list[Step] = [
        _touch("norm", 4 * whole * h),
        *gather,
        ComputeStep("logits", Gemm(tokens, columns, h, ELEMENT_BYTES)),
        _touch("cross_entropy", CROSS_ENTROPY_BYTES * tokens * columns, num_launches=10),
    ]
    backward: list[Step] = [
        _touch("cross_entropy_d", CROSS_ENTROPY_BACKWARD_BYTES * tokens * columns, num_launches=4),
        ComputeStep("logits_d", Gemm(tokens, h, columns, ELEMENT_BYTES)),
    ]
    if layout.tensor > 1:
        kind = CollectiveKind.REDUCE_SCATTER if layout.sequence_parallel else CollectiveKind.ALL_REDUCE
        forward.append(CommStep("loss_reduce", CollectiveKind.ALL_REDUCE, 3 * 4 * tokens, GroupKind.TENSOR))
        backward.append(CommStep("logits_reduce_d", kind, tokens * h * ELEMENT_BYTES, GroupKind.TENSOR))
    backward += [
        ComputeStep("logits_w", Gemm(columns, h, tokens, ELEMENT_BYTES)),
        _touch("norm_d", 6 * whole * h, num_launches=2),
    ]
    return Pass(tuple(forward)), Pass(tuple(backward))
