"""What "Communication Overlap in Megatron-LM" (Dec 2025) overlaps, as iterations: one kind of communication each.

Model, sizes and degrees are the notes': a 70-billion-parameter LLaMA 3 on 64 GPUs, tensor 4, pipeline 4, data 4, 2048
tokens. A rank holds 20 layers. Each iteration has only the communication whose hidden share it shows.

- `gradient_iteration`: backward of the last micro-batch during reductions of fp32 gradients, one bucket a layer (a
  layer's quarter has 214 M parameters; the bucket rule max(40 M, 1 M x data) closes one with every layer).
- `gather_iteration`: forward of the first micro-batch during gathers of the next layer's bf16 parameters.
- `tensor_iteration`: a layer with sequence parallelism, forward and backward. In bulk only backward overlaps: the
  gather for the weight's gradient during the input's, the scatter of the input's during the weight's. With `splits`,
  every gather and scatter is cut and pipelined with its product (userbuffers).
"""

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.papers.workloads.layer_parts import ELEMENT_BYTES, LayerParts, Works
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import CommOp, CompOp, Gemm, Op

GRADIENT_BYTES = 4
"""fp32."""


def _append(ops: list[Op], prefix: str, works: Works, deps: tuple[str, ...] = ()) -> str:
    for name, work in works:
        ops.append(CompOp(name=f"{prefix}.{name}", work=work, deps=deps))
        deps = ()
    return ops[-1].name


def gradient_iteration(parts: LayerParts, *, num_layers: int, data: int) -> Iteration:
    """Backward of `num_layers` layers, each followed by the reduction of its gradients during the next."""
    size = parts.model.layer_params // parts.tensor * GRADIENT_BYTES
    ops: list[Op] = []
    for layer in reversed(range(num_layers)):
        for name, backward in (("mlp", parts.mlp_backward()), ("attention", parts.attention_backward())):
            last = _append(ops, f"{layer}.{name}", (*backward.inputs, *backward.weights))
        collective = Collective(CollectiveKind.REDUCE_SCATTER, size, data)
        ops.append(CommOp(name=f"{layer}.reduce", collective=collective, communicator="dp", deps=(last,)))
    return Iteration("gradients", tuple(ops))


def gather_iteration(parts: LayerParts, *, num_layers: int, data: int) -> Iteration:
    """Forward of `num_layers` layers, the parameters of the next one gathered during each."""
    collective = Collective(CollectiveKind.ALL_GATHER, parts.model.layer_params // parts.tensor * ELEMENT_BYTES, data)
    ops: list[Op] = []
    last: tuple[str, ...] = ()
    for layer in range(num_layers + 1):
        if layer < num_layers:
            ops.append(CommOp(name=f"{layer}.gather", collective=collective, communicator="dp", deps=last))
        if layer:
            works = (*parts.attention(), *parts.mlp())
            last = (_append(ops, str(layer - 1), works, (f"{layer - 1}.gather",)),)
    return Iteration("gathers", tuple(ops))


class _Tensor:
    """One layer under tensor and sequence parallelism; collectives whole, or in pieces that overlap the product's."""

    def __init__(self, parts: LayerParts, splits: int) -> None:
        self.ops: list[Op] = []
        self._parts, self._splits, self._number = parts, splits, 0

    def _comm(self, kind: CollectiveKind, share: int, deps: tuple[str, ...]) -> str:
        size = self._parts.activation_bytes // share
        name = f"{self._number}.{kind}"
        self._number += 1
        collective = Collective(kind, size, self._parts.tensor)
        self.ops.append(CommOp(name=name, collective=collective, communicator="tp", deps=deps))
        return name

    def _comp(self, work: Gemm, deps: tuple[str, ...] = ()) -> str:
        name = f"{self._number}.gemm"
        self._number += 1
        self.ops.append(CompOp(name=name, work=work, deps=deps))
        return name

    def _last(self) -> tuple[str, ...]:
        comps = [op.name for op in self.ops if isinstance(op, CompOp)]
        return (comps[-1],) if comps else ()

    def gather_product(self, product: Gemm) -> None:
        """A gather and the product that reads it, piece by piece."""
        before = self._last()
        piece = Gemm(product.m // self._splits, product.n, product.k)
        for _ in range(self._splits):
            gathered = self._comm(CollectiveKind.ALL_GATHER, self._splits, before)
            self._comp(piece, (gathered,))

    def product_scatter(self, product: Gemm) -> str:
        """A product and the scatter of its result, piece by piece; the last scatter's name."""
        piece = Gemm(product.m // self._splits, product.n, product.k)
        scattered = ""
        for _ in range(self._splits):
            scattered = self._comm(CollectiveKind.REDUCE_SCATTER, self._splits, (self._comp(piece),))
        return scattered

    def bulk_backward(self, data: Gemm, weight: Gemm) -> str:
        """A column-parallel backward: gather during the input's gradient, scatter during the weight's."""
        gathered = self._comm(CollectiveKind.ALL_GATHER, 1, self._last())
        done = self._comp(data)
        scattered = self._comm(CollectiveKind.REDUCE_SCATTER, 1, (done,))
        self._comp(weight, (gathered,))
        return scattered

    def wait(self, name: str, work: Gemm) -> None:
        """A product that waits for a collective."""
        self._comp(work, (name,))


def tensor_iteration(parts: LayerParts, *, splits: int = 1) -> Iteration:
    """One layer's forward and backward; `splits` pieces per gather and scatter where a product goes with it.

    Raises:
        JobError: if `splits` does not divide the tokens.
    """
    model, tokens, tensor = parts.model, parts.tokens, parts.tensor
    if splits < 1 or tokens % splits:
        raise JobError(f"splits is {splits}, must divide the tokens ({tokens})")
    h, qkv, attention = model.hidden, model.qkv_columns // tensor, model.attention_columns // tensor
    up, ffn = model.up_columns // tensor, model.ffn // tensor
    build = _Tensor(parts, splits)
    pending = ""
    for columns, depth in ((qkv, attention), (up, ffn)):
        if pending:
            build.wait(pending, Gemm(max(1, tokens // tensor), 8, h))
        build.gather_product(Gemm(tokens, columns, h))
        pending = build.product_scatter(Gemm(tokens, h, depth))
    for columns, depth in ((up, ffn), (qkv, attention)):
        build.wait(pending, Gemm(max(1, tokens // tensor), 8, h))
        build.gather_product(Gemm(tokens, depth, h))
        build.wait(pending, Gemm(h, depth, tokens))
        pending = build.bulk_backward(Gemm(tokens, h, columns), Gemm(h, columns, tokens))
    build.wait(pending, Gemm(max(1, tokens // tensor), 8, h))
    return Iteration(f"{model.name}-tp{tensor}-sp", tuple(build.ops))


def notes_parts(model: TransformerModel, micro_batch: int) -> LayerParts:
    """The notes' layer: tensor 4, 2048 tokens a sequence."""
    return LayerParts(model=model, batch=micro_batch, seq_len=2048, tensor=4)
