"""A layer with multi-head latent attention, as Megatron-Core runs it in training: nothing is absorbed.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1); Megatron-LM d98e8a64,
`core/transformer/multi_latent_attention.py`, with --apply-rope-fusion, its default. The projections down are whole on
every tensor-parallel rank and run on its own rows; sequence parallelism gathers the latents, not the hidden state,
before the projections up, and the keys' part with positions. Keys, which have a part of their own for each head and one
that all share, are then put together.

Departure: gradients of the projections down, which tensor-parallel ranks hold alike, are not summed over them.
"""

from collections.abc import Sequence

from lagom_overlap.workload.layer_kinds import LayerKind
from lagom_overlap.workload.ops import Phase
from lagom_overlap.workload.parallel.layout import RecomputeModule
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.layer import LayerOps
from lagom_overlap.workload.step.operators import BACKWARD, FORWARD, StepShape
from lagom_overlap.workload.step.parameter_units import Weight


class LatentOps(LayerOps):
    """The operators of a layer with latent attention."""

    def __init__(
        self, graph: StepGraph, shape: StepShape, *, layer: int, batch: int, weights: dict[str, Weight], kind: LayerKind
    ) -> None:
        super().__init__(graph, shape, layer=layer, batch=batch, weights=weights, kind=kind)
        assert shape.model.latent is not None
        self._latent = shape.model.latent
        # Products of a query and a key are wider than those with values: attention is priced by the mean.
        self._head_dim = (self._latent.qk_head_dim + self._latent.v_head_dim) // 2
        self._value_dim = self._latent.v_head_dim
        self._kv_heads = self._heads

    @property
    def _backward_passes(self) -> float:
        """Of five products three are as wide as queries and two as values."""
        query, value = self._latent.qk_head_dim, self._latent.v_head_dim
        return (3 * query + 2 * value) / (query + value)

    def _mixed(self, norm: str) -> str:
        self._product("kv_down", norm, self._rows)
        if self._latent.q_lora_rank:
            self._product("q_down", norm, self._rows)
        turned = self._up(norm)
        return self._leaving("attention_reduce", "out", self._attention("attention", (turned,), 1.0, FORWARD))

    def _up(self, norm: str) -> str:
        """Queries, keys and values from the latents: what `mla_up_proj` computes again."""
        a, rows, made = self._latent, self._rows, self.made
        kernels = self._shape.traffic.norm[0]
        if a.q_lora_rank:
            latent = self._run("q_norm", (made["q_down"],), kernels, (rows, a.q_lora_rank), FORWARD)
            queries = self._product("q_up", self._enter("q_gather", latent, FORWARD, columns=a.q_lora_rank))
        else:
            queries = self._product("q", self._enter("q_gather", norm, FORWARD))
        positions = self._enter("positions_gather", made["kv_down"], FORWARD, columns=a.qk_rope_head_dim)
        latent = self._run("kv_norm", (made["kv_down"],), kernels, (rows, a.kv_lora_rank), FORWARD)
        keys = self._product("kv_up", self._enter("kv_gather", latent, FORWARD, columns=a.kv_lora_rank))
        turned = self._turned("rotary", (queries, positions), FORWARD)
        return self._joined("latent_join", (turned, keys), FORWARD)

    def _turned(self, part: str, sources: Sequence[str], phase: Phase) -> str:
        """The part with positions of all heads' queries; unfused also that of the keys, which heads share."""
        is_fused = self._shape.traffic.fuses_latent
        columns = (self._heads if is_fused else self._heads + 1) * self._latent.qk_rope_head_dim
        kernels = self._shape.traffic.rotary[phase is not FORWARD]
        shape = (self._tokens, columns)
        launches = len(kernels) * (1 if is_fused else 2)
        return self._touch(part, sources, sum(kernels) * shape[0] * columns, shape, phase, num_launches=launches)

    def _joined(self, part: str, sources: Sequence[str], phase: Phase) -> str:
        """Keys and values of their parts, unfused also queries; backward the gradients of the parts, by as many bytes.

        Fused, one kernel reads the projection and writes both (Megatron-Core's `fused_mla_yarn_rope_apply.py`).
        """
        a, heads = self._latent, self._heads
        columns = heads * (a.qk_head_dim + a.v_head_dim)
        if self._shape.traffic.fuses_latent:
            read = heads * (a.qk_nope_head_dim + a.v_head_dim) + a.qk_rope_head_dim
            num_bytes, launches = 2 * self._tokens * (read + columns), 1
        else:
            num_bytes, launches = 4 * self._tokens * (columns + heads * a.qk_head_dim), 3
        return self._touch(part, sources, num_bytes, (self._tokens, columns), phase, num_launches=launches)

    def _recompute_core(self) -> None:
        self._attention("attention", (self.made["latent_join"],), 1.0, FORWARD)

    def _recompute_modules(self, modules: Sequence[RecomputeModule]) -> None:
        if RecomputeModule.MLA_UP_PROJ in modules:
            self._up(self.made["norm"])
        super()._recompute_modules(modules)

    def _mixed_backward(self, gradient: str) -> str:
        a, made, rows = self._latent, self.made, self._rows
        entered, out_d = self._entering_d("attention_gather_d", "out", gradient)
        self._weight_gradient("out", made["attention"], entered)
        whole = self._attention("attention_d", (out_d, made["latent_join"]), self._backward_passes, BACKWARD)
        joined = self._joined("latent_join_d", (whole,), BACKWARD)
        turned = self._turned("rotary_d", (joined,), BACKWARD)
        kernels = self._shape.traffic.norm[1]
        latent_d = self._column_backward("kv_up", joined, made["kv_norm"], a.kv_lora_rank)
        positions_d = self._leave("positions_reduce_d", turned, BACKWARD, columns=a.qk_rope_head_dim)
        sources = (latent_d, made["kv_down"], positions_d)
        keys_d = self._run("kv_norm_d", sources, kernels, (rows, a.kv_lora_rank), BACKWARD)
        parts = [self._down_backward("kv_down", keys_d)]
        if a.q_lora_rank:
            latent_d = self._column_backward("q_up", turned, made["q_norm"], a.q_lora_rank)
            queries_d = self._run("q_norm_d", (latent_d, made["q_down"]), kernels, (rows, a.q_lora_rank), BACKWARD)
            parts.append(self._down_backward("q_down", queries_d))
        else:
            parts.append(self._column_backward("q", turned, made["norm"]))
        traffic, h = self._shape.traffic, self._model.hidden
        num_bytes, launches = traffic.sum_bytes(len(parts)) * rows * h, traffic.sum_launches(len(parts))
        return self._touch("latent_sum_d", parts, num_bytes, (rows, h), BACKWARD, both=True, num_launches=launches)

    def _down_backward(self, name: str, gradient: str) -> str:
        data_gradient = self._data_gradient(name, gradient, self._rows)
        self._weight_gradient(name, self.made["norm"], gradient, self._rows)
        return data_gradient
