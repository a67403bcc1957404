"""Values of a trace's fields, whose types differ between tools, or that are hostile: checked one by one."""

import math
import re
from decimal import Decimal
from typing import Any, Final

from lagom_overlap.trace.event_columns import MAX_NS
from lagom_overlap.trace.gpu_trace import NS_PER_US, UNKNOWN

_PLAIN_US: Final = MAX_NS / (2 * NS_PER_US)
"""Up to here microseconds times a thousand do not overflow."""
_MAX_US: Final = MAX_NS / NS_PER_US
_MAX_DIMS: Final = 64
"""As many as a tensor of PyTorch has at most."""
_MAX_RANKS: Final = 1_000_000
"""Chosen: a longer list of ranks is damage."""
MAX_GRID: Final = 2**31
"""No side of a grid or block is as long."""


def to_ns(value: Any) -> int | None:
    """Microseconds of a trace in whole nanoseconds; None where it is no time.

    A float is what the nearest one to n/1000 is, and the product with 1000 rounds once more: from 2^42 us on it may lie
    next to n, which the division tells.
    """
    if type(value) is float:
        if -_PLAIN_US < value < _PLAIN_US:  # false for nan
            ns = round(value * NS_PER_US)
            if ns / NS_PER_US == value:
                return ns
            return next((near for near in (ns - 1, ns + 1) if near / NS_PER_US == value), ns)
        if not abs(value) < _MAX_US:  # true for nan, too; and the product of 1e308 is infinite
            return None
        ns = round(value * NS_PER_US)
    elif type(value) is int:
        ns = value * NS_PER_US
    elif isinstance(value, Decimal | str):
        try:
            number = Decimal(value) * NS_PER_US
            ns = int(number.to_integral_value()) if abs(number) < MAX_NS else MAX_NS
        except (ArithmeticError, ValueError):
            return None
    else:
        return None
    return ns if abs(ns) < MAX_NS else None


def to_int(value: Any) -> int:
    """A whole number of a trace; `UNKNOWN` where it is none."""
    if type(value) is int:
        return value if abs(value) < MAX_NS else UNKNOWN
    if type(value) is str and value.strip().lstrip("-").isdecimal() and len(value) < 19:
        return int(value)
    if type(value) is float and value.is_integer() and abs(value) < MAX_NS:
        return int(value)
    return UNKNOWN


def to_triple(value: Any) -> tuple[int, int, int]:
    """A grid or block; zeros where unknown. ROCm writes it as text in some versions."""
    if type(value) is list and len(value) == 3:
        x, y, z = value
        if type(x) is type(y) is type(z) is int and 0 <= x < MAX_GRID and 0 <= y < MAX_GRID and 0 <= z < MAX_GRID:
            return x, y, z
    if type(value) is str:
        value = [to_int(part) for part in re.findall(r"\d+", value)]
    if type(value) is not list or not 1 <= len(value) <= 3:
        return 0, 0, 0
    x, y, z = value if len(value) == 3 else (*value, 1, 1)[:3]
    if type(x) is type(y) is type(z) is int and 0 <= x < MAX_GRID and 0 <= y < MAX_GRID and 0 <= z < MAX_GRID:
        return x, y, z
    return 0, 0, 0


def to_ranks(value: Any) -> tuple[int, ...]:
    """The ranks of a process group; empty where unknown or shortened with `...`."""
    if type(value) is str and "..." not in value:
        value = [to_int(part) for part in re.findall(r"\d+", value)[:_MAX_RANKS]]
    if type(value) is list and all(type(v) is int and 0 <= v < MAX_NS for v in value):
        return tuple(value)
    return ()


def num_elements(dims: Any) -> int:
    """The elements of a shape such as `[2, 1024]`; 0 where it is none, or one that no memory holds."""
    if type(dims) is list and dims and all(type(v) is int and v >= 0 for v in dims):
        number = math.prod(dims[:_MAX_DIMS])
        return number if number < MAX_NS and len(dims) <= _MAX_DIMS else 0
    return 0
