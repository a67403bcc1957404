"""Conversions to and from SI, used once at the edge of the program: files, flags, tables for people.

Inside the program everything is in seconds, bytes, bytes per second and flop per second, and names say so.
"""

import re
from fractions import Fraction
from typing import Final

KIB: Final = 1024
"""A kibibyte in bytes."""
MIB: Final = 1024**2
"""A mebibyte in bytes."""
GIB: Final = 1024**3
"""A gibibyte in bytes."""

US: Final = 1e-6
"""One microsecond in seconds."""
MS: Final = 1e-3
"""One millisecond in seconds."""
NS: Final = 1e-9
"""One nanosecond in seconds."""
GB_PER_S: Final = 1e9
"""One gigabyte per second in bytes per second."""
GBIT_PER_S: Final = 1e9 / 8
"""One gigabit per second in bytes per second."""
TFLOPS: Final = 1e12
"""One teraflop per second in flop per second."""

_BYTE_UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
}
_BYTES: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_MAX_NUMBER_LENGTH: Final = 40
"""Longer than any size needs; longer numbers are refused before any arithmetic, which would take quadratic time."""


def parse_bytes(text: str) -> int:
    """The number of bytes in a text such as `"2 MiB"`, `"512 KiB"`, `"32 MB"` or `"4096 B"`.

    Raises:
        ValueError: if there is no unit, the unit is unknown, the number has more than 40 characters, or the result is
            not a whole number of bytes.
    """
    match = _BYTES.fullmatch(text)
    if match is None or match[2].upper() not in _BYTE_UNITS:
        raise ValueError(f"{_shortened(text)} is not a size; write a number and one of B, KB, MB, GB, KiB, MiB, GiB")
    if len(match[1]) > _MAX_NUMBER_LENGTH:
        raise ValueError(
            f"{_shortened(text)} has a number of {len(match[1])} characters; a size has at most {_MAX_NUMBER_LENGTH}"
        )
    value = Fraction(match[1]) * _BYTE_UNITS[match[2].upper()]  # exact: 4.1 MB is 4,100,000 bytes
    if value.denominator != 1:
        raise ValueError(f"{_shortened(text)} is not a whole number of bytes")
    return value.numerator


def _shortened(text: str) -> str:
    """The text quoted, its middle left out where it is long."""
    return repr(text) if len(text) <= _MAX_NUMBER_LENGTH else f"{text[:16]!r}...{text[-8:]!r}"


def format_bytes(num_bytes: float) -> str:
    """A size for people in binary units, exact where it can be: `"2 MiB"`, `"684 KiB"`, `"1.33 MiB"`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{num_bytes:g} B"


def format_memory(num_bytes: float) -> str:
    """A GPU's memory, in the decimal units in which GPUs are sold: `"41.3 GB"`, `"512.0 MB"`."""
    for name, unit in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:g} B"


def format_seconds(seconds: float) -> str:
    """A duration for people with three significant digits: `"1.23 ms"`, `"45.6 us"`, `"2.00 s"`."""
    for unit, name in ((1.0, "s"), (MS, "ms"), (US, "us")):
        if abs(seconds) >= unit:
            value = seconds / unit
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {name}"
    return f"{seconds / NS:.0f} ns"


def format_percent(share: float, digits: int = 1, *, signed: bool = False) -> str:
    """A share in per cent for people: `"12.3 %"`, signed `"+12.3 %"`. What rounds to nothing has no sign: `"0.0 %"`."""
    number = f"{100 * share:+.{digits}f}"
    has_sign = (signed or number[0] == "-") and number.strip("+-0.")
    return f"{number if has_sign else number[1:]} %"
