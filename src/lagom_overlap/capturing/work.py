"""From an ATen operator and its tensors to what is computed: a matrix product, an attention, or bytes moved.

Matrix products keep their shape; a batch of products counts as one with as many times the rows. Attention by head is
`Attention` where queries and keys are equally many, else the matrix product with as many operations. Convolutions are
implicit matrix products: rows are output pixels, depth is input channels x window. Everything else moves its tensors
through memory: what it reads plus what it writes, an expanded dimension once.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch

from lagom_overlap.capturing.storages import num_bytes_of
from lagom_overlap.workload import Attention, Gemm, MemoryBound, Work
from lagom_overlap.workload.ops import FLASH_BACKWARD_PASSES

Arguments = Mapping[str, Any]


def _gemm(m: int, n: int, k: int, like: torch.Tensor) -> Work | None:
    return Gemm(m, n, k, like.element_size()) if min(m, n, k) > 0 else None


def _mm(left: str, right: str) -> Callable[[Arguments], Work | None]:
    def work(arguments: Arguments) -> Work | None:
        a, b = arguments[left], arguments[right]
        batch = prod(a.shape[:-2])
        return _gemm(batch * a.shape[-2], b.shape[-1], a.shape[-1], a)

    return work


def _grouped_mm(arguments: Arguments) -> Work | None:
    """Rows of `self` are shared out among the experts; with offsets the weight's gradient is k-grouped."""
    a, b = arguments["self"], arguments["mat2"]
    if a.dim() == 2 and b.dim() == 2:
        return _gemm(a.shape[0], b.shape[1], a.shape[1], a)
    rows = a.shape[0] if a.dim() == 2 else a.shape[0] * a.shape[1]
    return _gemm(rows, b.shape[-1], a.shape[-1], a)


def _attention(*, backward: bool = False) -> Callable[[Arguments], Work | None]:
    passes = FLASH_BACKWARD_PASSES if backward else 1.0

    def work(arguments: Arguments) -> Work | None:
        query, key, value = arguments["query"], arguments["key"], arguments["value"]
        batch, heads, queries, width = query.shape
        keys, head_dim = key.shape[-2], (width + value.shape[-1]) // 2
        if min(query.numel(), key.numel()) == 0:
            return None
        if queries != keys:
            return _gemm(batch * heads * queries, keys, round(2 * head_dim * passes), query)
        return Attention(
            batch=batch,
            num_heads=heads,
            seq_len=queries,
            head_dim=head_dim,
            causal=bool(arguments.get("is_causal", False)),
            passes=passes,
            element_bytes=query.element_size(),
            backward=backward,
        )

    return work


def _convolution(arguments: Arguments, output: torch.Tensor, passes: int = 1) -> Work | None:
    weight = arguments["weight"]
    pixels = prod(output.shape) // output.shape[1] if output.numel() else 0
    return _gemm(pixels, weight.shape[0], prod(weight.shape[1:]) * passes, weight)


def _convolution_backward(arguments: Arguments) -> Work | None:
    mask = arguments["output_mask"]
    return _convolution(arguments, arguments["grad_output"], max(1, int(mask[0]) + int(mask[1])))


_SHAPED: Final[Mapping[str, Callable[[Arguments], Work | None]]] = {
    "mm": _mm("self", "mat2"),
    "addmm": _mm("mat1", "mat2"),
    "bmm": _mm("self", "mat2"),
    "baddbmm": _mm("batch1", "batch2"),
    "_grouped_mm": _grouped_mm,
    "convolution_backward": _convolution_backward,
    **{f"_scaled_dot_product_{kind}": _attention() for kind in ("flash_attention_for_cpu", "flash_attention")},
    **{f"_scaled_dot_product_{kind}_attention": _attention() for kind in ("efficient", "cudnn")},
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(backward=True),
    "_scaled_dot_product_flash_attention_backward": _attention(backward=True),
    "_scaled_dot_product_efficient_attention_backward": _attention(backward=True),
    "_scaled_dot_product_cudnn_attention_backward": _attention(backward=True),
}

_GATHERING: Final = frozenset({"embedding", "gather", "index", "index_select", "index_put", "index_put_"})
"""Read no more of their first tensor than they write."""


def work_of(
    short_name: str,
    arguments: Arguments,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
) -> Work | None:
    """What an operator computes, None if nothing; `short_name` is its name without namespace and overload."""
    shaped = _SHAPED.get(short_name)
    if shaped is not None:
        return shaped(arguments)
    if short_name == "convolution":
        return _convolution(arguments, writes[0])
    written = sum(num_bytes_of(tensor) for tensor in writes)
    read = sum(num_bytes_of(tensor) for tensor in reads)
    if short_name in _GATHERING and reads:
        table = num_bytes_of(reads[0])
        read = read - table + min(table, written)
    return MemoryBound(read + written) if read + written else None
