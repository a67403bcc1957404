"""How long single operators take alone: matrix products, attention, memory-bound kernels."""

from lagom_overlap.cost.operators.operator_constants import (
    WIDE_HEAD,
    FrameworkConstants,
    OperatorConstants,
    load_framework,
    load_operators,
)
from lagom_overlap.cost.operators.operator_times import OperatorTimes

__all__ = [
    "WIDE_HEAD",
    "FrameworkConstants",
    "OperatorConstants",
    "OperatorTimes",
    "load_framework",
    "load_operators",
]
