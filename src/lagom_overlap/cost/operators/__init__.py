"""How long single operators take alone: matrix products, attention, memory-bound kernels."""

from lagom_overlap.cost.operators.constants import (
    WIDE_HEAD,
    FrameworkConstants,
    OperatorConstants,
    load_framework,
    load_operators,
)
from lagom_overlap.cost.operators.times import OperatorTimes

__all__ = [
    "WIDE_HEAD",
    "FrameworkConstants",
    "OperatorConstants",
    "OperatorTimes",
    "load_framework",
    "load_operators",
]
