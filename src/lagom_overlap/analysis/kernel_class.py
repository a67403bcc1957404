"""What sort of kernel a name is: for tables, never for measures."""

import re
from enum import StrEnum
from functools import lru_cache
from typing import Final


class KernelClass(StrEnum):
    """Kinds of kernels, which suffer differently from a concurrent collective."""

    GEMM = "gemm"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    NORMALISATION = "normalisation"
    OPTIMIZER = "optimizer"
    REDUCTION = "reduction"
    EMBEDDING = "embedding"
    COPY = "copy"
    ELEMENTWISE = "elementwise"
    OTHER = "other"


_RULES: Final = (
    (re.compile(r"flash|fmha|attention|softmax_.*attn|ck_tile.*fmha|aotriton", re.IGNORECASE), KernelClass.ATTENTION),
    (re.compile(r"conv|wgrad|dgrad|fprop|winograd|miopen.*conv", re.IGNORECASE), KernelClass.CONVOLUTION),
    (
        re.compile(r"gemm|gemv|cutlass|nvjet|splitKreduce|matmul|^Cijk_|bmm_|cublas|hipblas|wgmma|_mm_", re.IGNORECASE),
        KernelClass.GEMM,
    ),
    (re.compile(r"norm|bn_(fw|bw)|GammaBeta", re.IGNORECASE), KernelClass.NORMALISATION),
    (re.compile(r"multi_tensor|adam|sgd|lamb|optimizer", re.IGNORECASE), KernelClass.OPTIMIZER),
    (re.compile(r"embedding|index_select|gather|scatter|index_put", re.IGNORECASE), KernelClass.EMBEDDING),
    (re.compile(r"reduce_kernel|Reduce|softmax|cub::.*Scan", re.IGNORECASE), KernelClass.REDUCTION),
    (re.compile(r"copy|Cat|transpose|nchwToNhwc|nhwcToNchw|permute", re.IGNORECASE), KernelClass.COPY),
    (re.compile(r"elementwise|pointwise|triton_poi|fill", re.IGNORECASE), KernelClass.ELEMENTWISE),
)


@lru_cache(maxsize=10_000)
def kernel_class(name: str) -> KernelClass:
    """The class of a kernel by its name; the first rule that matches."""
    return next((kernel for pattern, kernel in _RULES if pattern.search(name)), KernelClass.OTHER)
