"""Tensor parallelism with Domino's two half-batches (arXiv 2409.15241): an all-reduce of one half during the other.

Every layer reduces after attention and after the MLP, forward and backward, for each half. One micro-batch; gradients
are reduced over data-parallel ranks after the last one, which is not here (`table2.paper_step`).
"""

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.papers.workloads.halves import HALVES, HalvesBuilder
from lagom_overlap.papers.workloads.parts import LayerParts
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel


def domino_iteration(model: TransformerModel, *, tensor: int, micro_batch: int, seq_len: int) -> Iteration:
    """Forward and backward of one micro-batch of `micro_batch` sequences, half of them per half-batch.

    Raises:
        JobError: if the micro-batch is odd, or `tensor` does not divide the model.
    """
    if micro_batch < 2 or micro_batch % 2:
        raise JobError(f"domino: micro_batch is {micro_batch}, must be even: it is cut into two halves")
    for what, size in (("heads", model.num_heads), ("ffn", model.ffn), ("qkv columns", model.qkv_columns)):
        if tensor < 2 or size % tensor:
            raise JobError(f"domino: tensor is {tensor}, must be at least 2 and divide the model's {what} ({size})")
    parts = LayerParts(model=model, batch=micro_batch // 2, seq_len=seq_len, tensor=tensor)
    reduce = Collective(CollectiveKind.ALL_REDUCE, parts.activation_bytes, tensor)
    build = HalvesBuilder("tp")
    for half in HALVES:
        build.compute(half, "embed", parts.embedding())
    for layer in range(model.num_layers):
        for name, works in (("attention", parts.attention()), ("mlp", parts.mlp())):
            for half in HALVES:
                build.compute(half, f"fwd.{layer}.{name}", works)
                build.send(half, f"fwd.{layer}.{name}.reduce", reduce)
    for half in HALVES:
        build.compute(half, "fwd.head", parts.head())
        build.compute(half, "bwd.head", parts.head_backward())
        build.send(half, "bwd.head.reduce", reduce)
    for layer in reversed(range(model.num_layers)):
        for name, backward in (("mlp", parts.mlp_backward()), ("attention", parts.attention_backward())):
            for half in HALVES:
                build.backward(half, f"bwd.{layer}.{name}", backward, f"bwd.{layer}.{name}.reduce", reduce)
    return build.iteration(f"{model.name}-tp{tensor}")
