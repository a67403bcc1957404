"""The operators of one transformer layer and of the tables around the layers, of one micro-batch on one rank.

Sources: Megatron-LM (arXiv 1909.08053, Fig. 3: two all-reduces forward, two backward; arXiv 2205.05198, Fig. 5: with
sequence parallelism each becomes a reduce-scatter and an all-gather, and what tensor parallelism leaves whole is cut
along the sequence). In backward with sequence parallelism the layer's input is gathered again during the product for
the input's gradient, and that gradient's reduce-scatter runs during the product for the weight's (Megatron-LM,
`linear_with_grad_accumulation_and_async_allreduce`). Experts: one all-to-all before and one after them (GShard, arXiv
2006.16668), tokens spread evenly; with a shared MLP, that is computed in turn.

Bytes of memory-bound kernels are counted by hand per element of a 2-byte activation: reads plus writes plus dropout's
1-byte mask. Without flash attention the scores exist in memory: Megatron's fused scale-mask-softmax needs batch x heads
per GPU to be a multiple of 4 (`fused_softmax.py`); otherwise five kernels in FP32 take its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import Access, Attention, Gemm, MemoryBound, Origin, Phase
from lagom_overlap.workload.parallel.layout import ParallelLayout, Recompute
from lagom_overlap.workload.precision import Precision, ProductFormat
from lagom_overlap.workload.sharding import ShardSpec
from lagom_overlap.workload.step.axes import (
    attention_axes,
    elementwise_axes,
    moved_axes,
    product_axes,
    weight_gradient_axes,
)
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.groups import CONTEXT, EXPERTS, TENSOR, StepGroups
from lagom_overlap.workload.step.traffic import Accumulation, RingSteps, Traffic
from lagom_overlap.workload.step.units import Unit, Weight
from lagom_overlap.workload.streams import COMPUTE

_NEVER_CAST: Final = ("router", "logits")
FLASH_BACKWARD_PASSES: Final = 2.5
"""Products of a flash attention's backward over its forward's: five against two."""
SOFTMAX_FUSION_MULTIPLE: Final = 4

_MAIN_GRADIENT_BYTES: Final = 8
"""Per element of an FP32 buffer that a product's epilogue adds to: read and written."""

_FORWARD, _BACKWARD, _WEIGHT = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What every operator of a step is sized by."""

    model: TransformerModel
    layout: ParallelLayout
    groups: StepGroups
    seq_len: int
    precision: Precision
    unit: Unit
    accumulation: Accumulation
    traffic: Traffic
    cast_bytes: int
    hides_tensor: bool
    sequence_first: bool
    experts_apart: bool
    ring: RingSteps | None

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation and of a parameter that is computed with."""
        return self.precision.parameter.num_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank of a context group."""
        return self.layout.micro_batch * self.seq_len // self.layout.context

    @property
    def rows(self) -> int:
        """Tokens of which a rank holds whole activations: with sequence parallelism its share."""
        return self.tokens // self.layout.tensor if self.layout.sequence_parallel else self.tokens


class LayerOps:
    """Adds the operators of layer `layer` (None: the tables around the layers) for micro-batch `batch`."""

    def __init__(
        self, graph: StepGraph, shape: StepShape, *, layer: int | None, batch: int, weights: dict[str, Weight]
    ) -> None:
        self._graph, self._shape, self._layer, self._batch, self._weights = graph, shape, layer, batch, weights
        self._model, self._layout = shape.model, shape.layout
        self._tokens, self._rows, self._element_bytes = shape.tokens, shape.rows, shape.element_bytes
        tensor = shape.layout.tensor
        self._heads = max(1, shape.model.num_heads // tensor)
        self._kv_heads = max(1, shape.model.num_kv_heads // tensor)
        self._again = False
        self._prefix = f"mb{batch}.{'head' if layer is None else f'layer{layer}'}."
        self._module = "head." if layer is None else f"layers.{layer}."
        self.made: dict[str, str] = {}
        self.on_gradient = _ignore

    # Kinds of operator.

    def _name(self, part: str) -> str:
        return f"{self._prefix}{part}_again" if self._again else self._prefix + part

    def _origin(self, phase: Phase, part: str) -> Origin:
        if self._again and phase is _FORWARD:
            phase = Phase.RECOMPUTE
        return Origin(phase=phase, layer=self._layer, microbatch=self._batch, module=self._module + part)

    def _parameters(self, name: str, phase: Phase) -> str:
        """What brings the parameters around matrix `name` in this phase, "" if nothing must."""
        phase = _BACKWARD if self._again else phase
        return self._weights[name].gathered.get((phase, self._batch), "")

    def _around(self, name: str, phase: Phase) -> tuple[str, ...]:
        """The same for what is no matrix: with units of a matrix small parameters do not travel."""
        return () if self._shape.unit is Unit.MATRIX else (self._parameters(name, phase),)

    def _matrix(self, name: str, phase: Phase) -> tuple[str, tuple[str, ...]]:
        """What brings a matrix: as a tensor that can be cut, or as something to wait for."""
        gathered = self._parameters(name, phase)
        if self._shape.unit is Unit.MATRIX and self._weights[name].num_matrices == 1:
            return gathered, ()
        return "", (gathered,)

    def _gemm(self, weight: Weight, m: int, n: int, k: int, result_bytes: int | None = None) -> Gemm:
        width = 1 if self._casts(weight) else self._element_bytes
        return _gemm(m, n, k, width, weight.num_matrices, self._kernels(weight), result_bytes)

    def _kernels(self, weight: Weight) -> int:
        """Launches of what every matrix of a weight needs once: one, or one each."""
        return weight.num_matrices if self._shape.experts_apart else 1

    def _casts(self, weight: Weight) -> bool:
        """Whether the matrix multiplies in FP8: the router and the tables do not."""
        return self._shape.precision.products is ProductFormat.FP8 and weight.name not in _NEVER_CAST

    def _cast(self, name: str, source: str, rows: int, phase: Phase) -> str:
        """The operand that meets matrix `name` in a phase and the matrix itself, scaled and cast to FP8."""
        weight = self._weights[name]
        if not self._casts(weight):
            return source
        part, columns = (f"{name}_cast", weight.inputs) if phase is _FORWARD else (f"{name}_cast_d", weight.outputs)
        num_bytes = self._shape.cast_bytes * (rows * columns + weight.num_params)
        return self._touch(part, (source,), num_bytes, (rows, columns), phase, num_launches=2 * self._kernels(weight))

    def _per_matrix(self, weight: Weight, rows: int) -> int:
        """Rows of one of the weight's matrices; `rows` in all."""
        return max(1, rows // weight.num_matrices)

    def _product(self, name: str, source: str, rows: int | None = None, outputs: int | None = None) -> str:
        """A matrix's product, or the part of it that makes `outputs` columns."""
        weight, rows = self._weights[name], self._tokens if rows is None else rows
        outputs = weight.outputs if outputs is None else outputs
        matrix, also = self._matrix(name, _FORWARD)
        each = self._per_matrix(weight, rows)
        source = self._cast(name, source, rows, _FORWARD)
        self.made[name] = self._graph.comp(
            self._name(name),
            self._gemm(weight, each, outputs, weight.inputs),
            self._origin(_FORWARD, name),
            (source, *also),
            shards=self._cuttable(weight, product_axes(source, matrix, (each, weight.inputs, outputs), (2, 1))),
        )
        return self.made[name]

    def _data_gradient(self, name: str, gradient: str, rows: int | None = None) -> str:
        weight, rows = self._weights[name], self._tokens if rows is None else rows
        matrix, also = self._matrix(name, _BACKWARD)
        each = self._per_matrix(weight, rows)
        gradient = self._cast(name, gradient, rows, _BACKWARD)
        return self._graph.comp(
            self._name(f"{name}_d"),
            self._gemm(weight, each, weight.inputs, weight.outputs),
            self._origin(_BACKWARD, name),
            (gradient, *also),
            shards=self._cuttable(weight, product_axes(gradient, matrix, (each, weight.outputs, weight.inputs))),
        )

    def _weight_gradient(self, name: str, saved: str, gradient: str, rows: int | None = None) -> str:
        weight, rows = self._weights[name], self._tokens if rows is None else rows
        before = () if self._layout.zero_stage == 3 else weight.gradients[-1:]
        each = self._per_matrix(weight, rows)
        fused, added = (self._shape.accumulation is kind for kind in (Accumulation.FUSED, Accumulation.ADDED))
        made = self._graph.comp(
            self._name(f"{name}_w"),
            self._gemm(weight, weight.outputs, weight.inputs, each, _MAIN_GRADIENT_BYTES if fused else None),
            self._origin(_WEIGHT, name),
            (saved, gradient, *(() if added else before)),
            shards=self._cuttable(weight, weight_gradient_axes(saved, gradient, (weight.inputs, each, weight.outputs))),
        )
        self._gradient(name, made, before)
        return made

    def _gradient(self, name: str, made: str, before: Sequence[str]) -> None:
        """Notes a weight's gradient, added to those before by a kernel of its own where no product does that."""
        weight = self._weights[name]
        if self._shape.accumulation is Accumulation.ADDED:
            origin = self._origin(_WEIGHT, name)
            # The new one and the sum read, the sum written.
            work = MemoryBound(3 * self._element_bytes * weight.num_params)
            made = self._graph.comp(self._name(f"{name}_sum"), work, origin, (made, *before))
        weight.gradients.append(made)
        self.on_gradient(weight, made)

    @staticmethod
    def _cuttable(weight: Weight, spec: ShardSpec) -> ShardSpec | None:
        return spec if weight.num_matrices == 1 else None

    def _touch(
        self,
        part: str,
        sources: Sequence[str],
        num_bytes: float,
        shape: tuple[int, int],
        phase: Phase,
        *,
        both: bool = False,
        also: Sequence[str] = (),
        access: Access = Access.STREAM,
        num_launches: int = 1,
    ) -> str:
        """A memory-bound operator over matrices of `shape`, elementwise along columns too if `both`.

        `num_bytes` are those of 2-byte activations.
        """
        rows, columns = shape
        moved = max(1, int(num_bytes * self._element_bytes) // 2)
        self.made[part] = self._graph.comp(
            self._name(part),
            _memory_bound(moved, access, num_launches),
            self._origin(phase, part),
            also,
            shards=elementwise_axes(sources, rows, columns if both else None),
        )
        return self.made[part]

    def _tensor_comm(
        self, part: str, kind: CollectiveKind, source: str, phase: Phase, *, is_async: bool = False
    ) -> str:
        if self._layout.tensor == 1:
            return source
        rows = self._tokens if kind is CollectiveKind.ALL_REDUCE else self._rows
        hidden = self._model.hidden
        copies = not self._shape.sequence_first and kind is not CollectiveKind.ALL_REDUCE
        if copies and kind is CollectiveKind.REDUCE_SCATTER:
            source = self._moved_axis(part, source, phase)
        name = self._graph.comm(
            self._name(part),
            self._shape.groups.collective(kind, self._tokens * hidden * self._element_bytes, TENSOR),
            TENSOR,
            origin=self._origin(phase, part),
            deps=(source,),
            shards=moved_axes(source, rows, hidden),
        )
        if not is_async:
            self._graph.hold_back(COMPUTE, [name])
            if copies and kind is CollectiveKind.ALL_GATHER:
                return self._moved_axis(part, name, phase)
        return name

    def _moved_axis(self, part: str, source: str, phase: Phase) -> str:
        """The copy of a gathered or scattered tensor whose sequence axis is not the first."""
        shape = (self._tokens, self._model.hidden)
        return self._touch(f"{part}_move", (source,), 4 * shape[0] * shape[1], shape, phase)

    def _enter(self, part: str, source: str, phase: Phase, *, is_async: bool = False) -> str:
        """Before a column-parallel product: with sequence parallelism the rows are gathered."""
        if not self._layout.sequence_parallel:
            return source
        return self._tensor_comm(part, CollectiveKind.ALL_GATHER, source, phase, is_async=is_async)

    def _leave(self, part: str, source: str, phase: Phase, *, is_async: bool = False) -> str:
        """After a row-parallel product: the partial sums are added."""
        kind = CollectiveKind.REDUCE_SCATTER if self._layout.sequence_parallel else CollectiveKind.ALL_REDUCE
        return self._tensor_comm(part, kind, source, phase, is_async=is_async)

    def _entering(self, part: str, name: str, source: str) -> str:
        """A column-parallel product of what is gathered; in parts, the two run at once."""
        parts = self._layout.overlap_tensor
        gathered = self._enter(part, source, _FORWARD, is_async=parts)
        made = self._product(name, source if parts else gathered)
        if parts:
            self._in_parts(part, gathered, _FORWARD)
        return made

    def _in_parts(self, part: str, gathered: str, phase: Phase) -> None:
        """What comes after a product that ran with its gather waits for both."""
        self._graph.hold_back(COMPUTE, [gathered])
        if not self._shape.sequence_first:
            self._moved_axis(part, gathered, phase)

    def _leaving(self, part: str, name: str, source: str) -> str:
        """A row-parallel product whose sums are scattered or added; in parts, the two run at once."""
        if not self._layout.overlap_tensor:
            return self._leave(part, self._product(name, source), _FORWARD)
        reduced = self._leave(part, source, _FORWARD, is_async=True)
        made = self._product(name, source)
        self._graph.hold_back(COMPUTE, [reduced])
        return made

    def _exchange(self, part: str, source: str, phase: Phase) -> str:
        if self._layout.expert == 1:
            return source
        rows, hidden = self._routed, self._model.hidden
        call = self._shape.groups.collective(CollectiveKind.ALL_TO_ALL, rows * hidden * self._element_bytes, EXPERTS)
        name = self._graph.comm(
            self._name(part),
            call,
            EXPERTS,
            origin=self._origin(phase, part),
            deps=(source,),
            shards=moved_axes(source, rows, hidden),
        )
        if not self._layout.overlap_experts:
            self._graph.hold_back(COMPUTE, [name])
            return name
        # Two micro-batches take turns: who reads this comes one turn later, with the other one's computations between.
        if self._batch:
            self._graph.hold_back(COMPUTE, [f"mb{self._batch - 1}.{name.partition('.')[2]}"])
        return source

    @property
    def _routed(self) -> int:
        """Rows that this rank sends to experts."""
        return self._tokens * self._model.experts_per_token // self._layout.tensor

    # Forward.

    def forward(self, x: str) -> str:
        """The layer's output."""
        h, rows = self._model.hidden, self._rows
        shape, elements = (rows, h), rows * h
        self.made["x"] = x
        norm = self._normed("norm", x)
        reduced = self._leaving("attention_reduce", "out", self._core(self._entering("attention_gather", "qkv", norm)))
        added = (7 if self._model.dropout else 6) * elements
        middle = self._touch("add1", (reduced, x), added, shape, _FORWARD, both=True)
        norm2 = norm
        if self._model.norms_per_layer == 2:
            norm2 = self._normed("norm2", middle)
        made = self._experts(norm2) if self._model.num_experts else self._mlp(norm2)
        return self._touch("add2", (*made, middle), added, shape, _FORWARD, both=True)

    def recompute(self) -> None:
        """What is computed again before backward; backward then reads it."""
        self._again = True
        match self._layout.recompute:
            case Recompute.FULL:
                self.forward(self.made["x"])
            case Recompute.LAYERS if (self._layer or 0) % 2 == 0:
                self.forward(self.made["x"])
            case Recompute.PRODUCTS:
                self._recompute_products()
            case Recompute.SELECTIVE if not self._layout.flash_attention:
                self._core(self.made["qkv"])
        self._again = False

    def _recompute_products(self) -> None:
        """The operator mode of torchtitan: of q, k, v, o, w1, w3, w2 every second one, attention and scatters are kept.

        What is fused is left out where its reader is kept: with tensor parallelism the scatter after o.
        """
        made, h, rows = self.made, self._model.hidden, self._rows
        gathered = self._enter("attention_gather", self._normed("norm", made["x"]), _FORWARD)
        keys = self._product("qkv", gathered, outputs=self._kv_heads * self._model.head_dim)
        self._rotary("rotary", keys, _FORWARD)
        reduced = self._product("out", made["attention"]) if self._layout.tensor == 1 else made["out"]
        middle = self._touch("add1", (reduced, made["x"]), 6 * rows * h, (rows, h), _FORWARD, both=True)
        norm2 = self._enter("mlp_gather", self._normed("norm2", middle), _FORWARD)
        up = self._product("up", norm2, outputs=self._weights["up"].outputs // 2)
        self._act("act", (up,), self._tokens, self._weights["down"].inputs, _FORWARD)

    def _normed(self, part: str, source: str) -> str:
        rows, h = self._rows, self._model.hidden
        num_bytes = self._shape.traffic.norm[0] * rows * h
        return self._touch(part, (source,), num_bytes, (rows, h), _FORWARD, also=self._around("qkv", _FORWARD))

    def _rotary(self, part: str, source: str, phase: Phase) -> str:
        """Queries and keys turned by their position, where positions are not learned."""
        if self._model.learned_positions:
            return source
        columns = (self._heads + self._kv_heads) * self._model.head_dim
        num_bytes = self._shape.traffic.rotary[phase is not _FORWARD] * self._tokens * columns
        return self._touch(part, (source,), num_bytes, (self._tokens, columns), phase)

    def _attention(self, part: str, sources: Sequence[str], passes: float, phase: Phase) -> str:
        batch = self._layout.micro_batch
        work = Attention(
            batch=batch,
            num_heads=self._heads,
            seq_len=self._shape.seq_len,
            head_dim=self._model.head_dim,
            passes=passes / self._layout.context,
            element_bytes=self._element_bytes,
        )
        moved = self._travel(part, sources[0], phase)
        spec = attention_axes(sources, self._heads, batch, not self._layout.sequence_parallel)
        self.made[part] = self._graph.comp(self._name(part), work, self._origin(phase, part), (), shards=spec)
        self._graph.hold_back(COMPUTE, moved)
        return self._merged(part, phase)

    def _merged(self, part: str, phase: Phase) -> str:
        """The sum of a ring's steps, where each is an attention of its own."""
        ring, further = self._shape.ring, self._layout.context - 1
        if ring is None or not further:
            return self.made[part]
        columns = self._heads * self._model.head_dim
        num_bytes = ring.merge_bytes[phase is not _FORWARD] * further * self._tokens * columns
        source, kernels = self.made[part], 4 * further
        self.made[part] = self._touch(
            f"{part}_merge", (source,), num_bytes, (self._tokens, columns), phase, num_launches=kernels
        )
        return self.made[part]

    def _travel(self, part: str, source: str, phase: Phase) -> list[str]:
        """Keys and values of all context ranks, and in backward their gradients: a ring hidden behind the attention."""
        if self._layout.context == 1:
            return []
        ring, context = self._shape.ring, self._layout.context
        heads = self._kv_heads if ring is None else self._heads
        elements = 2 * heads * self._model.head_dim * self._tokens
        num_bytes = elements * context * self._element_bytes * (2 if ring is None and phase is _BACKWARD else 1)
        call = self._shape.groups.collective(CollectiveKind.ALL_GATHER, num_bytes, CONTEXT)
        origin = self._origin(phase, f"{part}_keys")
        moved = [self._graph.comm(self._name(f"{part}_keys"), call, CONTEXT, origin=origin, deps=(source,))]
        if ring is None:
            return moved
        if phase is _BACKWARD:
            call = self._shape.groups.collective(CollectiveKind.SEND_RECV, 4 * elements, CONTEXT)
            for step in range(context):
                name = self._name(f"{part}_keys_d{step}")
                moved.append(self._graph.comm(name, call, CONTEXT, origin=origin, deps=(source,)))
        if not ring.waits:
            return moved
        self._graph.hold_back(COMPUTE, moved)
        return []

    def _batched(self, part: str, sources: Sequence[str], columns: int, depth: int, phase: Phase) -> str:
        """A product of every head; none that a planner can cut."""
        batch = self._layout.micro_batch * self._heads
        work = Gemm(self._shape.seq_len, columns, depth, self._element_bytes, batch)
        self.made[part] = self._graph.comp(self._name(part), work, self._origin(phase, part), sources)
        return self.made[part]

    def _scores_touch(
        self, part: str, sources: Sequence[str], per_score: int, phase: Phase, num_launches: int = 1
    ) -> str:
        s = self._shape.seq_len
        shape = (self._layout.micro_batch * self._heads * s, s)
        return self._touch(part, sources, per_score * shape[0] * s, shape, phase, num_launches=num_launches)

    @property
    def _softmax_is_fused(self) -> bool:
        return self._layout.micro_batch * self._heads % SOFTMAX_FUSION_MULTIPLE == 0

    def _core(self, qkv: str) -> str:
        """The attention itself, between the projections."""
        turned = self._rotary("rotary", qkv, _FORWARD)
        if self._layout.flash_attention:
            return self._attention("attention", (turned,), 1.0, _FORWARD)
        s, d = self._shape.seq_len, self._model.head_dim
        scores = self._batched("scores", (turned,), s, d, _FORWARD)
        fused = self._softmax_is_fused
        softmax = self._scores_touch("softmax", (scores,), 4 if fused else 34, _FORWARD, 1 if fused else 5)
        if self._model.dropout:
            softmax = self._scores_touch("dropout", (softmax,), 5, _FORWARD)
        context = self._batched("context", (softmax, turned), d, s, _FORWARD)
        columns = self._heads * d
        shape = (self._tokens, columns)
        self.made["attention"] = self._touch("permute_heads", (context,), 4 * self._tokens * columns, shape, _FORWARD)
        return self.made["attention"]

    def _act(self, part: str, sources: Sequence[str], rows: int, width: int, phase: Phase) -> str:
        gated = self._model.gated
        per_element = (self._shape.traffic.gated if gated else (4, 6))[phase is not _FORWARD]
        return self._touch(part, sources, per_element * rows * width, (rows, width), phase, both=not gated)

    def _mlp(self, norm2: str) -> tuple[str, ...]:
        up = self._entering("mlp_gather", "up", norm2)
        act = self._act("act", (up,), self._tokens, self._weights["down"].inputs, _FORWARD)
        return (self._leaving("mlp_reduce", "down", act),)

    def _moved_rows(self, part: str, sources: Sequence[str], per_element: int, phase: Phase) -> str:
        """Tokens sorted by expert, or back: `per_element` bytes of every row that is routed."""
        h = self._model.hidden
        return self._touch(part, sources, per_element * self._routed * h, (self._rows, h), phase)

    def _top_k(self, part: str, source: str, phase: Phase) -> str:
        experts = self._model.num_experts
        num_bytes = 12 * self._rows * experts
        return self._touch(part, (source,), num_bytes, (self._rows, experts), phase, num_launches=4)

    def _experts(self, norm2: str) -> tuple[str, ...]:
        routed, width = self._routed, self._weights["expert_down"].inputs
        router = self._top_k("top_k", self._product("router", norm2, self._rows), _FORWARD)
        sent = self._exchange("dispatch", self._moved_rows("permute", (norm2, router), 4, _FORWARD), _FORWARD)
        up = self._product("expert_up", sent, routed)
        act = self._act("expert_act", (up,), routed, width, _FORWARD)
        back = self._exchange("combine", self._product("expert_down", act, routed), _FORWARD)
        self.made["sent"] = sent
        merged = self._moved_rows("unpermute", (back, router), 4, _FORWARD)
        return (merged, *self._mlp(norm2)) if self._model.shared_ffn else (merged,)

    # Backward.

    def backward(self, gradient: str) -> str:
        """The gradient of the layer's input, given that of its output."""
        made, two = self.made, self._model.norms_per_layer == 2
        branch = self._residual_backward("residual2", gradient)
        parts = self._experts_backward(branch) if self._model.num_experts else self._mlp_backward(branch)
        middle = self._norm_backward("norm2", parts, gradient, made["add1"]) if two else gradient
        entered, out_d = self._entering_d("attention_gather_d", "out", self._residual_backward("residual1", middle))
        self._weight_gradient("out", made["attention"], entered)
        core_d = self._core_backward(out_d)
        self._bias_gradient("qkv", core_d, self._weights["qkv"].outputs)
        reduced = self._column_backward("qkv", core_d, made["norm"])
        return self._norm_backward("norm", (reduced,) if two else (reduced, *parts), middle, made["x"])

    def _entering_d(self, part: str, name: str, gradient: str) -> tuple[str, str]:
        """The gathered gradient of a row-parallel product's output, and that of its input; in parts, at once."""
        parts = self._layout.overlap_tensor
        entered = self._enter(part, gradient, _BACKWARD, is_async=parts)
        made = self._data_gradient(name, gradient if parts else entered)
        if parts:
            self._in_parts(part, entered, _BACKWARD)
        return entered, made

    def _norm_backward(self, part: str, gradients: Sequence[str], residual: str, saved: str) -> str:
        """Gradients of input and scale in one pass over both (a persistent kernel), then the residual's added."""
        shape = (self._rows, self._model.hidden)
        elements = self._rows * self._model.hidden
        also = self._around("qkv", _BACKWARD)
        sources = (*gradients, saved)
        made = self._touch(
            f"{part}_d", sources, self._shape.traffic.norm[1] * elements, shape, _BACKWARD, also=also, num_launches=2
        )
        return self._touch(f"{part}_add_d", (made, residual), 6 * elements, shape, _BACKWARD, both=True)

    def _residual_backward(self, part: str, gradient: str) -> str:
        """The gradient of a branch: through dropout where there is one; its bias's gradient."""
        shape = (self._rows, self._model.hidden)
        if self._model.dropout:
            gradient = self._touch(f"{part}_d", (gradient,), 5 * shape[0] * shape[1], shape, _BACKWARD, both=True)
        self._bias_gradient(part, gradient, self._model.hidden, self._rows)
        return gradient

    def _bias_gradient(self, part: str, gradient: str, columns: int, rows: int | None = None) -> None:
        if self._model.linear_bias:
            rows = self._tokens if rows is None else rows
            shape, reduction = (rows, columns), Access.REDUCTION
            self._touch(f"{part}_b", (gradient,), 2 * rows * columns, shape, _WEIGHT, access=reduction)

    def _core_backward(self, out_d: str) -> str:
        """The gradient of the joint projection's output."""
        made, d, s = self.made, self._model.head_dim, self._shape.seq_len
        qkv = made.get("rotary", made["qkv"])
        columns = self._weights["qkv"].outputs
        if self._layout.flash_attention:
            whole = self._attention("attention_d", (out_d, qkv), FLASH_BACKWARD_PASSES, _BACKWARD)
            return self._join(self._rotary("rotary_d", whole, _BACKWARD), columns)
        rows = (self._tokens, self._heads * d)
        permuted = self._touch("permute_heads_d", (out_d,), 4 * rows[0] * rows[1], rows, _BACKWARD)
        weights = made["dropout"] if self._model.dropout else made["softmax"]
        scores_d = self._batched("context_d", (permuted, qkv), s, d, _BACKWARD)
        value_d = self._batched("context_v_d", (permuted, weights), d, s, _BACKWARD)
        if self._model.dropout:
            scores_d = self._scores_touch("dropout_d", (scores_d,), 5, _BACKWARD)
        fused = self._softmax_is_fused
        scores_d = self._scores_touch(
            "softmax_d", (scores_d, made["softmax"]), 6 if fused else 34, _BACKWARD, 1 if fused else 4
        )
        query_d = self._batched("scores_d", (scores_d, qkv), d, s, _BACKWARD)
        key_d = self._batched("scores_k_d", (scores_d, qkv), d, s, _BACKWARD)
        turned = self._rotary("rotary_d", query_d, _BACKWARD)
        return self._join(turned, columns, (key_d, value_d))

    def _join(self, source: str, columns: int, also: Sequence[str] = ()) -> str:
        shape = (self._tokens, columns)
        return self._touch("qkv_join", (source,), 4 * self._tokens * columns, shape, _BACKWARD, also=also)

    def _column_backward(self, name: str, gradient: str, saved: str) -> str:
        """Backward of a column-parallel product: the input's gradient, its sum over ranks, the weight's gradient."""
        hides = self._shape.hides_tensor and (self._layout.sequence_parallel or self._layout.async_tensor)
        parts = self._layout.overlap_tensor and not self._shape.hides_tensor
        again = self._enter(f"{name}_gather_w", saved, _WEIGHT, is_async=True) if hides else saved
        if parts:
            reduced = self._leave(f"{name}_reduce_d", gradient, _BACKWARD, is_async=True)
            self._data_gradient(name, gradient)
            self._graph.hold_back(COMPUTE, [reduced])
        else:
            data = self._data_gradient(name, gradient)
            reduced = self._leave(f"{name}_reduce_d", data, _BACKWARD, is_async=hides)
        self._weight_gradient(name, again, gradient)
        if hides and self._layout.tensor > 1:
            self._graph.hold_back(COMPUTE, [reduced])
        return reduced

    def _mlp_backward(self, gradient: str) -> tuple[str, ...]:
        made, width = self.made, self._weights["down"].inputs
        entered, down_d = self._entering_d("mlp_gather_d", "down", gradient)
        self._weight_gradient("down", made["act"], entered)
        act_d = self._act("act_d", (down_d, made["up"]), self._tokens, width, _BACKWARD)
        self._bias_gradient("up", act_d, self._weights["up"].outputs)
        return (self._column_backward("up", act_d, made.get("norm2", made["norm"])),)

    def _experts_backward(self, gradient: str) -> tuple[str, ...]:
        made, routed = self.made, self._routed
        width, norm2 = self._weights["expert_down"].inputs, made.get("norm2", made["norm"])
        spread = self._moved_rows("unpermute_d", (gradient, made["top_k"]), 6, _BACKWARD)
        sent = self._exchange("combine_d", spread, _BACKWARD)
        down_d = self._data_gradient("expert_down", sent, routed)
        act_d = self._act("expert_act_d", (down_d, made["expert_up"]), routed, width, _BACKWARD)
        up_d = self._data_gradient("expert_up", act_d, routed)
        self._weight_gradient("expert_down", made["expert_act"], sent, routed)
        self._weight_gradient("expert_up", made["sent"], act_d, routed)
        back = self._exchange("dispatch_d", up_d, _BACKWARD)
        merged = self._moved_rows("permute_d", (back,), 6, _BACKWARD)
        scores = self._top_k("top_k_d", spread, _BACKWARD)
        router_d = self._data_gradient("router", scores, self._rows)
        self._weight_gradient("router", norm2, scores, self._rows)
        shared = self._mlp_backward(gradient) if self._model.shared_ffn else ()
        return (merged, router_d, *shared)

    # The tables.

    def embed(self) -> str:
        """The lookup; its vocabulary is cut by tensor parallelism."""
        h = self._model.hidden
        shape = (self._tokens, h)
        gathered = (self._parameters("embed", _FORWARD),)
        num_bytes = 4 * self._tokens * h
        looked = self._touch("embed", ("",), num_bytes, shape, _FORWARD, also=gathered, num_launches=3)
        x = self._leave("embed_tp_reduce", looked, _FORWARD)
        whole = (self._rows, h)
        if self._model.learned_positions:
            x = self._touch("positions", (x,), 6 * whole[0] * h, whole, _FORWARD, also=gathered, num_launches=2)
        if self._model.dropout:
            x = self._touch("embed_dropout", (x,), 5 * whole[0] * h, whole, _FORWARD, both=True)
        return x

    def head(self, x: str) -> str:
        """The last norm, the logits and the loss."""
        h, vocab, rows = self._model.hidden, self._weights["logits"].outputs, self._rows
        also = (self._parameters("logits", _FORWARD),) if self._shape.unit is Unit.LAYER else ()
        num_bytes = self._shape.traffic.norm[0] * rows * h
        norm = self._touch("norm", (x,), num_bytes, (rows, h), _FORWARD, also=also)
        logits = self._product("logits", self._enter("head_tp_gather", norm, _FORWARD))
        shape = (self._tokens, vocab)
        num_bytes = self._shape.traffic.loss[0] * shape[0] * vocab
        loss = self._touch("loss", (logits,), num_bytes, shape, Phase.LOSS, num_launches=10)
        if self._layout.tensor > 1:
            call = self._shape.groups.collective(CollectiveKind.ALL_REDUCE, 3 * 4 * self._tokens, TENSOR)
            loss = self._graph.comm(
                self._name("loss_reduce"), call, TENSOR, origin=self._origin(Phase.LOSS, "loss"), deps=(loss,)
            )
            self._graph.hold_back(COMPUTE, [loss])
        self.made["head_input"], self.made["loss"] = x, loss
        return loss

    def loss_backward(self) -> str:
        """The gradient of the logits."""
        vocab = self._weights["logits"].outputs
        shape = (self._tokens, vocab)
        sources = (self.made["loss"], self.made["logits"])
        num_bytes = self._shape.traffic.loss[1] * shape[0] * vocab
        return self._touch("loss_d", sources, num_bytes, shape, _BACKWARD, num_launches=4)

    def head_backward(self, loss_d: str) -> str:
        """The gradient of the last layer's output, given that of the logits."""
        h, rows = self._model.hidden, self._rows
        data = self._data_gradient("logits", loss_d)
        reduced = self._leave("logits_reduce_d", data, _BACKWARD)
        self._weight_gradient("logits", self.made["norm"], loss_d)
        also = (self._parameters("logits", _BACKWARD),) if self._shape.unit is Unit.LAYER else ()
        sources = (reduced, self.made["head_input"])
        return self._touch(
            "norm_d", sources, self._shape.traffic.norm[1] * rows * h, (rows, h), _BACKWARD, also=also, num_launches=2
        )

    def embed_backward(self, gradient: str) -> None:
        """The table's gradient."""
        entered = self._enter("embed_tp_gather_d", gradient, _BACKWARD)
        weight = self._weights["embed"]
        before = () if self._layout.zero_stage == 3 else weight.gradients[-1:]
        num_bytes = 8 * self._tokens * self._model.hidden + 4 * weight.num_params
        made = self._touch(
            "embed_w", (entered,), num_bytes, (self._tokens, self._model.hidden), _WEIGHT, also=before, num_launches=4
        )
        weight.gradients.append(made)
        self.on_gradient(weight, made)


# Layers and micro-batches repeat their works: each is checked and built once.
_gemm = lru_cache(maxsize=4096)(Gemm)
_memory_bound = lru_cache(maxsize=4096)(MemoryBound)


def _ignore(weight: Weight, made: str) -> None:
    """Nobody asked when a gradient is ready."""
