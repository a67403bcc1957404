"""One step of fully sharded data parallelism (FSDP2): forward and backward, with gathers and reductions beside them.

Units of sharding: the embedding, each layer, and the head with its norm (as torchtitan groups them). Unit k is computed
when its all-gather has ended. With `prefetch` p, the gather of unit k + p may start when unit k does; in backward that
of unit k - p. A unit's gradients are reduced beside the backward of the unit before it. In the paper's words
(arXiv 2602.20656, section 4.3, Fig. 8) pattern 1 is an all-gather beside a forward layer, pattern 2 a reduce-scatter
and an all-gather beside a backward layer.

One communicator and one communication stream: the collectives of a step are serialised in the order in which FSDP2
issues them, the reduction of unit k + 1 before the gather of unit k - p.

Departures from PyTorch's FSDP2:
- no copies into and out of the gathered buffer (FSDP1, which the paper's PyTorch 2.3 has, gathers in place);
- a gather waits for the start of a unit, FSDP2's for its copy-out, a little later;
- the head stays gathered until its backward has ended, every layer is freed and gathered again;
- a tied head is gathered again as if it were its own unit, and reduced once, with the embedding;
- no recomputation, no optimizer, one micro-batch.
"""

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import Attention, CommOp, CompOp, Gemm, MemoryBound, Op, Work

_FLASH_BACKWARD_PASSES = 2.5
"""Products of a flash attention's backward over its forward's: five against two."""

_NamedWorks = list[tuple[str, Work]]


class _Shapes:
    """The works of one micro-batch of `model`; byte counts are reads plus writes of activations."""

    def __init__(self, model: TransformerModel, micro_batch: int, seq_len: int, element_bytes: int) -> None:
        self._model = model
        self._micro_batch = micro_batch
        self._seq_len = seq_len
        self.element_bytes = element_bytes
        self._tokens = micro_batch * seq_len

    def gemm(self, m: int, n: int, k: int) -> Gemm:
        return Gemm(m, n, k, self.element_bytes)

    def moved(self, tensors: int, columns: int) -> MemoryBound:
        """An operator that touches `tensors` activations of tokens x columns."""
        return MemoryBound(tensors * self._tokens * columns * self.element_bytes)

    def attention(self, passes: float) -> Attention:
        return Attention(
            batch=self._micro_batch,
            num_heads=self._model.num_heads,
            seq_len=self._seq_len,
            head_dim=self._model.head_dim,
            passes=passes,
            element_bytes=self.element_bytes,
        )

    def token_ids(self) -> MemoryBound:
        """The batch's 8-byte ids, copied once."""
        return MemoryBound(16 * self._tokens)

    def embed(self) -> _NamedWorks:
        return [("lookup", self.moved(2, self._model.hidden))]

    def embed_backward(self) -> _NamedWorks:
        return [("scatter", self.moved(3, self._model.hidden))]

    def layer(self) -> _NamedWorks:
        m, t, h = self._model, self._tokens, self._model.hidden
        works: _NamedWorks = [
            ("norm", self.moved(2, h)),
            ("qkv", self.gemm(t, m.qkv_columns, h)),
            ("attention", self.attention(1.0)),
            ("out", self.gemm(t, h, m.attention_columns)),
        ]
        if m.norms_per_layer == 2:
            works += [("add1", self.moved(3, h)), ("norm2", self.moved(2, h))]
        return [
            *works,
            ("up", self.gemm(t, m.up_columns, h)),
            ("act", self.moved(3 if m.gated else 2, m.ffn)),
            ("down", self.gemm(t, h, m.ffn)),
            ("add", self.moved(3, h)),
        ]

    def layer_backward(self) -> _NamedWorks:
        """Per matrix a product for the input's gradient (d) and one for the weight's (w)."""
        m, t, h = self._model, self._tokens, self._model.hidden
        works: _NamedWorks = [
            ("down_d", self.gemm(t, m.ffn, h)),
            ("down_w", self.gemm(h, m.ffn, t)),
            ("act_d", self.moved(5 if m.gated else 3, m.ffn)),
            ("up_d", self.gemm(t, h, m.up_columns)),
            ("up_w", self.gemm(m.up_columns, h, t)),
        ]
        if m.norms_per_layer == 2:
            works += [("norm2_d", self.moved(4, h))]
        return [
            *works,
            ("out_d", self.gemm(t, m.attention_columns, h)),
            ("out_w", self.gemm(h, m.attention_columns, t)),
            ("attention_d", self.attention(_FLASH_BACKWARD_PASSES)),
            ("qkv_d", self.gemm(t, h, m.qkv_columns)),
            ("qkv_w", self.gemm(m.qkv_columns, h, t)),
            ("norm_d", self.moved(4, h)),
        ]

    def head(self) -> _NamedWorks:
        """The last norm, the logits and the loss."""
        m, t = self._model, self._tokens
        return [
            ("norm", self.moved(2, m.hidden)),
            ("logits", self.gemm(t, m.vocab, m.hidden)),
            ("loss", self.moved(2, m.vocab)),
        ]

    def head_backward(self) -> _NamedWorks:
        m, t = self._model, self._tokens
        return [
            ("logits_d", self.gemm(t, m.hidden, m.vocab)),
            ("logits_w", self.gemm(m.vocab, m.hidden, t)),
            ("norm_d", self.moved(4, m.hidden)),
        ]


class _Step:
    """Collects a step's operators in the order in which they are issued; unit 0 is the embedding, the last the head."""

    def __init__(self, model: TransformerModel, shapes: _Shapes, num_ranks: int, prefetch: int) -> None:
        self.ops: list[Op] = []
        self._tied = model.tied_embeddings
        self._shapes = shapes
        self._num_ranks = num_ranks
        self._prefetch = prefetch
        self._units = ["embed", *(f"layer{i}" for i in range(model.num_layers)), "head"]
        self._params = [model.embedding_params, *[model.layer_params] * model.num_layers, model.head_params]
        self._head = len(self._units) - 1

    def forward(self) -> None:
        """Unit k beside the gather of unit k + prefetch."""
        works = [self._shapes.embed(), *[self._shapes.layer()] * (self._head - 1), self._shapes.head()]
        last = self._run("input", [("ids", self._shapes.token_ids())])
        for k in range(min(self._prefetch, len(self._units))):
            self._gather(k, "fwd", ())
        for k, unit in enumerate(self._units):
            if k + self._prefetch <= self._head:
                self._gather(k + self._prefetch, "fwd", (last,))
            last = self._run(f"fwd.{unit}", works[k], (f"fwd.{unit}.gather",))

    def backward(self, element_bytes: int) -> None:
        """Unit k beside the reduction of unit k + 1 and the gather of unit k - prefetch; `element_bytes` per gradient.

        The last layers are gathered again as soon as they were freed, which is when the head starts.
        """
        top = self._head - 1
        for k in range(top, max(top - self._prefetch, 0), -1):
            self._gather(k, "bwd", (f"fwd.{self._units[top]}.add",))
        last = self._run("bwd.head", self._shapes.head_backward())
        for k in range(top, -1, -1):
            self._reduce(k + 1, element_bytes, last)
            if k - self._prefetch > 0:
                self._gather(k - self._prefetch, "bwd", (last,))
            works: _NamedWorks = self._shapes.embed_backward()
            deps: tuple[str, ...] = ()
            if k:
                works, deps = self._shapes.layer_backward(), (f"bwd.{self._units[k]}.gather",)
            last = self._run(f"bwd.{self._units[k]}", works, deps)
        self._reduce(0, element_bytes, last)

    def _run(self, prefix: str, works: _NamedWorks, deps: tuple[str, ...] = ()) -> str:
        """The last operator's name; only the first one waits for `deps`, the rest follow it on the stream."""
        for name, work in works:
            self.ops.append(CompOp(name=f"{prefix}.{name}", work=work, deps=deps))
            deps = ()
        return self.ops[-1].name

    def _gather(self, k: int, phase: str, deps: tuple[str, ...]) -> None:
        num_bytes = self._params[k] * self._shapes.element_bytes
        self._comm(f"{phase}.{self._units[k]}.gather", CollectiveKind.ALL_GATHER, num_bytes, deps)

    def _reduce(self, k: int, element_bytes: int, dep: str) -> None:
        if self._tied and k == self._head:
            return
        num_params = self._params[self._head if self._tied and k == 0 else k]
        name = f"bwd.{self._units[k]}.reduce"
        self._comm(name, CollectiveKind.REDUCE_SCATTER, num_params * element_bytes, (dep,))

    def _comm(self, name: str, kind: CollectiveKind, num_bytes: int, deps: tuple[str, ...]) -> None:
        collective = Collective(kind, num_bytes, self._num_ranks)
        self.ops.append(CommOp(name=name, collective=collective, communicator="fsdp", deps=deps))


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise JobError(f"fsdp: {name} is {value}, must be at least 1")


def fsdp_iteration(
    model: TransformerModel,
    *,
    num_ranks: int,
    micro_batch: int,
    seq_len: int,
    prefetch: int = 1,
    element_bytes: int = 2,
    gradient_element_bytes: int = 2,
) -> Iteration:
    """Forward and backward of one micro-batch under FSDP2 over `num_ranks` ranks.

    Parameters are gathered and computed with in `element_bytes` per element (bf16: 2), gradients reduced in
    `gradient_element_bytes`. Layer i's operators are `fwd.layer<i>.qkv`, `fwd.layer<i>.gather`, `bwd.layer<i>.reduce`
    and so on; the embedding's and the head's units are `embed` and `head`.

    Raises:
        JobError: if a count is below 1, there are fewer than two ranks, or the model is a mixture of experts.
    """
    if model.num_experts:
        raise JobError(f"fsdp: model {model.name!r} is a mixture of experts; its step is built by workload.parallel")
    _check_counts(
        micro_batch=micro_batch,
        seq_len=seq_len,
        prefetch=prefetch,
        element_bytes=element_bytes,
        gradient_element_bytes=gradient_element_bytes,
    )
    step = _Step(model, _Shapes(model, micro_batch, seq_len, element_bytes), num_ranks, prefetch)
    step.forward()
    step.backward(gradient_element_bytes)
    return Iteration(f"{model.name}-fsdp{num_ranks}", tuple(step.ops))
