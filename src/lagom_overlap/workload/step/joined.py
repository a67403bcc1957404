"""A dense layer with torchao's casts to FP8, one scale per tensor, as Inductor compiles it.

What makes an operand is a part of the kernels that cast it. One reads what the operand is made of and finds the
greatest element, another reads it again and writes FP8 by rows, by columns or both; in bf16 the operand is never
written, so that a residual's sum is made again by each reader, too. Counted in the kernels that PyTorch 2.15 writes for
torchtitan's block (pytorch/torchtitan @9dec370 and @820504e, torchao 0.8.0 and 0.11.0), bytes per element:

- forward: q, k and v read the layer's input (2), and each has a copy (3); `out` reads attention's result (2); gate and
  up read the layer's input and `out`'s result (4) and share a copy; `down` reads gate and up (4 per column of gate).
  The layer's output adds three tensors (8). Matrices: greatest element 2, cast 3;
- recomputed by operators: greatest elements and rows' sums of squares are kept. What a product and the gradients of
  weights need is written at once, by rows and by columns, with a copy for each gradient; so are matrices (2 + 1 + 1);
- backward: the layer's gradient is read for its greatest element (2) and cast both ways (4); one kernel finds the
  greatest elements of both of SwiGLU's gradients (6), one writes both, both ways, and SwiGLU's result by columns
  (6 + 5). A norm's backward reads its input anew, adds the residual's gradient and finds the greatest element of the
  sum: 8, or 10 where its input is a sum. Gradients of queries and keys are turned in FP32, which the two kernels of the
  cast read (4), those of values are summed over the heads that share them in both;
- tensor parallelism: casts by rows come before gathers, and the copy that moves the gathered axis writes the columns,
  too (1 + 1, and 1 for each gradient of a weight).

Of blocks recomputed as a whole the norms' backward is two kernels that write columns, too; that is not followed.
"""

from collections.abc import Sequence
from typing import Final

from lagom_overlap.workload.layer_kinds import LayerKind, Mixer, Mlp
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import FLASH_BACKWARD_PASSES, Access, Phase
from lagom_overlap.workload.parallel.layout import Recompute
from lagom_overlap.workload.precision import ProductFormat
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.layer import LayerOps
from lagom_overlap.workload.step.operators import BACKWARD, FORWARD, StepShape
from lagom_overlap.workload.step.units import Weight

_MADE_OF: Final = {"qkv": 2, "out": 2, "up": 4, "down": 4}
"""Bytes per element of what forward's operands are made of."""
_ROW_COPIES: Final = {"qkv": 3}
"""Where products do not share one."""
_COLUMN_COPIES: Final = {"qkv": 3, "up": 2}
"""One for each gradient of a weight."""
_FOUND: Final = 2
"""Launches of a greatest element: of parts, and of those."""
_GATHERS: Final = {"attention_gather": "qkv", "mlp_gather": "up", "attention_gather_d": "out", "mlp_gather_d": "down"}


def joins(kind: LayerKind, shape: StepShape, layer: int | None) -> bool:
    """Whether a layer is one of those that were counted: attention and a gated MLP, all of it cast by torchao."""
    layout, model = shape.layout, shape.model
    return (
        shape.casts.joined
        and shape.precision.products in (ProductFormat.FP8, ProductFormat.FP8_ROWWISE)
        and not shape.precision.others
        and not shape.precision.is_wide(layer, model.num_layers)
        and kind.mixer in (Mixer.ATTENTION, Mixer.WINDOW)
        and kind.mlp is Mlp.MLP
        and layout.flash_attention
        and layout.sequence_parallel == (layout.tensor > 1)
        and _is_plain(model)
    )


def _is_plain(model: TransformerModel) -> bool:
    return (
        model.gated
        and model.rotary
        and not model.learned_positions
        and model.norms_per_layer == 2
        and not model.linear_bias
        and not model.dropout
    )


class JoinedOps(LayerOps):
    """The operators of such a layer."""

    def __init__(
        self, graph: StepGraph, shape: StepShape, *, layer: int, batch: int, weights: dict[str, Weight], kind: LayerKind
    ) -> None:
        super().__init__(graph, shape, layer=layer, batch=batch, weights=weights, kind=kind)
        self._columns: dict[str, str] = {}  # what wrote an operand by columns
        recompute, every_second = shape.layout.recompute, shape.layout.recompute is Recompute.LAYERS and layer % 2 == 0
        self._is_whole = recompute is Recompute.FULL or every_second
        self._in_products = recompute is Recompute.PRODUCTS

    @property
    def _times_found(self) -> int:
        """How often the gradients of queries, keys and values are read for greatest elements."""
        return 1

    @property
    def _turns_gradients(self) -> bool:
        """Whether these are cast by kernels that rearrange."""
        return True

    def _greatest(
        self,
        part: str,
        sources: Sequence[str],
        read: int,
        shape: tuple[int, int],
        *,
        phase: Phase = FORWARD,
        also: Sequence[str] = (),
    ) -> str:
        """The greatest element of what is made of `read` bytes per element."""
        num_bytes = read * shape[0] * shape[1]
        return self._touch(part, sources, num_bytes, shape, phase, also=also, num_launches=_FOUND)

    def _normed(self, part: str, source: str) -> str:
        shape, also = (self._rows, self._model.hidden), self._around(self._entry, FORWARD)
        return self._greatest(part, (source,), _MADE_OF["qkv"], shape, also=also)

    def forward(self, x: str) -> str:
        """The layer's output; "" if it is recomputed for backward alone."""
        made, shape = self.made, (self._rows, self._model.hidden)
        made["x"] = x
        made["reduced"] = self._mixed(self._normed("norm", x))
        sources = (made["reduced"], x)
        up = self._entering("mlp_gather", "up", self._second_norm(sources))
        if self._again and self._shape.stops_recompute:
            return ""
        act = self._acted(up)
        return self._run("add2", (self._leaving("mlp_reduce", "down", act), *sources), (8,), shape, FORWARD, both=True)

    def _second_norm(self, sources: Sequence[str]) -> str:
        return self._greatest("norm2", sources, _MADE_OF["up"], (self._rows, self._model.hidden))

    def _acted(self, up: str) -> str:
        return self._greatest("act", (up,), _MADE_OF["down"], (self._tokens, self._weights["down"].inputs))

    def _recompute_products(self) -> None:
        made = self.made
        keys = self._entered("attention_gather", "qkv", made["norm"], self._kv_heads * self._model.head_dim)
        self._repeated("repeat", self._rotary("rotary", keys, FORWARD), FORWARD)
        if self._layout.tensor == 1:
            made["reduced"] = self._product("out", made["attention"])
        else:
            self._cast("out", made["attention"], self._tokens, FORWARD)
        self._entered("mlp_gather", "up", made["reduced"], self._weights["up"].outputs // 2)

    def _entered(self, part: str, name: str, source: str, outputs: int) -> str:
        """The part of a column-parallel product that is computed again."""
        gathered = self._enter(part, self._own_rows(name, source, FORWARD), FORWARD, of=name)
        return self._product(name, gathered, outputs=outputs)

    # Casts.

    def _cast(self, name: str, source: str, rows: int, phase: Phase) -> str:
        weight, is_forward = self._weights[name], phase is FORWARD
        part, columns = (f"{name}_cast", weight.inputs) if is_forward else (f"{name}_cast_d", weight.outputs)
        if source == self.made.get(part):
            return source
        shape = (rows, columns)
        if name == "out" and is_forward and not (self._again and self._in_products):
            source = self._greatest("out_max", (source,), _MADE_OF["out"], shape)
        if name == "down" and not is_forward:
            source = self._greatest("down_max_d", (source,), 2, shape, phase=phase)
        # Of matrices, those of backward that nothing recomputes are among forward's.
        num_tensors = max(1, len(weight.parts)) + (is_forward or name == "down")
        source = self._scaled(part, source, phase, num_tensors)
        read = _MADE_OF[name] if is_forward else 2
        written, turns = _ROW_COPIES.get(name, 1), False
        if self._is_cast_before_gather(name, phase):
            written = 1
        elif not is_forward or (self._again and (self._in_products or name != "qkv")):
            by_rows = name != "out" or not is_forward or self._layout.tensor == 1 or self._is_whole
            written, turns = by_rows + _COLUMN_COPIES.get(name, 1), True
        in_rows = name == "up" and is_forward and not self._is_whole  # a reduction that finds sums of squares, too
        access = Access.REARRANGE if turns and not in_rows else Access.STREAM
        cast = self._touch(part, (source,), (read + written) * rows * columns, shape, phase, access=access)
        if turns and is_forward:
            self._columns[name] = cast
        self._matrix_cast(name, phase)
        return cast

    def _matrix_cast(self, name: str, phase: Phase) -> None:
        """The matrix's greatest element and its casts by rows, and for gradients by columns."""
        weight = self._weights[name]
        elements, again = weight.num_params, self._computed_again(weight)
        streamed, turned = 5 * elements, 0
        if phase is FORWARD and self._again and (self._in_products or name != "qkv"):
            streamed, turned = 0 if self._in_products else 2 * again, 4 * again
        elif phase is not FORWARD:
            streamed = 2 * elements if self._is_whole and name == "down" else 0
            turned = 3 * (elements if self._is_whole and name == "qkv" else elements - again)
        self._matrix_kernels(weight, phase, streamed, turned, _FOUND + (turned == 0))

    def _matrix_kernels(self, weight: Weight, phase: Phase, streamed: int, turned: int, launches: int = 1) -> None:
        """What a matrix's kernels move, those that stream, in `launches` for each part, and those that turn."""
        part, shape = f"{weight.name}_matrix" + ("_d" if phase is not FORWARD else ""), (weight.inputs, weight.outputs)
        also, num = (self._parameters(weight.name, phase),), max(1, len(weight.parts))
        if streamed:
            self._touch(part, (), streamed, shape, phase, also=also, num_launches=num * launches)
        if turned:
            access = Access.REARRANGE
            self._touch(f"{part}_turn", (), turned, shape, phase, also=also, access=access, num_launches=num)

    def _computed_again(self, weight: Weight) -> int:
        """Elements of a matrix whose product is recomputed."""
        if self._is_whole:
            return 0 if weight.name == "down" else weight.num_params
        if not self._in_products:
            return 0
        if weight.name == "qkv":
            return weight.inputs * self._kv_heads * self._model.head_dim
        return {"out": 0 if self._layout.tensor > 1 else weight.num_params, "up": weight.num_params // 2}.get(
            weight.name, 0
        )

    def _moved_axis(self, part: str, source: str, phase: Phase, element_bytes: float, columns: int = 0) -> str:
        name = _GATHERS.get(part, "")
        if not name or element_bytes != 1 or not (self._again or phase is BACKWARD):
            return super()._moved_axis(part, source, phase, element_bytes, columns)
        shape = (self._tokens, columns or self._model.hidden)
        num_bytes = (2 + _COLUMN_COPIES.get(name, 1)) * shape[0] * shape[1]
        moved = self._touch(f"{part}_move", (source,), num_bytes, shape, phase, access=Access.REARRANGE)
        if self._again:
            self._columns[name] = moved
        return moved

    def _by_columns(self, name: str, saved: str) -> str:
        """What a matrix's gradient reads, from what forward kept where nothing is recomputed."""
        if name not in self._columns:
            read = 1 if self._is_cast_before_gather(name, FORWARD) else _MADE_OF[name]
            shape = (self._tokens, self._weights[name].inputs)
            num_bytes = (read + _COLUMN_COPIES.get(name, 1)) * shape[0] * shape[1]
            self._columns[name] = self._touch(
                f"{name}_columns", (saved,), num_bytes, shape, BACKWARD, access=Access.REARRANGE
            )
        return self._columns[name]

    # Backward.

    def _weight_gradient(self, name: str, saved: str, gradient: str, rows: int | None = None) -> str:
        return super()._weight_gradient(name, self._by_columns(name, saved), gradient, rows)

    def _norm_backward(self, part: str, gradients: Sequence[str], residual: str, saved: str) -> str:
        """Of gradient, input (or its two parts), residual's gradient and result, two bytes each."""
        shape, also = (self._rows, self._model.hidden), self._around(self._entry, BACKWARD)
        kernels, sources = ((10, 0), (self.made["reduced"],)) if part == "norm2" else ((8, 0), ())
        return self._run(f"{part}_d", (*gradients, residual, saved, *sources), kernels, shape, BACKWARD, also=also)

    def _mlp_backward(self, gradient: str) -> tuple[str, ...]:
        made, shape = self.made, (self._tokens, self._weights["down"].inputs)
        entered, down_d = self._entering_d("mlp_gather_d", "down", gradient)
        cast = self._act_backward(down_d, shape)
        self._matrix_cast("up", BACKWARD)
        self._columns["down"] = cast
        self._weight_gradient("down", cast, entered)
        return (self._column_backward("up", cast, made["norm2"]),)

    def _act_backward(self, down_d: str, shape: tuple[int, int]) -> str:
        """SwiGLU's gradients, cast."""
        act_d = self._greatest("act_d", (down_d, self.made["up"]), 6, shape, phase=BACKWARD)
        act_d = self._scaled("act_d", act_d, BACKWARD, 3)
        num_bytes = 11 * shape[0] * shape[1]
        return self._touch("up_cast_d", (act_d,), num_bytes, shape, BACKWARD, access=Access.REARRANGE)

    def _core_backward(self, out_d: str) -> str:
        made, rows, head = self.made, self._tokens, self._model.head_dim
        queries, keys = self._heads * head * rows, self._kv_heads * head * rows
        repeated = queries if self._shape.traffic.repeats_keys else keys
        whole = self._attention(
            "attention_d", (out_d, made.get("repeat") or made["rotary"]), FLASH_BACKWARD_PASSES, BACKWARD
        )
        shape = (rows, self._weights["qkv"].outputs)
        turned = (6 + 8) * queries + (2 * repeated + 4 * keys) + 8 * keys
        rotary = self._touch("rotary_d", (whole,), turned, shape, BACKWARD, num_launches=4)
        return self._gradients_cast(rotary, (queries, keys, repeated))

    def _gradients_cast(self, source: str, elements: tuple[int, int, int]) -> str:
        """The gradients of queries and keys, in FP32, and of values, of `repeated` elements that heads share."""
        queries, keys, repeated = elements
        shape = (self._tokens, self._weights["qkv"].outputs)
        found = self._times_found * (4 * (queries + keys) + 2 * repeated)
        source = self._touch("qkv_max_d", (source,), found, shape, BACKWARD, num_launches=3 * _FOUND)
        source = self._scaled("qkv_cast_d", source, BACKWARD, 3)
        num_bytes = 6 * (queries + keys) + 2 * (repeated + keys)
        access = Access.REARRANGE if self._turns_gradients else Access.STREAM
        cast = self._touch("qkv_cast_d", (source,), num_bytes, shape, BACKWARD, access=access, num_launches=3)
        self._matrix_cast("qkv", BACKWARD)
        return cast
