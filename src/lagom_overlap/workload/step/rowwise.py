"""The same layer with a scale for each row of an operand: torchao's recipe `rowwise`, as Inductor compiles it.

Forward, a scale's row is what a product sums over, so that one kernel finds it and casts. Backward sums over other
axes: each operand is scaled and cast anew along them, by kernels that find the greatest elements of its columns first.
Products of backward run without scales and without fast accumulation, in cuBLAS's kernel for one scale per tensor,
and what reads a result multiplies it by its scales (torchao 0.11.0, `float8_ops.py`: CUTLASS's kernel for row scales
is slow without fast accumulation); results that autograd keeps take a kernel of their own. Forward's run in that
CUTLASS kernel, most shapes at 90 to 100 % of cuBLAS's rate (pytorch issue 147971), here at all of it. With
tensor parallelism nothing is cast before a gather (pytorch/torchtitan @820504e, `parallelize_llama.py`), and a scale
along a cut axis is found by all ranks.

Counted as in `joined`, of torchtitan @820504e with torchao 0.11.0 and its recomputation by operators. torchtitan lets
Inductor round where eager PyTorch does (`emulate_precision_casts`): kernels of rows keep an FP32 copy of what they
cast. Bytes per element, of kernels that stream and of those that turn. Layers that are recomputed otherwise are put
together from the same kernels.
"""

from collections.abc import Sequence
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.ops import Access, Phase
from lagom_overlap.workload.step.groups import TENSOR
from lagom_overlap.workload.step.joined import JoinedOps
from lagom_overlap.workload.step.operators import BACKWARD, FORWARD, WEIGHT
from lagom_overlap.workload.streams import COMPUTE

_Bytes = tuple[int, int]
_OPERANDS: Final[dict[str, _Bytes]] = {"qkv": (9, 0), "out": (3, 0), "up": (10, 0), "down": (5, 0)}
"""Read 2 (two tensors: 4), an FP32 copy 4 where what is cast was not written before, and a copy for each product."""
_CUT_UP: Final[_Bytes] = (8, 0)
"""After a gather its norm is one tensor."""
_AGAIN: Final[dict[str, _Bytes]] = {"qkv": (0, 0), "out": (3, 0), "up": (5, 0)}
"""For products that are computed again; k's operand is written with those of gradients."""
_CUT_AGAIN: Final[dict[str, _Bytes]] = {"qkv": (5, 5), "out": (2, 3), "up": (5, 4)}
"""By rows 3; columns' greatest elements 2, then read 2 and 1 for each copy by columns."""
_GRADIENTS: Final[dict[str, _Bytes]] = {"down": (3, 0), "out": (0, 0)}
"""That of `out` is cast with the norm before it."""
_CUT_GRADIENTS: Final[dict[str, _Bytes]] = {"down": (6, 0), "out": (6, 0)}
"""Columns' greatest elements 2; one kernel of rows finds theirs and casts both ways 4."""
_ACT_D: Final[_Bytes] = (66, 5)
"""Per column of gate: `down`'s input gradient scaled to FP32 and the columns of SwiGLU's result found 10; that result
by columns and one gradient by rows, which the L2 cache does not hold, 23; the other, columns and copies in FP32 33;
what is left by columns 5."""
_CUT_ACT_D: Final[_Bytes] = (37, 12)
"""The gradient scaled to FP32 8, columns found 8 and 2, SwiGLU's result and one gradient cast 19, the other 12."""
_NORM_D: Final = {"norm2": 66, "norm": 37}
"""With what is cast of results for gradients: 37, 10, 15; columns found 2, 31; each scale's gradient 4."""
_INPUT_D: Final = {False: {"up": 4, "qkv": 8}, True: {"up": 4, "qkv": 4}}
"""What scaling adds to the sum of input gradients, by whether tensor parallelism cuts."""
_MATRIX_D: Final = {
    False: {"qkv": (6, 3), "out": (2, 3), "up": (2, 3), "down": (3, 0)},
    True: {"qkv": (6, 3), "out": (6, 3), "up": (2, 3), "down": (6, 3)},
}
"""Columns' greatest elements 2, cast 3; copied before where the workaround for pytorch issue 141881 adds a zero 4."""
_ATTENTION_D: Final[_Bytes] = (2, 3)
_SCALE: Final = 4
"""A product's result read and written."""
_FP64: Final = 8


class RowwiseOps(JoinedOps):
    """The operators of a layer."""

    @property
    def _is_cut(self) -> bool:
        return self._layout.tensor > 1

    @property
    def _times_found(self) -> int:
        return 2 if self._is_cut else 1  # of columns, and where rows are cut of those before

    @property
    def _turns_gradients(self) -> bool:
        return self._is_cut

    def _is_cast_before_gather(self, name: str, phase: Phase) -> bool:
        return False

    def _normed(self, part: str, source: str) -> str:
        return self._normed_of(part, (source,), 4)

    def _second_norm(self, sources: Sequence[str]) -> str:
        return self._normed_of("norm2", sources, 6)

    def _normed_of(self, part: str, sources: Sequence[str], moved: int) -> str:
        """A norm is a part of the cast that reads it, unless that comes after a gather."""
        if not self._is_cut:
            self.made[part] = sources[0]
            return sources[0]
        shape, also = (self._rows, self._model.hidden), self._around(self._entry, FORWARD)
        return self._run(part, sources, (moved,), shape, FORWARD, also=also)

    def _acted(self, up: str) -> str:
        return super()._acted(up) if self._is_cut else up

    def _recompute_products(self) -> None:
        made = self.made
        if self._is_cut:
            made["norm"] = self._normed("norm", made["x"])
        super()._recompute_products()

    # Casts.

    def _moved_axis(self, part: str, source: str, phase: Phase, element_bytes: float, columns: int = 0) -> str:
        """Of gathers a part of the casts that read them."""
        if "gather" in part:
            return source
        return super()._moved_axis(part, source, phase, element_bytes, columns)

    def _in_kernels(
        self, part: str, source: str, num_bytes: _Bytes, shape: tuple[int, int], phase: Phase, *, launches: int = 1
    ) -> str:
        """What a tensor's kernels move, those that stream and those that turn."""
        for bytes_each, access, suffix in zip(num_bytes, (Access.STREAM, Access.REARRANGE), ("", "_turn"), strict=True):
            if bytes_each:
                total = bytes_each * shape[0] * shape[1]
                source = self._touch(
                    part + suffix, (source,), total, shape, phase, access=access, num_launches=launches
                )
        self.made[part] = source
        return source

    def _cast(self, name: str, source: str, rows: int, phase: Phase) -> str:
        weight, is_forward = self._weights[name], phase is FORWARD
        part, columns = (f"{name}_cast", weight.inputs) if is_forward else (f"{name}_cast_d", weight.outputs)
        if source == self.made.get(part):
            return source
        cut, again = self._is_cut, self._again and self._in_products
        if not is_forward:
            kernels = (_CUT_GRADIENTS if cut else _GRADIENTS)[name]
        elif again:
            kernels = (_CUT_AGAIN if cut else _AGAIN)[name]
        else:
            kernels = _CUT_UP if cut and name == "up" else _OPERANDS[name]
        if is_forward and not again and name in ("out", "down") and cut:
            if name == "out":
                source = self._greatest("out_max", (source,), 2, (rows, columns))
            source = self._found_by_all(part, source, phase, 1)
        cast = self._in_kernels(part, source, kernels, (rows, columns), phase)
        if is_forward and again:
            self._columns[name] = cast
        self._matrix_cast(name, phase)
        return cast

    def _found_by_all(self, part: str, source: str, phase: Phase, num_operands: int) -> str:
        """Greatest elements of rows and of a matrix along an axis that is cut, for so many operands each."""
        if not self._is_cut:
            return source
        for number in range(num_operands):
            for what, elements in (("rows", self._tokens), ("matrix", self._model.hidden)):
                name = f"{part}_{what}{number or ''}"
                call = self._shape.groups.collective(CollectiveKind.ALL_REDUCE, _FP64 * elements, TENSOR)
                source = self._graph.comm(
                    self._name(name), call, TENSOR, origin=self._origin(phase, name), deps=(source,)
                )
                self._graph.hold_back(COMPUTE, [source])
        return source

    def _matrix_cast(self, name: str, phase: Phase) -> None:
        weight = self._weights[name]
        elements = weight.num_params
        streamed, turned = 3 * elements, 0
        if phase is FORWARD and self._again and self._in_products:
            streamed = 3 * self._computed_again(weight)
        elif phase is FORWARD:
            streamed += 2 * elements if self._is_cut and name in ("out", "down") else 0
        else:
            found, cast = _MATRIX_D[self._is_cut][name]
            streamed, turned = found * elements, cast * elements
        self._matrix_kernels(weight, phase, streamed, turned)

    def _by_columns(self, name: str, saved: str) -> str:
        """What a matrix's gradient reads; without tensor parallelism all but attention's result is cast elsewhere."""
        if not self._is_cut:
            if name != "out":
                return saved
            shape = (self._tokens, self._weights[name].inputs)
            return self._in_kernels("out_columns", saved, _ATTENTION_D, shape, BACKWARD)
        if name not in self._columns:
            shape = (self._tokens, self._weights[name].inputs)
            found, cast = 2, _CUT_AGAIN[name][1]
            self._columns[name] = self._in_kernels(f"{name}_columns", saved, (found, cast), shape, BACKWARD)
        return self._columns[name]

    def _scaled(self, part: str, source: str, phase: Phase, num_tensors: int) -> str:
        return self._found_by_all(part, source, phase, {"act_d": 2, "qkv_cast_d": 3}.get(part, 0))

    # Backward.

    def _data_gradient(self, name: str, gradient: str, rows: int | None = None) -> str:
        made = super()._data_gradient(name, gradient, rows)
        more, weight = _INPUT_D[self._is_cut].get(name, _SCALE if name == "out" else 0), self._weights[name]
        if not more:
            return made
        shape = (self._tokens, weight.inputs)
        return self._touch(f"{name}_d_scale", (made,), more * shape[0] * shape[1], shape, BACKWARD)

    def _gradient(self, name: str, made: str, before: Sequence[str]) -> None:
        """A gradient is kept, and so scaled by a kernel of its own."""
        weight = self._weights[name]
        num, shape = max(1, len(weight.parts)), (weight.inputs, weight.outputs)
        num_bytes = _SCALE * weight.num_params
        made = self._touch(f"{name}_w_scale", (made,), num_bytes, shape, WEIGHT, num_launches=num)
        super()._gradient(name, made, before)

    def _norm_backward(self, part: str, gradients: Sequence[str], residual: str, saved: str) -> str:
        if self._is_cut:
            return super()._norm_backward(part, gradients, residual, saved)
        shape, also = (self._rows, self._model.hidden), self._around(self._entry, BACKWARD)
        num_bytes = _NORM_D[part] * shape[0] * shape[1]
        return self._touch(
            f"{part}_d", (*gradients, residual, saved), num_bytes, shape, BACKWARD, also=also, num_launches=4
        )

    def _act_backward(self, down_d: str, shape: tuple[int, int]) -> str:
        source = self._scaled("act_d", down_d, BACKWARD, 2)
        kernels = _CUT_ACT_D if self._is_cut else _ACT_D
        return self._in_kernels("up_cast_d", source, kernels, shape, BACKWARD, launches=4)
