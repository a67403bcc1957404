"""Number formats of a training step: what is gathered and multiplied, what autograd makes, what travels."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class DType(StrEnum):
    """A number format of parameters or gradients."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FP32 else 2


class ProductFormat(StrEnum):
    """In which format a layer's matrices multiply: as the parameters are, or in one byte or half of one with scales.

    One scale per tensor, from earlier steps (`fp8`) or from the tensor itself, which is read for it first
    (`fp8_current`); one per row of an operand (`fp8_rowwise`); one per 32 elements (`mxfp8`); half a byte with one per
    16 elements and one per tensor (`nvfp4`).
    """

    PARAMETER = "parameter"
    FP8 = "fp8"
    FP8_CURRENT = "fp8_current"
    FP8_ROWWISE = "fp8_rowwise"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"

    @property
    def is_narrow(self) -> bool:
        """Whether the operands are cast to one byte per element or less."""
        return self is not ProductFormat.PARAMETER

    @property
    def packed(self) -> int:
        """Elements per byte of a narrow operand, its scales left out."""
        return 2 if self is ProductFormat.NVFP4 else 1


ATTENTION_FORMATS: Final = (ProductFormat.PARAMETER, ProductFormat.MXFP8)
"""What attention and the output matrix may multiply in."""
_NEVER_CAST: Final = ("router", "logits")


@dataclass(frozen=True, slots=True)
class Precision:
    """`parameter`: gathered and computed with; `gradient`: as autograd makes it; `reduction`: what is reduced.

    `products` is what a layer's matrices multiply in, `attention` what its attention does (the parameter's format, or
    `mxfp8`); router and head stay in the parameter's format, but for a head among the `others`.
    `others` are matrices that multiply in another format, by their names in a step; the `wide_layers` last layers and
    multi-token predictions, where there are any, multiply in the parameter's.
    """

    parameter: DType = DType.BF16
    gradient: DType = DType.BF16
    reduction: DType = DType.FP32
    products: ProductFormat = ProductFormat.PARAMETER
    others: tuple[tuple[str, ProductFormat], ...] = ()
    wide_layers: int = 0
    attention: ProductFormat = ProductFormat.PARAMETER

    def is_wide(self, layer: int | None, num_layers: int) -> bool:
        """Whether a layer multiplies in the parameter's format whatever the others do."""
        return self.wide_layers > 0 and layer is not None and layer >= num_layers - self.wide_layers

    def format_of(self, matrix: str) -> ProductFormat:
        """In which format a matrix of the other layers multiplies."""
        plain = ProductFormat.PARAMETER if matrix in _NEVER_CAST else self.products
        return dict(self.others).get(matrix, plain)


MIXED: Final = Precision()
"""bf16 compute and FP32 reductions: torchtitan's policy of FSDP2, Megatron-LM's default with bf16."""
HALF: Final = Precision(reduction=DType.BF16)
"""Gradients travel as they are computed: DeepSpeed's default, and FSDP1's without a policy of its own."""
