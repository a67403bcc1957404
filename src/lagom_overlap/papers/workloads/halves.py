"""Collects the operators of two half-batches that take turns on one computation stream, with one communication stream.

Half 1 computes while half 0's collective runs, and the other way round: Domino's split of the batch under tensor
parallelism (arXiv 2409.15241), the dual batches of expert parallelism (DeepSeek-V3, arXiv 2412.19437).
"""

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.papers.workloads.layer_parts import Backward, LayerParts, Works
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import CommOp, CompOp, Op

HALVES = (0, 1)
"""Their numbers."""


class HalvesBuilder:
    """Operators in issue order; each half remembers the collective that its next computation waits for."""

    def __init__(self, communicator: str) -> None:
        self._ops: list[Op] = []
        self._communicator = communicator
        self._pending: dict[int, str | None] = dict.fromkeys(HALVES)

    def compute(self, half: int, prefix: str, works: Works) -> None:
        """Runs works of a half after its pending collective."""
        waits = self._pending[half]
        deps = () if waits is None else (waits,)
        for name, work in works:
            self._ops.append(CompOp(name=f"{prefix}.{name}.{half}", work=work, deps=deps))
            deps = ()
        if works:
            self._pending[half] = None

    def send(self, half: int, name: str, collective: Collective) -> None:
        """Issues a collective of what the half computed last; its next computation waits for it."""
        last = self._ops[-1].name
        comm = CommOp(
            name=f"{name}.{half}",
            collective=collective,
            communicator=self._communicator,
            deps=(last,),
        )
        self._ops.append(comm)
        self._pending[half] = comm.name

    def backward(self, half: int, prefix: str, work: Backward, name: str, collective: Collective) -> None:
        """Gradients of inputs, their collective, and concurrently the gradients of weights."""
        self.compute(half, prefix, work.inputs)
        self.send(half, name, collective)
        for what, weight in work.weights:
            self._ops.append(CompOp(name=f"{prefix}.{what}.{half}", work=weight))

    def iteration(self, name: str) -> Iteration:
        """What was collected."""
        return Iteration(name, tuple(self._ops))


def domino_iteration(model: TransformerModel, *, tensor: int, micro_batch: int, seq_len: int) -> Iteration:
    """Forward and backward of one micro-batch of `micro_batch` sequences, half of them per half-batch.

    Tensor parallelism as in Domino (arXiv 2409.15241): an all-reduce of one half during the other. Every layer reduces
    after attention and after the MLP, forward and backward, for each half. Gradients are reduced over data-parallel
    ranks after the last micro-batch, which is not here (`table2.paper_step`).

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


def dual_batch_iteration(
    model: TransformerModel, *, expert: int, micro_batch: int, seq_len: int, recompute: bool = False
) -> Iteration:
    """Forward and backward of two batches of half of `micro_batch` sequences each, under expert parallelism.

    They take turns: an all-to-all of one runs during the other's attention or experts. The Lagom paper says only "two
    batch overlapping". Order as in DeepSeek-V3 (arXiv 2412.19437, section 3.2): attention of batch 1 during the
    dispatch of batch 0, experts of batch 0 during the dispatch of batch 1, and so on; backward mirrored.

    Departures: every layer has experts (DeepSeek-MoE's first layer is dense); shared experts run with attention; the
    exchange is balanced.

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
