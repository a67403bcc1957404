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
    """In which format a layer's matrices multiply: as the parameters are, or in one byte with scales.

    One scale per tensor, from earlier steps (`fp8`) or from the tensor itself, which is read for it first
    (`fp8_current`); one per 32 elements (`mxfp8`).
    """

    PARAMETER = "parameter"
    FP8 = "fp8"
    FP8_CURRENT = "fp8_current"
    MXFP8 = "mxfp8"

    @property
    def is_fp8(self) -> bool:
        """Whether the operands have one byte per element."""
        return self is not ProductFormat.PARAMETER


@dataclass(frozen=True, slots=True)
class Precision:
    """`parameter`: gathered and computed with; `gradient`: as autograd makes it; `reduction`: what is reduced.

    `products` is what a layer's matrices multiply in; attention, router and head stay in the parameter's format.
    """

    parameter: DType = DType.BF16
    gradient: DType = DType.BF16
    reduction: DType = DType.FP32
    products: ProductFormat = ProductFormat.PARAMETER


MIXED: Final = Precision()
"""bf16 compute and FP32 reductions: torchtitan's policy of FSDP2, Megatron-LM's default with bf16."""
HALF: Final = Precision(reduction=DType.BF16)
"""Gradients travel as they are computed: DeepSpeed's default, and FSDP1's without a policy of its own."""
