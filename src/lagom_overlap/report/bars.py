"""Rectangles of a timeline that is drawn as inline SVG (`bars_svg` in parts.html.j2)."""

from dataclasses import dataclass
from typing import Final

from lagom_overlap.timeline import Span
from lagom_overlap.units import format_seconds

WIDTH: Final = 1000.0
_LEAST: Final = 0.1
"""So wide is what would be too short to be seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle of a figure of `WIDTH` units; `title` is shown under the pointer."""

    x: float
    width: float
    row: int
    colour: str
    title: str


def span_bar(span: Span, longest_s: float, row: int, colour: str) -> Bar:
    """A span on an axis that is `longest_s` long."""
    title = f"{span.name}: {format_seconds(span.duration_s)} from {format_seconds(span.start_s)}"
    width = max(_LEAST, WIDTH * span.duration_s / longest_s)
    return Bar(WIDTH * span.start_s / longest_s, width, row, colour, title)
