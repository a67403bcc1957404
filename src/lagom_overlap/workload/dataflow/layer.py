"""One transformer layer, forward and backward, of one micro-batch.

Sources: Megatron-LM (arXiv 1909.08053, Fig. 3; 2205.05198, Fig. 5) for tensor and sequence parallelism, GShard (arXiv
2006.16668) for experts. Bytes of memory-bound operators count reads plus writes of 2-byte activations.
"""

from collections.abc import Sequence

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.dataflow.axes import (
    attention_axes,
    elementwise_axes,
    moved_axes,
    product_axes,
    weight_gradient_axes,
)
from lagom_overlap.workload.dataflow.builder import StepBuilder
from lagom_overlap.workload.dataflow.groups import StepGroups
from lagom_overlap.workload.dataflow.units import Unit, Weight
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import Attention, Gemm, MemoryBound, Origin, Phase
from lagom_overlap.workload.parallel.layer import ELEMENT_BYTES, FLASH_BACKWARD_PASSES
from lagom_overlap.workload.parallel.layout import ParallelLayout

_FORWARD, _BACKWARD, _WEIGHT = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD


class LayerBuilder:
    """Adds the operators of layer `layer` (None: the tables around the layers) for micro-batch `batch`."""

    def __init__(
        self,
        build: StepBuilder,
        model: TransformerModel,
        layout: ParallelLayout,
        groups: StepGroups,
        *,
        seq_len: int,
        unit: Unit,
        layer: int | None,
        batch: int,
        weights: dict[str, Weight],
    ) -> None:
        self._build, self._model, self._layout, self._groups = build, model, layout, groups
        self._seq_len, self._unit, self._layer, self._batch = seq_len, unit, layer, batch
        self._weights = weights
        self._tokens = layout.micro_batch * seq_len
        self._rows = self._tokens // layout.tensor if layout.sequence_parallel else self._tokens
        self.made: dict[str, str] = {}

    # Kinds of operator.

    def _name(self, part: str) -> str:
        return f"mb{self._batch}.{'head' if self._layer is None else f'layer{self._layer}'}.{part}"

    def _origin(self, phase: Phase, part: str) -> Origin:
        where = "head" if self._layer is None else f"layers.{self._layer}"
        return Origin(phase=phase, layer=self._layer, microbatch=self._batch, module=f"{where}.{part}")

    def _matrix(self, weight: Weight, phase: Phase) -> tuple[str, tuple[str, ...]]:
        """What gathers a matrix: as a tensor that can be cut, or as something to wait for."""
        gathered = weight.gathered.get((phase, self._batch), "")
        if self._unit is Unit.MATRIX and weight.num_matrices == 1:
            return gathered, ()
        return "", (gathered,)

    def _product(self, name: str, source: str, rows: int | None = None) -> str:
        weight, rows = self._weights[name], self._tokens if rows is None else rows
        matrix, also = self._matrix(weight, _FORWARD)
        self.made[name] = self._build.comp(
            self._name(name),
            Gemm(rows, weight.outputs, weight.inputs, ELEMENT_BYTES),
            self._origin(_FORWARD, name),
            product_axes(source, matrix, (rows, weight.inputs, weight.outputs), (2, 1)),
            also,
        )
        return self.made[name]

    def _data_gradient(self, name: str, gradient: str, rows: int | None = None) -> str:
        weight, rows = self._weights[name], self._tokens if rows is None else rows
        matrix, also = self._matrix(weight, _BACKWARD)
        return self._build.comp(
            self._name(f"{name}_d"),
            Gemm(rows, weight.inputs, weight.outputs, ELEMENT_BYTES),
            self._origin(_BACKWARD, name),
            product_axes(gradient, matrix, (rows, weight.outputs, weight.inputs)),
            also,
        )

    def _weight_gradient(self, name: str, saved: str, gradient: str, rows: int | None = None) -> str:
        weight, rows = self._weights[name], self._tokens if rows is None else rows
        before = weight.gradients[-1:] if self._layout.zero_stage < 3 else []
        made = self._build.comp(
            self._name(f"{name}_w"),
            Gemm(weight.inputs, weight.outputs, rows, ELEMENT_BYTES),
            self._origin(_WEIGHT, name),
            weight_gradient_axes(saved, gradient, (weight.inputs, rows, weight.outputs)),
            before,
        )
        weight.gradients.append(made)
        return made

    def _touch(
        self,
        part: str,
        sources: Sequence[str],
        tensors: float,
        shape: tuple[int, int],
        phase: Phase,
        *,
        both: bool = False,
    ) -> str:
        """A memory-bound operator over `tensors` matrices of `shape`, elementwise along columns too if `both`."""
        rows, columns = shape
        self.made[part] = self._build.comp(
            self._name(part),
            MemoryBound(max(1, int(tensors * rows * columns * ELEMENT_BYTES))),
            self._origin(phase, part),
            elementwise_axes(sources, rows, columns if both else None),
        )
        return self.made[part]

    def _tensor_comm(self, part: str, kind: CollectiveKind, source: str, phase: Phase) -> str:
        if self._layout.tensor == 1:
            return source
        rows = self._tokens if kind is CollectiveKind.ALL_REDUCE else self._rows
        hidden = self._model.hidden
        return self._build.comm(
            self._name(part),
            self._groups.collective(kind, self._tokens * hidden * ELEMENT_BYTES, "tp"),
            "tp",
            origin=self._origin(phase, part),
            deps=(source,),
            shards=moved_axes(source, rows, hidden),
        )

    def _enter(self, part: str, source: str, phase: Phase) -> str:
        if not self._layout.sequence_parallel:
            return source
        return self._tensor_comm(part, CollectiveKind.ALL_GATHER, source, phase)

    def _leave(self, part: str, source: str, phase: Phase) -> str:
        kind = CollectiveKind.REDUCE_SCATTER if self._layout.sequence_parallel else CollectiveKind.ALL_REDUCE
        return self._tensor_comm(part, kind, source, phase)

    def _attention(self, part: str, sources: Sequence[str], passes: float, phase: Phase) -> str:
        heads = max(1, self._model.num_heads // self._layout.tensor)
        batch = self._layout.micro_batch
        work = Attention(
            batch=batch,
            num_heads=heads,
            seq_len=self._seq_len,
            head_dim=self._model.head_dim,
            passes=passes,
            element_bytes=ELEMENT_BYTES,
        )
        spec = attention_axes(sources, heads, batch, not self._layout.sequence_parallel)
        self.made[part] = self._build.comp(self._name(part), work, self._origin(phase, part), spec)
        return self.made[part]

    def _exchange(self, part: str, source: str, phase: Phase) -> str:
        if self._layout.expert == 1:
            return source
        rows = self._routed
        size = rows * self._model.hidden * ELEMENT_BYTES
        call = self._groups.collective(CollectiveKind.ALL_TO_ALL, size, "ep")
        spec = moved_axes(source, rows, self._model.hidden)
        return self._build.comm(
            self._name(part), call, "ep", origin=self._origin(phase, part), deps=(source,), shards=spec
        )

    @property
    def _routed(self) -> int:
        """Rows that this rank sends to experts."""
        return self._tokens * self._model.experts_per_token // self._layout.tensor

    # Forward.

    def forward(self, x: str) -> str:
        """The layer's output."""
        h, rows = self._model.hidden, self._rows
        norm = self._touch("norm", (x,), 2, (rows, h), _FORWARD)
        qkv = self._product("qkv", self._enter("attention_gather", norm, _FORWARD))
        out = self._product("out", self._attention("attention", (qkv,), 1.0, _FORWARD))
        reduced = self._leave("attention_reduce", out, _FORWARD)
        middle = self._touch("add1", (reduced, x), 3, (rows, h), _FORWARD, both=True)
        norm2 = self._touch("norm2", (middle,), 2, (rows, h), _FORWARD)
        made = self._experts(norm2) if self._model.num_experts else self._mlp(norm2)
        self.made["x"] = x
        return self._touch("add2", (*made, middle), 2 + len(made), (rows, h), _FORWARD, both=True)

    def _mlp(self, norm2: str) -> tuple[str, ...]:
        weight = self._weights["down"]
        up = self._product("up", self._enter("mlp_gather", norm2, _FORWARD))
        gated = self._model.gated
        act = self._touch("act", (up,), 3 if gated else 2, (self._tokens, weight.inputs), _FORWARD, both=not gated)
        return (self._leave("mlp_reduce", self._product("down", act), _FORWARD),)

    def _experts(self, norm2: str) -> tuple[str, ...]:
        h, rows, routed = self._model.hidden, self._rows, self._routed
        router = self._product("router", norm2, rows)
        permuted = self._touch("permute", (norm2, router), 2 * routed / rows, (rows, h), _FORWARD)
        sent = self._exchange("dispatch", permuted, _FORWARD)
        gated, width = self._model.gated, self._weights["expert_down"].inputs
        up = self._product("expert_up", sent, routed)
        act = self._touch("expert_act", (up,), 3 if gated else 2, (routed, width), _FORWARD, both=not gated)
        back = self._exchange("combine", self._product("expert_down", act, routed), _FORWARD)
        self.made["sent"] = sent
        merged = self._touch("unpermute", (back, router), 2 * routed / rows, (rows, h), _FORWARD)
        return (merged, *self._mlp(norm2)) if self._model.shared_ffn else (merged,)

    # Backward.

    def backward(self, gradient: str) -> str:
        """The gradient of the layer's input, given that of its output."""
        made, h, rows = self.made, self._model.hidden, self._rows
        parts = self._experts_backward(gradient) if self._model.num_experts else self._mlp_backward(gradient)
        middle = self._touch("norm2_d", (*parts, gradient, made["add1"]), 4 + len(parts), (rows, h), _BACKWARD)
        entered = self._enter("attention_gather_d", middle, _BACKWARD)
        out_d = self._data_gradient("out", entered)
        self._weight_gradient("out", made["attention"], entered)
        attention_d = self._attention("attention_d", (out_d, made["qkv"]), FLASH_BACKWARD_PASSES, _BACKWARD)
        reduced = self._column_backward("qkv", attention_d, made["norm"])
        return self._touch("norm_d", (reduced, middle, made["x"]), 5, (rows, h), _BACKWARD)

    def _column_backward(self, name: str, gradient: str, saved: str) -> str:
        """Backward of a column-parallel product: the input's gradient, its sum over ranks, the weight's gradient."""
        data = self._data_gradient(name, gradient)
        again = self._enter(f"{name}_gather_w", saved, _WEIGHT)
        reduced = self._leave(f"{name}_reduce_d", data, _BACKWARD)
        self._weight_gradient(name, again, gradient)
        return reduced

    def _mlp_backward(self, gradient: str) -> tuple[str, ...]:
        made, width = self.made, self._weights["down"].inputs
        entered = self._enter("mlp_gather_d", gradient, _BACKWARD)
        down_d = self._data_gradient("down", entered)
        self._weight_gradient("down", made["act"], entered)
        gated = self._model.gated
        sources = (down_d, made["up"])
        act_d = self._touch("act_d", sources, 5 if gated else 3, (self._tokens, width), _BACKWARD, both=not gated)
        return (self._column_backward("up", act_d, made["norm2"]),)

    def _experts_backward(self, gradient: str) -> tuple[str, ...]:
        made, h, rows, routed = self.made, self._model.hidden, self._rows, self._routed
        spread = self._touch("unpermute_d", (gradient, made["router"]), 2 * routed / rows, (rows, h), _BACKWARD)
        sent = self._exchange("combine_d", spread, _BACKWARD)
        down_d = self._data_gradient("expert_down", sent, routed)
        gated, width = self._model.gated, self._weights["expert_down"].inputs
        sources = (down_d, made["expert_up"])
        act_d = self._touch("expert_act_d", sources, 5 if gated else 3, (routed, width), _BACKWARD, both=not gated)
        up_d = self._data_gradient("expert_up", act_d, routed)
        self._weight_gradient("expert_down", made["expert_act"], sent, routed)
        self._weight_gradient("expert_up", made["sent"], act_d, routed)
        back = self._exchange("dispatch_d", up_d, _BACKWARD)
        merged = self._touch("permute_d", (back,), 2 * routed / rows, (rows, h), _BACKWARD)
        router_d = self._data_gradient("router", spread, rows)
        self._weight_gradient("router", made["norm2"], spread, rows)
        shared = self._mlp_backward(gradient) if self._model.shared_ffn else ()
        return (merged, router_d, *shared)

    # The tables.

    def embed(self) -> str:
        """The lookup; its table is gathered like a matrix."""
        weight = self._weights["embed"]
        gathered = weight.gathered.get((_FORWARD, self._batch), "")
        work = MemoryBound(2 * self._tokens * self._model.hidden * ELEMENT_BYTES)
        spec = elementwise_axes(("",), self._tokens)
        self.made["embed"] = self._build.comp(
            self._name("embed"), work, self._origin(_FORWARD, "embed"), spec, (gathered,)
        )
        return self._leave("embed_tp_reduce", self.made["embed"], _FORWARD)

    def head(self, x: str) -> str:
        """Norm, logits, loss, and the gradient of the last layer's output."""
        h, vocab, rows = self._model.hidden, self._weights["logits"].outputs, self._rows
        norm = self._touch("norm", (x,), 2, (rows, h), _FORWARD)
        logits = self._product("logits", self._enter("head_tp_gather", norm, _FORWARD))
        loss = self._touch("loss", (logits,), 4, (self._tokens, vocab), Phase.LOSS)
        reduced = self._column_backward("logits", loss, norm)
        return self._touch("norm_d", (reduced, x), 4, (rows, h), _BACKWARD)

    def embed_backward(self, gradient: str) -> None:
        """The table's gradient."""
        entered = self._enter("embed_tp_gather_d", gradient, _BACKWARD)
        weight = self._weights["embed"]
        before = weight.gradients[-1:] if self._layout.zero_stage < 3 else []
        work = MemoryBound(3 * self._tokens * self._model.hidden * ELEMENT_BYTES)
        spec = elementwise_axes((entered,), self._tokens)
        weight.gradients.append(
            self._build.comp(self._name("embed_w"), work, self._origin(_WEIGHT, "embed"), spec, before)
        )
