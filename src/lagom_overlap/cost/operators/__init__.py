"""How long single operators take alone: matrix products, attention, memory-bound kernels."""

from lagom_overlap.cost.operators.constants import (
    FrameworkConstants,
    OperatorConstants,
    load_framework,
    load_operators,
    operators_of_preset,
)
from lagom_overlap.cost.operators.times import OperatorTimes

__all__ = [
    "FrameworkConstants",
    "OperatorConstants",
    "OperatorTimes",
    "load_framework",
    "load_operators",
    "operators_of_preset",
]
