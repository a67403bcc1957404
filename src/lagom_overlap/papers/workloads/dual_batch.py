"""Expert parallelism with two batches that take turns: an all-to-all of one during the other's attention or experts.

The Lagom paper says only "two batch overlapping". Order as in DeepSeek-V3 (arXiv 2412.19437, section 3.2): attention of
batch 1 during the dispatch of batch 0, experts of batch 0 during the dispatch of batch 1, and so on; backward mirrored.

Departures: every layer has experts (DeepSeek-MoE's first layer is dense); shared experts run with attention; the
exchange is balanced.
"""

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.papers.workloads.halves import HALVES, HalvesBuilder
from lagom_overlap.papers.workloads.parts import LayerParts
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel


def dual_batch_iteration(
    model: TransformerModel, *, expert: int, micro_batch: int, seq_len: int, recompute: bool = False
) -> Iteration:
    """Forward and backward of two batches of half of `micro_batch` sequences each.

    With `recompute` a layer keeps its input only: its forward, dispatch included, runs again before its backward.

    Raises:
        JobError: if the model has no experts that `expert` divides, or the micro-batch is odd.
    """
    if expert < 2 or not model.num_experts or model.num_experts % expert:
        raise JobError(
            f"dual batch: expert is {expert}, must be at least 2 and divide the experts of {model.name!r} "
            f"({model.num_experts})"
        )
    if micro_batch < 2 or micro_batch % 2:
        raise JobError(f"dual batch: micro_batch is {micro_batch}, must be even: it is cut into two batches")
    parts = LayerParts(model=model, batch=micro_batch // 2, seq_len=seq_len)
    exchange = Collective(CollectiveKind.ALL_TO_ALL, parts.routed_bytes, expert)
    build = HalvesBuilder("ep")
    for half in HALVES:
        build.compute(half, "embed", parts.embedding())
    for layer in range(model.num_layers):
        for name, works, sends in (
            ("attention", parts.attention(), "dispatch"),
            ("experts", parts.experts(), "combine"),
        ):
            for half in HALVES:
                build.compute(half, f"fwd.{layer}.{name}", works)
                build.send(half, f"fwd.{layer}.{sends}", exchange)
    for half in HALVES:
        build.compute(half, "fwd.head", parts.head())
        build.compute(half, "bwd.head", parts.head_backward())
        build.send(half, "bwd.head.combine", exchange)
    for layer in reversed(range(model.num_layers)):
        if recompute:
            _forward_again(build, parts, layer, exchange)
        for half in HALVES:
            name = f"bwd.{layer}.dispatch"
            build.backward(half, f"bwd.{layer}.experts", parts.experts_backward(), name, exchange)
        for half in HALVES:
            if layer:
                name = f"bwd.{layer}.combine"
                build.backward(half, f"bwd.{layer}.attention", parts.attention_backward(), name, exchange)
                continue
            last = parts.attention_backward()
            build.compute(half, "bwd.0.attention", (*last.inputs, *last.weights))
    return build.iteration(f"{model.name}-ep{expert}")


def _forward_again(build: HalvesBuilder, parts: LayerParts, layer: int, exchange: Collective) -> None:
    """A layer's forward up to what its backward needs; what the experts gave is not combined again."""
    for half in HALVES:
        build.compute(half, f"again.{layer}.attention", parts.attention())
        build.send(half, f"again.{layer}.dispatch", exchange)
    for half in HALVES:
        build.compute(half, f"again.{layer}.experts", parts.experts())
