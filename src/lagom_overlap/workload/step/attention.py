"""The operators of attention between its projections, of one micro-batch on one rank; its mixer may see a window only.

Bytes are counted as in `operators`, dropout's 1-byte mask among them. Without flash attention the scores exist in
memory: Megatron's fused scale-mask-softmax needs batch x heads per GPU to be a multiple of 4 (`fused_softmax.py`);
otherwise five kernels in FP32 take its place.

In MXFP8 (Transformer Engine @4220403e, cuDNN from 9.21, on Blackwell) queries, keys and values are cast before, the
output's gradient before backward, and of a window cuDNN's backward makes the products of all pairs: on a GB200 it takes
2.08 ms of 4,096 tokens, 7.43 of 8,192 and 27.9 of 16,384, where BF16 takes 0.47, 0.91 and 1.82 (128 heads of 64, a
window of 128, cuDNN 9.22; NVIDIA/cudnn-frontend @fb682ce, `benchmark/sdpa_benchmark_training/results/gpt_oss`).

A learned logit per head leaves attention fused: Transformer Engine takes cuDNN's kernels for it from cuDNN 9.13.1 on
(`nvte_get_fused_attn_backend`, v2.12), in FP8 from 9.21 on, on Blackwell as on Hopper.
"""

from collections.abc import Sequence
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.layer_kinds import LayerKind, Mixer
from lagom_overlap.workload.ops import FLASH_BACKWARD_PASSES, Access, Attention, Gemm, Phase, share_in_window
from lagom_overlap.workload.step.axes import attention_axes
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.operators import BACKWARD, FORWARD, StepOps, StepShape
from lagom_overlap.workload.step.parameter_units import Weight
from lagom_overlap.workload.step.rank_groups import CONTEXT
from lagom_overlap.workload.streams import COMPUTE

SOFTMAX_FUSION_MULTIPLE: Final = 4
"""Megatron-LM fuses the softmax of so many rows of heads at a time (`FusedScaleMaskSoftmax`)."""
_SQUARE: Final = 2
"""Over the products of causal attention those of all pairs: what cuDNN's backward in MXFP8 makes of a window."""
_CAST_BYTES: Final = 4
"""Per element of queries, keys, values and of the output's gradient: read 2, written by rows and by columns."""


class AttentionOps(StepOps):
    """The operators of a layer's attention; `kind` says what the layer is."""

    def __init__(
        self,
        graph: StepGraph,
        shape: StepShape,
        *,
        layer: int,
        batch: int,
        weights: dict[str, Weight],
        kind: LayerKind,
    ) -> None:
        super().__init__(graph, shape, layer=layer, batch=batch, weights=weights)
        self._kind = kind
        self._head_dim = self._value_dim = shape.model.head_dim
        self._entry = next(iter(weights))

    def _rotary(self, part: str, source: str, phase: Phase) -> str:
        """Queries and keys turned by their position, where positions are not learned."""
        if self._model.learned_positions or not self._model.rotary:
            return source
        columns = (self._heads + self._kv_heads) * self._model.head_dim
        shape, traffic = (self._tokens, columns), self._shape.traffic
        if not self._turns_unfused:
            return self._run(part, (source,), traffic.rotary[phase is not FORWARD], shape, phase)
        assert traffic.scaled_rotary is not None
        streamed, rearranged = traffic.scaled_rotary[phase is not FORWARD]
        num_bytes = sum(rearranged) * shape[0] * shape[1]
        cut = self._touch(
            f"{part}_halves",
            (source,),
            num_bytes,
            shape,
            phase,
            access=Access.REARRANGE,
            num_launches=2 * len(rearranged),
        )
        num_bytes = sum(streamed) * shape[0] * shape[1]
        return self._touch(part, (cut,), num_bytes, shape, phase, num_launches=2 * len(streamed))

    def _repeated(self, part: str, source: str, phase: Phase) -> str:
        """Keys and values repeated for every head, their gradients summed, where the model's code does that."""
        if not self._shape.traffic.repeats_keys or self._heads == self._kv_heads:
            return source
        columns = (self._heads + self._kv_heads) * self._model.head_dim
        return self._run(part, (source,), (2, 2), (self._tokens, columns), phase)

    def _attention(self, part: str, sources: Sequence[str], passes: float, phase: Phase) -> str:
        batch, narrow = self._layout.micro_batch, self._is_narrow
        whole = narrow and phase is BACKWARD and self._window
        seen, context = _SQUARE if whole else self._share_seen, self._layout.context
        if narrow:
            columns = self._heads * self._value_dim if phase is BACKWARD else self._all_columns
            sources = (
                self._touch(
                    f"{part}_cast",
                    sources,
                    _CAST_BYTES * self._tokens * columns,
                    (self._tokens, columns),
                    phase,
                    access=Access.REARRANGE,
                ),
                *sources[1:],
            )
        work = Attention(
            batch=batch,
            num_heads=self._heads,
            seq_len=self._shape.seq_len,
            head_dim=self._head_dim,
            passes=passes * seen / context,
            element_bytes=self._element_bytes,
            backward=phase is BACKWARD,
            reach=self._shape.seq_len * (min(seen, 1 / context) if seen < 1 else seen / context),
            window=0 if whole else self._window,
            narrow=narrow,
        )
        moved = self._travel(part, sources[0], phase)
        spec = attention_axes(sources, self._heads, batch, not self._layout.sequence_parallel)
        self.made[part] = self._graph.comp(self._name(part), work, self._origin(phase, part), (), shards=spec)
        self._graph.hold_back(COMPUTE, moved)
        return self._merged(part, phase)

    @property
    def _is_narrow(self) -> bool:
        """Whether attention multiplies in MXFP8."""
        return self._shape.precision.attention.is_narrow

    @property
    def _all_columns(self) -> int:
        """Of queries, keys and values."""
        key_dim = 2 * self._head_dim - self._value_dim
        return (self._heads + self._kv_heads) * key_dim + self._kv_heads * self._value_dim

    @property
    def _share_seen(self) -> float:
        """Of the products of causal attention those that are made: kernels run whole tiles of keys in a window."""
        return share_in_window(self._shape.seq_len, self._window) if self._window else 1.0

    @property
    def _window(self) -> int:
        """Keys that a query of this layer sees at most, 0 for all."""
        return self._model.window if self._kind.mixer is Mixer.WINDOW else 0

    def _merged(self, part: str, phase: Phase) -> str:
        """The sum of a ring's steps, where each is an attention of its own."""
        ring, further = self._shape.ring, self._layout.context - 1
        if ring is None or not further:
            return self.made[part]
        columns = self._heads * self._value_dim
        num_bytes = ring.merge_bytes[phase is not FORWARD] * further * self._tokens * columns
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
        elements = 2 * heads * self._head_dim * self._tokens
        num_bytes = elements * context * self._element_bytes * (2 if ring is None and phase is BACKWARD else 1)
        call = self._shape.groups.collective(CollectiveKind.ALL_GATHER, num_bytes, CONTEXT)
        origin = self._origin(phase, f"{part}_keys")
        moved = [self._graph.comm(self._name(f"{part}_keys"), call, CONTEXT, origin=origin, deps=(source,))]
        if ring is None:
            return moved
        if phase is BACKWARD:
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
        turned = self._repeated("repeat", self._rotary("rotary", qkv, FORWARD), FORWARD)
        if self._layout.flash_attention:
            return self._attention("attention", (turned,), 1.0, FORWARD)
        s, d = self._shape.seq_len, self._model.head_dim
        scores = self._batched("scores", (turned,), s, d, FORWARD)
        fused = self._softmax_is_fused
        softmax = self._scores_touch("softmax", (scores,), 4 if fused else 34, FORWARD, 1 if fused else 5)
        if self._model.dropout:
            softmax = self._scores_touch("dropout", (softmax,), 5, FORWARD)
        context = self._batched("context", (softmax, turned), d, s, FORWARD)
        columns = self._heads * d
        shape = (self._tokens, columns)
        self.made["attention"] = self._touch("permute_heads", (context,), 4 * self._tokens * columns, shape, FORWARD)
        return self.made["attention"]

    def _core_backward(self, out_d: str) -> str:
        """The gradient of the joint projection's output."""
        made, d, s = self.made, self._model.head_dim, self._shape.seq_len
        qkv = made.get("repeat") or made.get("rotary", made["qkv"])
        columns = self._weights["qkv"].outputs
        if self._layout.flash_attention:
            whole = self._attention("attention_d", (out_d, qkv), FLASH_BACKWARD_PASSES, BACKWARD)
            turned = self._rotary("rotary_d", self._repeated("repeat_d", whole, BACKWARD), BACKWARD)
            return turned if self._weights["qkv"].parts else self._join(turned, columns)
        rows = (self._tokens, self._heads * d)
        permuted = self._touch("permute_heads_d", (out_d,), 4 * rows[0] * rows[1], rows, BACKWARD)
        weights = made["dropout"] if self._model.dropout else made["softmax"]
        scores_d = self._batched("context_d", (permuted, qkv), s, d, BACKWARD)
        value_d = self._batched("context_v_d", (permuted, weights), d, s, BACKWARD)
        if self._model.dropout:
            scores_d = self._scores_touch("dropout_d", (scores_d,), 5, BACKWARD)
        fused = self._softmax_is_fused
        scores_d = self._scores_touch(
            "softmax_d", (scores_d, made["softmax"]), 6 if fused else 34, BACKWARD, 1 if fused else 4
        )
        query_d = self._batched("scores_d", (scores_d, qkv), d, s, BACKWARD)
        key_d = self._batched("scores_k_d", (scores_d, qkv), d, s, BACKWARD)
        turned = self._rotary("rotary_d", self._repeated("repeat_d", query_d, BACKWARD), BACKWARD)
        if self._weights["qkv"].parts:
            return self._graph.together((key_d, value_d, turned))
        return self._join(turned, columns, (key_d, value_d))

    def _join(self, source: str, columns: int, also: Sequence[str] = ()) -> str:
        shape = (self._tokens, columns)
        return self._touch("qkv_join", (source,), 4 * self._tokens * columns, shape, BACKWARD, also=also)
