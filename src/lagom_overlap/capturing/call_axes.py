"""The axes of one ATen call over all its tensors, outputs and views included: what a search for a sharding needs.

Builds on `shard_rules` (along which axes a call can be cut into pieces on one device) and adds what a cut over ranks
allows beyond: views, several outputs of which some are summed (the gradients of a norm's scale), a product with a bias
that only the first rank adds, means over a shared dimension (each rank's mean over the number of ranks). A call that is
unknown here has no axes: every rank makes it whole.

Departure: a batch norm's statistics are those of each rank's images, as in data parallelism without synchronised norms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import torch

from lagom_overlap.capturing.collectives import tensors_in
from lagom_overlap.capturing.shard_rules import shard_rule
from lagom_overlap.workload import Gather

Axes = tuple[int | None, ...]
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallAxes:
    """Axes of the tensors that a call reads and of those that it makes, in order; `summed[i]` those output i lacks."""

    inputs: tuple[tuple[torch.Tensor, Axes], ...]
    outputs: tuple[Axes, ...]
    summed: tuple[frozenset[int], ...]
    sizes: tuple[int, ...]
    is_linear: bool = False


class _Axes:
    """Collects axes of one call: names to dimensions, in words such as `batch`."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._inputs: list[tuple[torch.Tensor, Axes]] = []
        self._outputs: list[Axes] = []
        self._summed: list[frozenset[int]] = []

    def new(self, size: int) -> int | None:
        """An axis; a length of 1 is none."""
        if size < 2:
            return None
        self.sizes.append(int(size))
        return len(self.sizes) - 1

    def _bound(self, tensor: torch.Tensor, axes: Sequence[int | None]) -> Axes:
        kept = tuple(axis if n > 1 else None for axis, n in zip(axes, tensor.shape, strict=True))
        for axis, size in zip(kept, tensor.shape, strict=True):
            if axis is not None:
                self.sizes[axis] = gcd(self.sizes[axis], int(size))
        return kept

    def read(self, tensor: torch.Tensor | None, axes: Sequence[int | None]) -> None:
        """A tensor argument; None is passed over, broadcast dimensions stay whole."""
        if tensor is not None:
            self._inputs.append((tensor, self._bound(tensor, axes)))

    def write(self, tensor: torch.Tensor, axes: Sequence[int | None], summed: Sequence[int | None] = ()) -> None:
        """An output."""
        self._outputs.append(self._bound(tensor, axes))
        self._summed.append(frozenset(axis for axis in summed if axis is not None))

    def done(self, *, is_linear: bool = False) -> CallAxes:
        """The call."""
        return CallAxes(tuple(self._inputs), tuple(self._outputs), tuple(self._summed), tuple(self.sizes), is_linear)


Rule = Callable[[_Axes, Arguments, Sequence[torch.Tensor]], bool]
"""Fills in the axes; whether the call is linear."""


def _pointwise(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    shape = outputs[0].shape
    dims = [axes.new(n) for n in shape]
    tensors = tensors_in(list(arguments.values()))
    for tensor in tensors:
        axes.read(tensor, dims[len(shape) - tensor.dim() :])
    for output in outputs:
        axes.write(output, dims)
    return False


def _copy(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    _pointwise(axes, arguments, outputs)
    return True


def _sum_of_two(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    _pointwise(axes, arguments, outputs)
    tensors = tensors_in(list(arguments.values()))
    return len(tensors) == 2 and tensors[0].shape == tensors[1].shape


def _scaled(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """By a number, which has no axes; by a tensor it is no linear call."""
    _pointwise(axes, arguments, outputs)
    return len(tensors_in(list(arguments.values()))) == 1


def _biased_product(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """Summed over k too: only the first rank adds the bias."""
    a, b = arguments["mat1"], arguments["mat2"]
    m, k, n = axes.new(a.shape[0]), axes.new(a.shape[1]), axes.new(b.shape[1])
    axes.read(a, (m, k))
    axes.read(b, (k, n))
    bias = arguments["self"]
    axes.read(bias, (m, n)[2 - bias.dim() :])
    axes.write(outputs[0], (m, n), (k,))
    return False


def _reshaped(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """Dimensions that are merged or split keep the first of them: the others are not cut at the same places."""
    source = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
    before, after = list(source.shape), list(outputs[0].shape)
    reads: list[int | None] = [None] * len(before)
    writes: list[int | None] = [None] * len(after)
    i = j = 0
    while i < len(before) and j < len(after):
        first_in, first_out, size_in, size_out = i, j, before[i], after[j]
        while size_in != size_out:
            if size_in < size_out:
                i += 1
                size_in *= before[i]
            else:
                j += 1
                size_out *= after[j]
        first_in = next((d for d in range(first_in, i) if before[d] > 1), i)
        first_out = next((d for d in range(first_out, j) if after[d] > 1), j)
        axis = axes.new(gcd(before[first_in], after[first_out]))
        reads[first_in] = writes[first_out] = axis
        i, j = i + 1, j + 1
    axes.read(source, reads)
    axes.write(outputs[0], writes)
    return True


def _moved(order: Callable[[Arguments, int], Sequence[int]]) -> Rule:
    """Output dimension d is input dimension order[d]."""

    def rule(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
        source = arguments["self"]
        dims = [axes.new(n) for n in source.shape]
        axes.read(source, dims)
        axes.write(outputs[0], [dims[dim % source.dim()] for dim in order(arguments, source.dim())])
        return True

    return rule


def _swapped(arguments: Arguments, rank: int) -> list[int]:
    order = list(range(rank))
    a, b = arguments["dim0"] % rank, arguments["dim1"] % rank
    order[a], order[b] = order[b], order[a]
    return order


def _expanded(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    source, output = arguments["self"], outputs[0]
    dims = [axes.new(n) for n in output.shape]
    axes.read(source, dims[output.dim() - source.dim() :])
    axes.write(output, dims)
    return True


def _without(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """One dimension is selected from or taken apart, or added back: the others are kept."""
    source = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
    output = outputs[0]
    longer = max(source.dim(), output.dim())
    at = arguments.get("dim", 0) % longer
    dims = [None if dim == at else axes.new(n) for dim, n in enumerate((source, output)[output.dim() == longer].shape)]
    shorter = [axis for dim, axis in enumerate(dims) if dim != at]
    axes.read(source, dims if source.dim() == longer else shorter)
    for each in outputs:
        axes.write(each, dims if each.dim() == longer else shorter)
    return True


def _joined(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """Concatenated or stacked."""
    output = outputs[0]
    tensors = tensors_in(arguments["tensors"])
    at = arguments.get("dim", 0) % output.dim()
    dims = [None if dim == at else axes.new(n) for dim, n in enumerate(output.shape)]
    for tensor in tensors:
        axes.read(tensor, dims if tensor.dim() == output.dim() else [a for d, a in enumerate(dims) if d != at])
    axes.write(output, dims)
    return True


def _reduced(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """A sum, or a mean, which is one over a constant."""
    source = arguments["self"]
    given = arguments.get("dim")
    listed = [given] if isinstance(given, int) else list(given or range(source.dim()))
    gone = {dim % max(1, source.dim()) for dim in listed}
    dims = [axes.new(n) for n in source.shape]
    keeps = bool(arguments.get("keepdim", False))
    axes.read(source, dims)
    kept = [None if dim in gone else axis for dim, axis in enumerate(dims) if keeps or dim not in gone]
    axes.write(outputs[0], kept, [dims[dim] for dim in gone])
    return True


def _norm_backward(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """Rows stay apart in the input's gradient and are summed in those of scale and shift."""
    source = arguments["input"]
    num_rows = source.dim() - len(arguments["normalized_shape"])
    rows = [axes.new(n) if dim < num_rows else None for dim, n in enumerate(source.shape)]
    for name in ("grad_out", "input", "mean", "rstd"):
        axes.read(arguments.get(name), rows)
    for name in ("weight", "bias"):
        if (tensor := arguments.get(name)) is not None:
            axes.read(tensor, (None,) * tensor.dim())
    for output in outputs:
        whole = output.dim() == source.dim()
        axes.write(output, rows if whole else (None,) * output.dim(), () if whole else rows)
    return False


def _nll(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """Rows of scores; the loss and the weight of all rows are sums."""
    rows = axes.new(arguments["self"].shape[0])
    axes.read(arguments["self"], (rows, None))
    axes.read(arguments["target"], (rows,))
    for output in outputs:
        axes.write(output, (None,) * output.dim(), (rows,))
    return False


def _nll_backward(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    rows = axes.new(arguments["self"].shape[0])
    axes.read(arguments["grad_output"], ())
    axes.read(arguments["self"], (rows, None))
    axes.read(arguments["target"], (rows,))
    axes.read(arguments["total_weight"], ())
    axes.write(outputs[0], (rows, None))
    return False


def _attention_backward(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """Batch and heads; fewer key heads bound how finely heads can be cut."""
    query = arguments["query"]
    batch, heads = axes.new(query.shape[0]), axes.new(query.shape[1])
    for tensor in tensors_in(list(arguments.values())):
        axes.read(tensor, (batch, heads, *(None,) * (tensor.dim() - 2)) if tensor.dim() > 2 else (None,) * tensor.dim())
    for output in outputs:
        axes.write(output, (batch, heads, *(None,) * (output.dim() - 2)))
    return False


def _convolution(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    source, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    batch, columns = axes.new(source.shape[0]), axes.new(weight.shape[0])
    depth = axes.new(weight.shape[1])
    window = (None,) * (weight.dim() - 2)
    axes.read(source, (batch, depth, *window))
    axes.read(weight, (columns, depth, *window))
    axes.read(bias, (columns,))
    axes.write(outputs[0], (batch, columns, *window), (depth,))
    return False


def _convolution_backward(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """The input's gradient is summed over output channels, the weight's and the bias' over images."""
    gradient, source, weight = arguments["grad_output"], arguments["input"], arguments["weight"]
    batch, columns = axes.new(source.shape[0]), axes.new(weight.shape[0])
    depth = axes.new(weight.shape[1])
    window = (None,) * (weight.dim() - 2)
    axes.read(gradient, (batch, columns, *window))
    axes.read(source, (batch, depth, *window))
    axes.read(weight, (columns, depth, *window))
    wanted = [name for name, is_wanted in zip("iwb", arguments["output_mask"], strict=True) if is_wanted]
    for output, name in zip(outputs, wanted, strict=True):
        if name == "i":
            axes.write(output, (batch, depth, *window), (columns,))
        elif name == "w":
            axes.write(output, (columns, depth, *window), (batch,))
        else:
            axes.write(output, (columns,), (batch,))
    return False


def _batch_norm(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """Channels, and images: those of a rank have statistics of their own."""
    source = arguments.get("input", arguments.get("grad_out"))
    assert source is not None
    batch, channels = axes.new(source.shape[0]), axes.new(source.shape[1])
    rest = (None,) * (source.dim() - 2)
    for tensor in tensors_in(list(arguments.values())):
        axes.read(tensor, (batch, channels, *rest) if tensor.dim() == source.dim() else (channels,))
    backward = "grad_out" in arguments
    for output in outputs:
        whole = output.dim() == source.dim()
        axes.write(output, (batch, channels, *rest) if whole else (channels,), (batch,) if backward else ())
    return False


def _pooled(axes: _Axes, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> bool:
    """Images and channels."""
    dims: list[int | None] = [axes.new(outputs[0].shape[0]), axes.new(outputs[0].shape[1])]
    for tensor in tensors_in(list(arguments.values())):
        axes.read(tensor, (*dims, *(None,) * (tensor.dim() - 2)))
    for output in outputs:
        axes.write(output, (*dims, *(None,) * (output.dim() - 2)))
    return False


_RULES: Final[Mapping[str, Rule]] = {
    "addmm": _biased_product,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias"), _reshaped),
    **dict.fromkeys(("detach", "alias", "clone", "_to_copy", "neg", "contiguous", "lift_fresh_copy"), _copy),
    **dict.fromkeys(("add", "sub"), _sum_of_two),
    **dict.fromkeys(("mul", "div"), _scaled),
    "t": _moved(lambda arguments, rank: list(range(rank))[::-1]),
    "transpose": _moved(_swapped),
    "permute": _moved(lambda arguments, rank: arguments["dims"]),
    "expand": _expanded,
    **dict.fromkeys(("select", "unbind", "slice", "split", "select_backward", "slice_backward"), _without),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("sum", "mean"), _reduced),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _norm_backward),
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward"), _batch_norm),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool2d_with_indices_backward"), _pooled),
}


def call_axes(func: torch._ops.OpOverload, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> CallAxes:
    """The axes of one call; `arguments` are by the names of its schema, tensors in lists included."""
    short = func._schema.name.rpartition("::")[2].rstrip("_")
    if short.startswith("convolution") and (arguments["groups"] != 1 or arguments["transposed"]):
        return _whole(arguments, outputs)
    rule = _RULES.get(short)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    if rule is not None:
        axes = _Axes()
        return axes.done(is_linear=rule(axes, arguments, outputs))
    if torch.Tag.pointwise in func.tags and len(outputs) == 1 and not is_random:
        axes = _Axes()
        return axes.done(is_linear=_pointwise(axes, arguments, outputs))
    return _of_pieces(func, arguments, outputs)


def _of_pieces(func: torch._ops.OpOverload, arguments: Arguments, outputs: Sequence[torch.Tensor]) -> CallAxes:
    """What `shard_rules` says: pieces of all outputs lie along the same dimension, or are summed."""
    rule = shard_rule(func, arguments, outputs)
    if rule is None:
        return _whole(arguments, outputs)
    calls = []
    for output in outputs:
        dims: list[int | None] = [None] * output.dim()
        for axis, combine in enumerate(rule.combine):
            if isinstance(combine, Gather):
                dims[combine.dim] = axis
        calls.append(tuple(dims))
    summed = frozenset(axis for axis, combine in enumerate(rule.combine) if not isinstance(combine, Gather))
    return CallAxes(rule.inputs, tuple(calls), (summed,) * len(calls), rule.sizes)


def _whole(arguments: Arguments, outputs: Sequence[torch.Tensor]) -> CallAxes:
    tensors = tensors_in(list(arguments.values()))
    return CallAxes(
        inputs=tuple((tensor, (None,) * tensor.dim()) for tensor in tensors),
        outputs=tuple((None,) * output.dim() for output in outputs),
        summed=(frozenset(),) * len(outputs),
        sizes=(),
    )
