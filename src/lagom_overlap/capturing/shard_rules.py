"""Shard rules: along which axes an ATen operator can be cut, in terms of its own tensor arguments.

A rule names an axis per dimension of every tensor argument, and how the pieces' outputs make the whole (`ShardSpec`,
which names tensors by the operators that made them, is derived from it in `recorder.py`). An operator with several
outputs is cut only along axes that all outputs share under the same dimension number (attention and its
log-sum-exp along batch and heads, not a norm's backward with weight gradients).

Sources: Concerto (ASPLOS 2025; spec, planners section 1.6), PyTorch's own operator semantics; every rule is tested by
running the operator whole and in pieces. Left out: operators that draw random numbers, in-place ones, batch norms,
grouped convolutions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import torch

from lagom_overlap.capturing.storages import Layout, aligned_dims
from lagom_overlap.workload import Combine, Gather, Reduce

Axes = tuple[int | None, ...]
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ShardRule:
    """Axes of one call: `inputs` pairs each tensor argument with its axes, of a product the factors first.

    `combine[axis]` and `sizes[axis]` as in `ShardSpec`; a size is the greatest common divisor of the lengths along it.
    """

    inputs: tuple[tuple[torch.Tensor, Axes], ...]
    combine: tuple[Combine, ...]
    sizes: tuple[int, ...]


class _Builder:
    """Collects the axes of one rule; an axis of length 1 is no axis."""

    def __init__(self) -> None:
        self._inputs: list[tuple[torch.Tensor, list[int | None]]] = []
        self._combine: list[Combine] = []
        self._sizes: list[int] = []

    def axis(self, size: int, combine: Combine) -> int | None:
        """A new axis."""
        if size < 2:
            return None
        self._combine.append(combine)
        self._sizes.append(int(size))
        return len(self._sizes) - 1

    def bound(self, axis: int, size: int) -> None:
        """The number of pieces must divide `size` too."""
        self._sizes[axis] = gcd(self._sizes[axis], int(size))

    def use(self, tensor: torch.Tensor | None, axes: Sequence[int | None]) -> None:
        """A tensor argument; a length that differs from its axis' bounds the pieces."""
        if tensor is None:
            return
        assert len(axes) == tensor.dim()
        for dim, axis in enumerate(axes):
            if axis is not None:
                self._sizes[axis] = gcd(self._sizes[axis], int(tensor.shape[dim]))
        self._inputs.append((tensor, list(axes)))

    def done(self) -> ShardRule | None:
        """The rule, without axes that cannot be cut; None if no axis is left."""
        keep = [axis for axis, size in enumerate(self._sizes) if size > 1]
        if not keep:
            return None
        number = {old: new for new, old in enumerate(keep)}
        return ShardRule(
            inputs=tuple(
                (tensor, tuple(None if axis is None else number.get(axis) for axis in axes))
                for tensor, axes in self._inputs
            ),
            combine=tuple(self._combine[axis] for axis in keep),
            sizes=tuple(self._sizes[axis] for axis in keep),
        )


def _broadcast(build: _Builder, tensor: torch.Tensor | None, axes: Sequence[int | None]) -> None:
    """A tensor that is broadcast to a shape with these axes: dimensions of length 1 stay whole."""
    if tensor is None:
        return
    tail = axes[len(axes) - tensor.dim() :]
    build.use(tensor, [axis if n > 1 else None for axis, n in zip(tail, tensor.shape, strict=True)])


def _output_axes(build: _Builder, output: torch.Tensor) -> list[int | None]:
    return [build.axis(n, Gather(dim)) for dim, n in enumerate(output.shape)]


Rule = Callable[[_Builder, Arguments, Sequence[torch.Tensor]], None]


def _pointwise(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    axes = _output_axes(build, outputs[0])
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            _broadcast(build, value, axes)


def _mm(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    a, b = arguments["self"], arguments["mat2"]
    m, k, n = build.axis(a.shape[0], Gather(0)), build.axis(a.shape[1], Reduce()), build.axis(b.shape[1], Gather(1))
    build.use(a, (m, k))
    build.use(b, (k, n))


def _addmm(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    """No contraction axis: every piece would add the bias."""
    a, b = arguments["mat1"], arguments["mat2"]
    m, n = build.axis(a.shape[0], Gather(0)), build.axis(b.shape[1], Gather(1))
    build.use(a, (m, None))  # the factors come first: the rewrites tell m from n by them
    build.use(b, (None, n))
    _broadcast(build, arguments["self"], (m, n))


def _bmm(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    a, b = arguments["self"], arguments["mat2"]
    batch = build.axis(a.shape[0], Gather(0))
    m, k, n = build.axis(a.shape[1], Gather(1)), build.axis(a.shape[2], Reduce()), build.axis(b.shape[2], Gather(2))
    build.use(a, (batch, m, k))
    build.use(b, (batch, k, n))


def _baddbmm(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    a, b = arguments["batch1"], arguments["batch2"]
    batch, m = build.axis(a.shape[0], Gather(0)), build.axis(a.shape[1], Gather(1))
    n = build.axis(b.shape[2], Gather(2))
    build.use(a, (batch, m, None))
    build.use(b, (batch, None, n))
    _broadcast(build, arguments["self"], (batch, m, n))


def _all_but(arguments: Arguments, outputs: Sequence[torch.Tensor], build: _Builder, dims: set[int]) -> None:
    """Same shape in and out, the operator works along `dims`."""
    axes = [None if dim in dims else build.axis(n, Gather(dim)) for dim, n in enumerate(outputs[0].shape)]
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            build.use(value, axes)


def _along_dim(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    _all_but(arguments, outputs, build, {arguments["dim"] % max(1, outputs[0].dim())})


def _norm(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    """Normalised over the last dimensions; scale and shift stay whole, mean and deviation follow the rows."""
    tensor = arguments["input"]
    rows = tensor.dim() - len(arguments["normalized_shape"])
    axes = [build.axis(n, Gather(dim)) if dim < rows else None for dim, n in enumerate(tensor.shape)]
    build.use(tensor, axes)
    for name in ("weight", "bias"):
        if arguments.get(name) is not None:
            build.use(arguments[name], (None,) * arguments[name].dim())


def _norm_backward(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    """Only the input's gradient: those of scale and shift are summed, not concatenated.

    Cut along the first dimension of rows only: the CPU's kernel (2.13.0) reads means as if they were contiguous.
    """
    if list(arguments["output_mask"]) != [True, False, False]:
        return
    tensor = arguments["input"]
    rows = tensor.dim() - len(arguments["normalized_shape"])
    first = next((dim for dim in range(rows) if tensor.shape[dim] > 1), None)
    axes = [build.axis(n, Gather(dim)) if dim == first else None for dim, n in enumerate(tensor.shape)]
    for name in ("grad_out", "input", "mean", "rstd"):
        build.use(arguments[name], axes)
    for name in ("weight", "bias"):
        if arguments.get(name) is not None:
            build.use(arguments[name], (None,) * arguments[name].dim())


def _reduction(sums: bool) -> Rule:
    def rule(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
        tensor = arguments["self"]
        given = arguments.get("dim")
        listed = [given] if isinstance(given, int) else list(given or range(tensor.dim()))
        reduced = {dim % max(1, tensor.dim()) for dim in listed}
        axes, place = [], 0
        for dim, n in enumerate(tensor.shape):
            if dim in reduced:
                axes.append(build.axis(n, Reduce()) if sums else None)
                place += bool(arguments.get("keepdim", False))
            else:
                axes.append(build.axis(n, Gather(place)))
                place += 1
        build.use(tensor, axes)

    return rule


def _attention(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    """Batch and heads, with fewer key heads as far as they divide; queries too where nothing is masked by place."""
    query = arguments["query"]
    batch, heads = build.axis(query.shape[0], Gather(0)), build.axis(query.shape[1], Gather(1))
    rows = None
    backward = arguments.get("grad_out") is not None
    if not arguments.get("is_causal", False) and not backward:
        rows = build.axis(query.shape[2], Gather(2))
    of_name: dict[str, tuple[int | None, ...]] = {
        "grad_out": (batch, heads, rows, None),
        "query": (batch, heads, rows, None),
        "key": (batch, heads, None, None),
        "value": (batch, heads, None, None),
        "out": (batch, heads, rows, None),
        "logsumexp": (batch, heads, rows),
    }
    for name, value in arguments.items():
        if name == "attn_mask" and value is not None:
            _broadcast(build, value, (batch, heads, rows, None))
        elif isinstance(value, torch.Tensor):
            build.use(value, of_name[name])


def _embedding(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    axes = _output_axes(build, outputs[0])
    build.use(arguments["weight"], (None, axes[-1]))
    build.use(arguments["indices"], axes[:-1])


def _embedding_backward(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    """The table's gradient is summed over tokens, concatenated over columns."""
    if arguments.get("scale_grad_by_freq", False):
        return
    indices = arguments["indices"]
    tokens = [build.axis(n, Reduce()) for n in indices.shape]
    build.use(arguments["grad_output"], (*tokens, build.axis(outputs[0].shape[1], Gather(1))))
    build.use(indices, tokens)


def _cat(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    tensors = [tensor for tensor in arguments["tensors"] if tensor.dim() == outputs[0].dim()]
    at = arguments.get("dim", 0) % outputs[0].dim()
    axes = [None if dim == at else build.axis(n, Gather(dim)) for dim, n in enumerate(outputs[0].shape)]
    for tensor in tensors:
        build.use(tensor, axes)


def _placed_back(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    """A gradient put back where a slice or a selection took its input from: all dimensions but that one."""
    gradient, at = arguments["grad_output"], arguments["dim"] % outputs[0].dim()
    axes = [None if dim == at else build.axis(n, Gather(dim)) for dim, n in enumerate(outputs[0].shape)]
    selected = gradient.dim() < outputs[0].dim()
    build.use(gradient, [axis for dim, axis in enumerate(axes) if not (selected and dim == at)])


def _convolution(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    if arguments.get("groups", 1) != 1 or arguments.get("transposed", False):
        return
    tensor, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    batch, columns = build.axis(tensor.shape[0], Gather(0)), build.axis(weight.shape[0], Gather(1))
    depth = None if bias is not None else build.axis(weight.shape[1], Reduce())
    window = (None,) * (weight.dim() - 2)
    build.use(tensor, (batch, depth, *window))
    build.use(weight, (columns, depth, *window))
    build.use(bias, (columns,))


def _all_reduce(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    """Any cut: the sum is taken element by element."""
    tensor = arguments["input"]
    build.use(tensor, [build.axis(n, Gather(dim)) for dim, n in enumerate(tensor.shape)])


def _by_rank(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    """Ranks' parts lie along dimension 0 of one side or both: cut there, every rank's part is cut alike.

    Piece k of a gather's output is then piece k of each rank's part, which lie apart in the whole.
    """
    tensor, output = arguments["input"], outputs[0]
    axes = [build.axis(n, Gather(dim)) for dim, n in enumerate(tensor.shape)]
    if axes[0] is not None:
        build.bound(axes[0], min(tensor.shape[0], output.shape[0]))
    build.use(tensor, axes)


def _all_to_all(build: _Builder, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> None:
    """As a gather by rank, where every rank sends every rank equally much: rows are the last axis.

    Ranks whose parts happen to be equal have that axis, others have not; all number the other dimensions alike.
    """
    splits = [*(arguments.get("input_split_sizes") or ()), *(arguments.get("output_split_sizes") or ())]
    tensor = arguments["input"]
    others = [build.axis(n, Gather(dim)) for dim, n in enumerate(tensor.shape) if dim]
    rows = build.axis(tensor.shape[0], Gather(0))
    if rows is not None:
        build.bound(rows, splits[0] if splits and len(set(splits)) == 1 else 1)
    build.use(tensor, [rows, *others])


_RULES: Final[Mapping[str, Rule]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "_softmax": _along_dim,
    "_log_softmax": _along_dim,
    "_softmax_backward_data": _along_dim,
    "_log_softmax_backward_data": _along_dim,
    "cumsum": _along_dim,
    "native_layer_norm": _norm,
    "_fused_rms_norm": _norm,
    "native_layer_norm_backward": _norm_backward,
    "sum": _reduction(sums=True),
    "mean": _reduction(sums=False),
    "amax": _reduction(sums=False),
    "amin": _reduction(sums=False),
    **{f"_scaled_dot_product_{kind}": _attention for kind in ("flash_attention_for_cpu", "flash_attention")},
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "cat": _cat,
    "slice_backward": _placed_back,
    "select_backward": _placed_back,
    "convolution": _convolution,
    "clone": _pointwise,
    "_to_copy": _pointwise,
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _by_rank,
    "reduce_scatter_tensor": _by_rank,
    "all_to_all_single": _all_to_all,
}


def shard_rule(func: torch._ops.OpOverload, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> ShardRule | None:
    """The axes of one call, None where it cannot be cut; `arguments` are by the names of its schema."""
    if not outputs or func._schema.is_mutable or arguments.get("dropout_p"):
        return None
    rule = _RULES.get(func._schema.name.rpartition("::")[2])
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    if rule is None and torch.Tag.pointwise in func.tags and len(outputs) == 1 and not is_random:
        rule = _pointwise
    build = _Builder()
    if rule is not None:
        rule(build, arguments, outputs)
    elif func.is_view and len(outputs) == 1:
        _view(build, arguments["self"], outputs[0])
    return build.done()


def _view(build: _Builder, base: torch.Tensor, view: torch.Tensor) -> None:
    """A dimension of a view that is cut where a dimension of its base is cut (`layouts.aligned_dims`)."""
    axes: list[int | None] = [None] * base.dim()
    for dim, base_dim in enumerate(aligned_dims(Layout.of(base), Layout.of(view))):
        if base_dim is not None:
            axes[base_dim] = build.axis(gcd(view.shape[dim], base.shape[base_dim]), Gather(dim))
    build.use(base, axes)
