"""The operators of one transformer layer, of one micro-batch on one rank.

In backward with sequence parallelism the layer's input is gathered again during the product for the input's gradient,
and that gradient's reduce-scatter runs during the product for the weight's (Megatron-LM,
`linear_with_grad_accumulation_and_async_allreduce`). With a shared MLP, experts and it are computed in turn.
"""

from collections.abc import Sequence

from lagom_overlap.workload.layer_kinds import Mixer, Mlp
from lagom_overlap.workload.parallel.layout import GraphModule, Recompute, RecomputeModule
from lagom_overlap.workload.step.attention import AttentionOps
from lagom_overlap.workload.step.experts import ExpertOps
from lagom_overlap.workload.step.operators import BACKWARD, FORWARD, WEIGHT
from lagom_overlap.workload.streams import COMPUTE


class LayerOps(AttentionOps, ExpertOps):
    """The operators of a layer of a kind; its mixer is attention of whole or windowed sequences, or none."""

    def forward(self, x: str) -> str:
        """The layer's output; "" if it is recomputed for backward alone, which needs what its products read."""
        h, rows = self._model.hidden, self._rows
        shape, elements = (rows, h), rows * h
        self.made["x"] = middle = x
        added = (7 if self._model.dropout else 6) * elements
        self._graph_module = self._mixer_graph
        if self._kind.mixer is not Mixer.NONE:
            reduced = self._mixed(self._normed("norm", x))
            middle = self._touch("add1", (reduced, x), added, shape, FORWARD, both=True)
        if self._kind.mlp is Mlp.NONE:
            return middle
        self._graph_module = self._mlp_graph
        norm2 = self.made["norm"] if self._model.norms_per_layer == 1 else self._normed("norm2", middle)
        if self._again and self._shape.stops_recompute and self._kind.mlp is Mlp.MLP:
            self._cast("down", self._mlp_act(norm2), self._tokens, FORWARD)
            return ""
        experts = (self._experts(norm2),) if self._kind.mlp is Mlp.EXPERTS else ()
        mlp = self._mlp(norm2) if self._has_mlp else ()
        if experts:
            self._graph_module = None
        return self._touch("add2", (*experts, *mlp, middle), added, shape, FORWARD, both=True)

    @property
    def _mixer_graph(self) -> GraphModule:
        return GraphModule.MAMBA if self._kind.mixer is Mixer.MAMBA else GraphModule.ATTN

    @property
    def _mlp_graph(self) -> GraphModule:
        return GraphModule.MOE_ROUTER if self._kind.mlp is Mlp.EXPERTS else GraphModule.MLP

    @property
    def _has_mlp(self) -> bool:
        """Whether there is an MLP that every token visits: the layer's own, or the one next to its experts."""
        return self._kind.mlp is not Mlp.EXPERTS or self._model.shared_ffn > 0

    def _mixed(self, norm: str) -> str:
        """The mixer's result, of the layer's normed input."""
        return self._leaving("attention_reduce", "out", self._core(self._entering("attention_gather", "qkv", norm)))

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
            case Recompute.SELECTIVE if self._layout.recompute_modules:
                self._recompute_modules(self._layout.recompute_modules)
            case Recompute.SELECTIVE if not self._layout.flash_attention:
                self._recompute_core()
        self._again = False

    def _recompute_modules(self, modules: Sequence[RecomputeModule]) -> None:
        """The parts that Megatron-Core's selective recomputation names, whole ones to their last product."""
        made, mlp = self.made, self._kind.mlp
        self._graph_module = self._mixer_graph
        if RecomputeModule.LAYERNORM in modules and self._kind.mixer is not Mixer.NONE:
            self._normed("norm", made["x"])
        if RecomputeModule.CORE_ATTN in modules:
            self._recompute_core()
        self._graph_module = self._mlp_graph
        if RecomputeModule.LAYERNORM in modules and "norm2" in made:
            self._normed("norm2", made.get("add1", made["x"]))
        norm2 = made.get("norm2") or made.get("norm", "")
        if RecomputeModule.MLP in modules and mlp is Mlp.MLP:
            self._mlp(norm2)
        if RecomputeModule.MOE in modules and mlp is Mlp.EXPERTS:
            self._experts(norm2)
            if self._has_mlp:
                self._mlp(norm2)
        elif RecomputeModule.MOE_ACT in modules and mlp is Mlp.EXPERTS:
            self._graph_module = None
            self._expert_act("expert_act", (made["expert_up"],), FORWARD)

    def _recompute_core(self) -> None:
        if self._kind.mixer in (Mixer.ATTENTION, Mixer.WINDOW):
            self._core(self.made["qkv"])

    def _recompute_products(self) -> None:
        """The operator mode of torchtitan: of q, k, v, o, w1, w3, w2 every second one, attention and scatters are kept.

        What is fused is left out where its reader is kept: with tensor parallelism the scatter after o. FP8
        operands are cast again for the gradients of weights, by the greatest elements that are kept.
        """
        made, h, rows = self.made, self._model.hidden, self._rows
        norm = self._own_rows("qkv", self._normed("norm", made["x"]), FORWARD)
        gathered = self._enter("attention_gather", norm, FORWARD, of="qkv")
        keys = self._product("qkv", gathered, outputs=self._kv_heads * self._model.head_dim)
        self._repeated("repeat", self._rotary("rotary", keys, FORWARD), FORWARD)
        if self._layout.tensor == 1:
            reduced = self._product("out", made["attention"])
        else:
            self._cast("out", made["attention"], self._tokens, FORWARD)
            reduced = made["out"]
        middle = self._touch("add1", (reduced, made["x"]), 6 * rows * h, (rows, h), FORWARD, both=True)
        norm2 = self._own_rows("up", self._normed("norm2", middle), FORWARD)
        norm2 = self._enter("mlp_gather", norm2, FORWARD, of="up")
        up = self._product("up", norm2, outputs=self._weights["up"].outputs // 2)
        act = self._act("act", (up,), self._tokens, self._weights["down"].inputs, FORWARD)
        self._cast("down", act, self._tokens, FORWARD)

    def _normed(self, part: str, source: str) -> str:
        shape, kernels = (self._rows, self._model.hidden), self._shape.traffic.norm[0]
        return self._run(part, (source,), kernels, shape, FORWARD, also=self._around(self._entry, FORWARD))

    def _mlp_act(self, norm2: str) -> str:
        up = self._entering("mlp_gather", "up", norm2)
        return self._act("act", (up,), self._tokens, self._weights["down"].inputs, FORWARD)

    def _mlp(self, norm2: str) -> tuple[str, ...]:
        return (self._leaving("mlp_reduce", "down", self._mlp_act(norm2)),)

    # Backward.

    def backward(self, gradient: str) -> str:
        """The gradient of the layer's input, given that of its output."""
        made, two = self.made, self._model.norms_per_layer == 2
        parts: tuple[str, ...] = ()
        middle = gradient
        self._graph_module = self._mlp_graph
        if self._kind.mlp is not Mlp.NONE:
            branch = self._residual_backward("residual2", gradient)
            experts = self._experts_backward(branch) if self._kind.mlp is Mlp.EXPERTS else ()
            parts = (*experts, *(self._mlp_backward(branch) if self._has_mlp else ()))
            if two:
                middle = self._norm_backward("norm2", parts, gradient, made.get("add1", made["x"]))
        if self._kind.mixer is Mixer.NONE:
            return middle
        self._graph_module = self._mixer_graph
        reduced = self._mixed_backward(self._residual_backward("residual1", middle))
        return self._norm_backward("norm", (reduced,) if two else (reduced, *parts), middle, made["x"])

    def _mixed_backward(self, gradient: str) -> str:
        """The gradient of what the mixer read."""
        entered, out_d = self._entering_d("attention_gather_d", "out", gradient)
        self._weight_gradient("out", self.made["attention"], entered)
        core_d = self._core_backward(out_d)
        self._bias_gradient("qkv", core_d, self._weights["qkv"].outputs)
        return self._column_backward("qkv", core_d, self.made["norm"])

    def _entering_d(self, part: str, name: str, gradient: str) -> tuple[str, str]:
        """The gathered gradient of a row-parallel product's output, and that of its input; in parts, at once."""
        parts = self._layout.overlap_tensor
        gradient = self._own_rows(name, gradient, BACKWARD)
        entered = self._enter(part, gradient, BACKWARD, is_async=parts, of=name)
        data_gradient = self._data_gradient(name, gradient if parts else entered)
        if parts:
            self._in_parts(part, entered, BACKWARD, of=name)
        return entered, data_gradient

    def _norm_backward(self, part: str, gradients: Sequence[str], residual: str, saved: str) -> str:
        """Gradients of input and scale, then the residual's added."""
        shape = (self._rows, self._model.hidden)
        elements = self._rows * self._model.hidden
        kernels, also = self._shape.traffic.norm[1], self._around(self._entry, BACKWARD)
        norm_d = self._run(f"{part}_d", (*gradients, saved), kernels, shape, BACKWARD, also=also)
        return self._touch(f"{part}_add_d", (norm_d, residual), 6 * elements, shape, BACKWARD, both=True)

    def _residual_backward(self, part: str, gradient: str) -> str:
        """The gradient of a branch: through dropout where there is one; its bias's gradient."""
        shape = (self._rows, self._model.hidden)
        if self._model.dropout:
            gradient = self._touch(f"{part}_d", (gradient,), 5 * shape[0] * shape[1], shape, BACKWARD, both=True)
        if part != "residual2" or self._kind.mlp is not Mlp.EXPERTS:  # experts have their own
            self._bias_gradient(part, gradient, self._model.hidden, self._rows)
        return gradient

    def _column_backward(self, name: str, gradient: str, saved: str, columns: int = 0) -> str:
        """Backward of a column-parallel product: the input's gradient, its sum over ranks, the weight's gradient."""
        hides = self._shape.hides_tensor and (self._layout.sequence_parallel or self._layout.async_tensor)
        parts = self._layout.overlap_tensor and not self._shape.hides_tensor
        again = saved
        if hides and not self._layout.frozen:
            again = self._enter(f"{name}_gather_w", saved, WEIGHT, is_async=True, columns=columns, of=name)
        if parts:
            cast = self._cast(name, gradient, self._tokens, BACKWARD)
            reduced = self._leave(f"{name}_reduce_d", cast, BACKWARD, is_async=True, columns=columns)
            self._data_gradient(name, cast)
            self._graph.hold_back(COMPUTE, [reduced])
        else:
            data = self._data_gradient(name, gradient)
            reduced = self._leave(f"{name}_reduce_d", data, BACKWARD, is_async=hides, columns=columns)
        self._weight_gradient(name, again, gradient)
        if hides and self._layout.tensor > 1:
            self._graph.hold_back(COMPUTE, [reduced])
        return reduced

    def _mlp_backward(self, gradient: str) -> tuple[str, ...]:
        made, width = self.made, self._weights["down"].inputs
        entered, down_d = self._entering_d("mlp_gather_d", "down", gradient)
        self._weight_gradient("down", made["act"], entered)
        act_d = self._act("act_d", (down_d, made["up"]), self._tokens, width, BACKWARD)
        self._bias_gradient("up", act_d, self._weights["up"].outputs)
        return (self._column_backward("up", act_d, made.get("norm2") or made["norm"]),)
