"""Shard axes of a transformer's operators. Matrices are [rows, columns]; rows are tokens, sequences in order.

Under sequence parallelism rows are ordered sequence position first (Megatron-LM), so that a range of rows is no range
of sequences and attention is cut along heads only.
"""

from collections.abc import Sequence
from typing import Final

from lagom_overlap.workload.sharding import Combine, Gather, Reduce, ShardSpec, TensorUse

Axes = tuple[int | None, int | None]

_ROWS: Final = (Gather(0),)
_COLUMNS: Final = (Gather(1),)
_BOTH: Final = (Gather(0), Gather(1))
_SEQUENCES: Final = (Gather(1), Gather(0))
_PRODUCT: Final = (Gather(0), Reduce(), Gather(1))


def product_axes(left: str, right: str, sizes: tuple[int, int, int], right_axes: Axes = (1, 2)) -> ShardSpec:
    """A product [m, k] x [k, n]; `right_axes` (2, 1) if the right matrix is kept as [n, k]."""
    return ShardSpec((TensorUse(left, (0, 1)), TensorUse(right, right_axes)), _PRODUCT, sizes)


def weight_gradient_axes(saved: str, gradient: str, sizes: tuple[int, int, int]) -> ShardSpec:
    """A weight's gradient [inputs, outputs], summed over rows of the saved input and of the output's gradient.

    The gradient comes first: the product is [outputs, rows] x [rows, inputs], and m is the first operand's axis.
    """
    return ShardSpec((TensorUse(gradient, (1, 2)), TensorUse(saved, (1, 0))), _PRODUCT, sizes)


def elementwise_axes(sources: Sequence[str], rows: int, columns: int | None = None) -> ShardSpec:
    """An operator that treats elements alone; rows alone where `columns` is None (norms, gated activations)."""
    axes: Axes = (0, None if columns is None else 1)
    uses = tuple([TensorUse(source, axes) for source in dict.fromkeys(sources)])
    return ShardSpec(uses, _ROWS, (rows,)) if columns is None else ShardSpec(uses, _BOTH, (rows, columns))


def attention_axes(sources: Sequence[str], heads: int, batch: int, rows_are_sequences: bool) -> ShardSpec:
    """Attention by heads, and by sequences where rows are ordered so."""
    combine: tuple[Combine, ...] = _SEQUENCES if rows_are_sequences else _COLUMNS
    rows = 1 if rows_are_sequences else None
    uses = tuple(TensorUse(source, (rows, 0)) for source in dict.fromkeys(sources))
    return ShardSpec(uses, combine, (heads, batch) if rows_are_sequences else (heads,))


def moved_axes(source: str, rows: int, columns: int) -> ShardSpec:
    """A collective of a matrix; `rows` are one rank's block where dimension 0 is gathered or scattered."""
    return ShardSpec((TensorUse(source, (0, 1)),), _BOTH, (rows, columns))
