"""Rectangles of a timeline that is drawn as inline SVG (`bars_svg` in parts.html.j2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Final

from lagom_overlap.report.style import time_unit
from lagom_overlap.timeline import Span
from lagom_overlap.units import format_seconds

BARS_WIDTH: Final = 1000.0
"""Units of an SVG's width, which the page scales."""
_LEAST: Final = 0.1
"""So wide is what would be too short to be seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle of a figure of `BARS_WIDTH` units; `title` is shown under the pointer."""

    x: float
    width: float
    row: int
    colour: str
    title: str


def span_bar(span: Span, longest_s: float, row: int, colour: str) -> Bar:
    """A span on an axis that is `longest_s` long."""
    title = f"{span.name}: {format_seconds(span.duration_s)} from {format_seconds(span.start_s)}"
    width = max(_LEAST, BARS_WIDTH * span.duration_s / longest_s)
    return Bar(BARS_WIDTH * span.start_s / longest_s, width, row, colour, title)


def longest_spans(spans: Sequence[Span], most: int) -> tuple[Span, ...]:
    """The `most` longest spans, in their order: of many, the short ones cannot be seen."""
    places = sorted(range(len(spans)), key=lambda place: -spans[place].duration_s)[:most]
    return tuple(spans[place] for place in sorted(places))


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of a time axis: its place in per cent of the width, and its text."""

    place: float
    text: str


def time_ticks(longest_s: float) -> tuple[Tick, ...]:
    """Round times from 0 to `longest_s`, five or six of them."""
    unit, name = time_unit(longest_s)
    longest = longest_s / unit
    raw = longest / 5
    power = 10.0 ** floor(log10(raw)) if raw > 0 else 1.0
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    times = [number * step for number in range(floor(longest / step) + 1)]
    return tuple(Tick(100 * time / longest if longest else 0.0, f"{time:g} {name}") for time in times)
