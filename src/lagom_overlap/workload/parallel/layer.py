"""One transformer layer on one GPU under tensor, sequence and expert parallelism: forward, backward, recomputation.

Sources: Megatron-LM (arXiv 1909.08053, Fig. 3: two all-reduces forward, two backward; arXiv 2205.05198, Fig. 5: with
sequence parallelism each becomes a reduce-scatter and an all-gather, and what tensor parallelism leaves whole is cut
along the sequence). In backward with sequence parallelism the layer's input is gathered again beside the product for
the input's gradient, and that gradient's reduce-scatter runs beside the product for the weight's (Megatron-LM,
`linear_with_grad_accumulation_and_async_allreduce`). Experts: one all-to-all before and one after them (GShard,
arXiv 2006.16668), tokens spread evenly.

Bytes of memory-bound kernels are counted by hand per element of a 2-byte activation: reads plus writes plus dropout's
1-byte mask. Without flash attention the scores exist in memory: Megatron's fused scale-mask-softmax needs
batch x heads per GPU to be a multiple of 4 (`fused_softmax.py`); otherwise five kernels in FP32 take its place.
"""

from dataclasses import dataclass, replace

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import Attention, Gemm, MemoryBound
from lagom_overlap.workload.parallel.layout import ParallelLayout, Recompute
from lagom_overlap.workload.parallel.steps import (
    Access,
    BatchedGemm,
    CommStep,
    ComputeStep,
    GroupKind,
    Pass,
    Step,
    Touch,
)

ELEMENT_BYTES = 2
"""Activations and the parameters that are computed with: fp16 or bf16."""
FLASH_BACKWARD_PASSES = 2.5
"""Products of a flash attention's backward over its forward's: five against two."""
SOFTMAX_FUSION_MULTIPLE = 4
ACCUMULATION_BYTES = 6
"""Bytes per parameter and micro-batch that accumulation adds to the weight gradient's product: FP32 read and written in
its epilogue instead of two bytes written; in FP16 the product read again, the sum read and written."""


@dataclass(frozen=True, slots=True)
class LayerPasses:
    """Forward, what is computed again before backward, and backward of one layer."""

    forward: Pass
    recompute: Pass
    backward: Pass


class _Layer:
    """The steps of one layer; `hidden`, `heads` and so on are per GPU where tensor parallelism cuts them."""

    def __init__(self, model: TransformerModel, layout: ParallelLayout, seq_len: int) -> None:
        self._model, self._layout, self._seq_len = model, layout, seq_len
        tensor = layout.tensor
        self._tokens = layout.micro_batch * seq_len
        self._whole_rows = self._tokens // tensor if layout.sequence_parallel else self._tokens
        self._heads = model.num_heads // tensor
        self._kv_heads = max(1, model.num_kv_heads // tensor)
        self._attention_columns = self._heads * model.head_dim
        self._qkv_columns = (self._heads + 2 * self._kv_heads) * model.head_dim
        self._ffn = model.ffn // tensor
        self._up_columns = self._ffn * (2 if model.gated else 1)
        self._scores = layout.micro_batch * self._heads * seq_len * seq_len

    # Kinds of step.

    @staticmethod
    def touch(name: str, num_bytes: int, access: Access = Access.STREAM, num_launches: int = 1) -> ComputeStep:
        return ComputeStep(name, Touch(MemoryBound(num_bytes), access), num_launches)

    def gemm(self, name: str, columns: int, depth: int, batch: int = 1, rows: int | None = None) -> ComputeStep:
        gemm = Gemm(self._tokens if rows is None else rows, columns, depth, ELEMENT_BYTES)
        return ComputeStep(name, gemm if batch == 1 else BatchedGemm(gemm, batch))

    def _tensor(self, name: str, kind: CollectiveKind, hidden_by: tuple[ComputeStep, ...] = ()) -> list[Step]:
        """A collective of the layer's activations over the tensor-parallel ranks, if there are any."""
        if self._layout.tensor == 1:
            return list(hidden_by)
        num_bytes = self._tokens * self._model.hidden * ELEMENT_BYTES
        return [CommStep(name, kind, num_bytes, GroupKind.TENSOR, hidden_by)]

    def _enter(self, name: str) -> list[Step]:
        """Before a column-parallel product: with sequence parallelism the rows are gathered."""
        return self._tensor(name, CollectiveKind.ALL_GATHER) if self._layout.sequence_parallel else []

    def _leave(self, name: str) -> list[Step]:
        """After a row-parallel product: the partial sums are added."""
        kind = CollectiveKind.REDUCE_SCATTER if self._layout.sequence_parallel else CollectiveKind.ALL_REDUCE
        return self._tensor(name, kind)

    def _norm(self, name: str) -> ComputeStep:
        return self.touch(name, 4 * self._whole_rows * self._model.hidden)

    def _norm_backward(self, name: str) -> list[Step]:
        """Gradients of input and scale in one pass over both (a persistent kernel), then the residual's added."""
        elements = self._whole_rows * self._model.hidden
        return [
            self.touch(f"{name}_d", 6 * elements, num_launches=2),
            self.touch(f"{name}_sum", 6 * elements),
        ]

    def _residual(self, name: str) -> ComputeStep:
        elements = self._whole_rows * self._model.hidden
        return self.touch(name, (7 if self._model.dropout else 6) * elements)

    def _residual_backward(self, name: str) -> list[Step]:
        elements = self._whole_rows * self._model.hidden
        steps: list[Step] = [self.touch(f"{name}_d", 5 * elements)] if self._model.dropout else []
        return steps + self._bias_gradient(name, elements)

    def _bias_gradient(self, name: str, elements: int) -> list[Step]:
        return [self.touch(f"{name}_b", 2 * elements, Access.REDUCTION)] if self._model.linear_bias else []

    # Attention.

    def _core(self) -> list[Step]:
        """The attention itself, between the projections."""
        if self._layout.flash_attention:
            return [*self._rotary(), ComputeStep("attention", self._attention(1.0))]
        batch, s, d = self._layout.micro_batch * self._heads, self._seq_len, self._model.head_dim
        if batch % SOFTMAX_FUSION_MULTIPLE:
            softmax = self.touch("softmax", 34 * self._scores, num_launches=5)
        else:
            softmax = self.touch("softmax", 4 * self._scores)
        steps = [*self._rotary(), self.gemm("scores", s, d, batch, rows=s), softmax]
        if self._model.dropout:
            steps.append(self.touch("dropout", 5 * self._scores))
        return [
            *steps,
            self.gemm("context", d, s, batch, rows=s),
            self.touch("permute", 4 * self._tokens * self._attention_columns),
        ]

    def _core_backward(self) -> list[Step]:
        split = self.touch("qkv_join", 4 * self._tokens * self._qkv_columns)
        if self._layout.flash_attention:
            return [
                ComputeStep("attention_d", self._attention(FLASH_BACKWARD_PASSES)),
                *self._rotary("rotary_d"),
                split,
            ]
        batch, s, d = self._layout.micro_batch * self._heads, self._seq_len, self._model.head_dim
        steps: list[Step] = [
            self.touch("permute_d", 4 * self._tokens * self._attention_columns),
            self.gemm("context_d", s, d, batch, rows=s),
            self.gemm("context_w", d, s, batch, rows=s),
        ]
        if self._model.dropout:
            steps.append(self.touch("dropout_d", 5 * self._scores))
        if batch % SOFTMAX_FUSION_MULTIPLE:
            steps.append(self.touch("softmax_d", 34 * self._scores, num_launches=4))
        else:
            steps.append(self.touch("softmax_d", 6 * self._scores))
        return [
            *steps,
            self.gemm("scores_d", d, s, batch, rows=s),
            self.gemm("scores_w", d, s, batch, rows=s),
            *self._rotary("rotary_d"),
            split,
        ]

    def _attention(self, passes: float) -> Attention:
        return Attention(
            batch=self._layout.micro_batch,
            num_heads=self._heads,
            seq_len=self._seq_len,
            head_dim=self._model.head_dim,
            passes=passes,
            element_bytes=ELEMENT_BYTES,
        )

    def _rotary(self, name: str = "rotary") -> list[Step]:
        """Queries and keys turned by their position, where positions are not learned."""
        if self._model.learned_positions:
            return []
        columns = (self._heads + self._kv_heads) * self._model.head_dim
        return [self.touch(name, 4 * self._tokens * columns)]

    # The MLP.

    def _mlp(self) -> list[Step]:
        h = self._model.hidden
        return [
            *self._enter("mlp_gather"),
            self.gemm("up", self._up_columns, h),
            self.touch("act", (6 if self._model.gated else 4) * self._tokens * self._ffn),
            self.gemm("down", h, self._ffn),
            *self._leave("mlp_reduce"),
        ]

    def _mlp_backward(self) -> list[Step]:
        h, t = self._model.hidden, self._tokens
        return [
            *self._enter("mlp_gather_d"),
            self.gemm("down_d", self._ffn, h),
            self.gemm("down_w", self._ffn, t, rows=h),
            self.touch("act_d", (10 if self._model.gated else 6) * t * self._ffn),
            *self._bias_gradient("up", t * self._up_columns),
            *self._column_backward("up", self._up_columns),
        ]

    def _column_backward(self, name: str, columns: int) -> list[Step]:
        """Backward of a column-parallel product: input's gradient, its sum over ranks, weight's gradient."""
        data = self.gemm(f"{name}_d", self._model.hidden, columns)
        weight = self.gemm(f"{name}_w", self._model.hidden, self._tokens, rows=columns)
        if self._layout.sequence_parallel:
            return [
                *self._tensor(f"{name}_gather_w", CollectiveKind.ALL_GATHER, (data,)),
                *self._tensor(f"{name}_reduce_d", CollectiveKind.REDUCE_SCATTER, (weight,)),
            ]
        if self._layout.async_tensor:
            return [data, *self._tensor(f"{name}_reduce_d", CollectiveKind.ALL_REDUCE, (weight,))]
        return [data, *self._tensor(f"{name}_reduce_d", CollectiveKind.ALL_REDUCE), weight]

    # Experts.

    def _experts(self, backward: bool) -> list[Step]:
        """Router, all-to-all, experts, all-to-all, beside a shared MLP that is computed in turn."""
        model, h, t = self._model, self._model.hidden, self._tokens
        routed = t * model.experts_per_token
        local = model.num_experts // self._layout.expert
        rows = max(1, routed * self._layout.expert // model.num_experts)
        tag, moved = ("_d", 6) if backward else ("", 4)
        steps: list[Step] = [
            self.gemm(f"router{tag}", model.num_experts, h),
            self.touch(f"top_k{tag}", 12 * t * model.num_experts, num_launches=4),
            self.touch(f"dispatch{tag}", moved * routed * h),
            *self._exchange(f"dispatch{tag}_a2a", routed),
        ]
        shapes = [("expert_up", self._up_columns, h), ("expert_down", h, self._ffn)]
        for name, columns, depth in reversed(shapes) if backward else shapes:
            if not backward:
                steps.append(self.gemm(name, columns, depth, local, rows=rows))
            else:
                steps.append(self.gemm(f"{name}_d", depth, columns, local, rows=rows))
                steps.append(self.gemm(f"{name}_w", columns, rows, local, rows=depth))
        gated = model.gated
        factor = (10 if gated else 6) if backward else (6 if gated else 4)
        steps.insert(-1, self.touch(f"expert_act{tag}", factor * routed * self._ffn))
        steps += [*self._exchange(f"combine{tag}_a2a", routed), self.touch(f"combine{tag}", moved * routed * h)]
        if model.shared_ffn:
            shared = _Layer(
                replace(model, ffn=model.shared_ffn, num_experts=0, experts_per_token=0), self._layout, self._seq_len
            )
            steps += shared._mlp_backward() if backward else shared._mlp()
        elif self._layout.tensor > 1:
            steps += self._enter(f"mlp_gather{tag}") + self._leave(f"mlp_reduce{tag}")
        return steps

    def _exchange(self, name: str, routed: int) -> list[Step]:
        if self._layout.expert == 1:
            return []
        num_bytes = routed * self._model.hidden * ELEMENT_BYTES
        return [CommStep(name, CollectiveKind.ALL_TO_ALL, num_bytes, GroupKind.EXPERT)]

    # Passes.

    def forward(self) -> Pass:
        model, h = self._model, self._model.hidden
        steps: list[Step] = [
            self._norm("norm1"),
            *self._enter("attention_gather"),
            self.gemm("qkv", self._qkv_columns, h),
            *self._core(),
            self.gemm("out", h, self._attention_columns),
            *self._leave("attention_reduce"),
            self._residual("residual1"),
        ]
        if model.norms_per_layer == 2:
            steps.append(self._norm("norm2"))
        steps += self._experts(backward=False) if model.num_experts else self._mlp()
        steps.append(self._residual("residual2"))
        return Pass(tuple(steps))

    def core(self) -> Pass:
        return Pass(tuple(self._core()))

    def backward(self, accumulated_params: int) -> Pass:
        h = self._model.hidden
        steps: list[Step] = self._residual_backward("residual2")
        steps += self._experts(backward=True) if self._model.num_experts else self._mlp_backward()
        if self._model.norms_per_layer == 2:
            steps += self._norm_backward("norm2")
        steps += [
            *self._residual_backward("residual1"),
            *self._enter("attention_gather_d"),
            self.gemm("out_d", self._attention_columns, h),
            self.gemm("out_w", self._attention_columns, self._tokens, rows=h),
            *self._core_backward(),
            *self._bias_gradient("qkv", self._tokens * self._qkv_columns),
            *self._column_backward("qkv", self._qkv_columns),
            *self._norm_backward("norm1"),
        ]
        if accumulated_params:
            steps.append(self.touch("accumulate", ACCUMULATION_BYTES * accumulated_params))
        return Pass(tuple(steps))


def layer_params_per_gpu(model: TransformerModel, layout: ParallelLayout) -> int:
    """Parameters of one layer on one GPU: matrices cut by tensor parallelism, experts by expert parallelism too."""
    experts = model.expert_layer_params // (layout.tensor * layout.expert)
    dense = (model.layer_matrix_params - model.expert_layer_params) // layout.tensor
    small = model.layer_params - model.layer_matrix_params
    return experts + dense + small


def reduced_layer_params(model: TransformerModel, layout: ParallelLayout) -> int:
    """Parameters of one layer whose gather over all data ranks sends as much as gathering each over its own ranks does.

    Experts are held by data / expert ranks each, and by one alone where that is 1.
    """
    experts = model.expert_layer_params // (layout.tensor * layout.expert)
    shared = experts * (layout.data - layout.expert) // max(1, layout.data - 1)
    return layer_params_per_gpu(model, layout) - experts + shared


def layer_passes(model: TransformerModel, layout: ParallelLayout, seq_len: int) -> LayerPasses:
    """The passes of one layer on one GPU."""
    layer = _Layer(model, layout, seq_len)
    forward = layer.forward()
    recompute = {
        Recompute.NONE: Pass(()),
        Recompute.SELECTIVE: Pass(()) if layout.flash_attention else layer.core(),
        Recompute.FULL: forward,
    }[layout.recompute]
    accumulated = layer_params_per_gpu(model, layout) if layout.accumulate_gradients else 0
    return LayerPasses(forward, recompute, layer.backward(accumulated))
