"""The page of ranked layouts; its figure is inline SVG."""

from dataclasses import dataclass
from typing import Final

from lagom_overlap.report.bars import WIDTH
from lagom_overlap.report.layouts.words import (
    certainty,
    headline,
    is_ranking,
    layout_text,
    next_line,
    row_text,
    size_text,
)
from lagom_overlap.report.render import render
from lagom_overlap.results.layouts import LayoutsResult
from lagom_overlap.units import format_memory, format_seconds

MAX_ROWS: Final = 200
"""Rows of the page's table; run.json has all."""
HEIGHT: Final = 420.0
_LEFT: Final = 80.0
_BOTTOM: Final = 48.0
_MARGIN: Final = 0.05
"""Of an axis, around its points."""
_NUM_TICKS: Final = 5


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values at the ends of an axis, and where they are drawn."""

    low: float
    high: float
    at_low: float
    at_high: float

    @classmethod
    def around(cls, values: list[float], at_low: float, at_high: float) -> "_Axis":
        margin = _MARGIN * (max(values) - min(values)) or _MARGIN * max(values)
        return cls(min(values) - margin, max(values) + margin, at_low, at_high)

    def place(self, value: float) -> float:
        return self.at_low + (value - self.low) / (self.high - self.low) * (self.at_high - self.at_low)

    @property
    def ticks(self) -> list[float]:
        step = (self.high - self.low) / (_NUM_TICKS + 1)
        return [self.low + step * (number + 1) for number in range(_NUM_TICKS)]


def render_layouts(result: LayoutsResult) -> str:
    """The whole page; the same result gives the same page."""
    ranking = is_ranking(result)
    memory = _Axis.around([float(row.memory_bytes) for row in result.rows], _LEFT, WIDTH - 10)
    time = _Axis.around([row.iteration_s for row in result.rows], HEIGHT - _BOTTOM, 10)
    points = [
        {
            "x": memory.place(row.memory_bytes),
            "y": time.place(row.iteration_s),
            "is_on_frontier": row.is_on_frontier,
            "title": f"{number}. {layout_text(row.keys, is_ranking=ranking)}: {row_text(row)}",
        }
        for number, row in enumerate(result.rows, start=1)
    ]
    frontier = sorted(
        (point for point in points if point["is_on_frontier"]), key=lambda point: str(point["x"]).zfill(30)
    )
    return render(
        "layouts.html.j2",
        result=result,
        headline=headline(result),
        size=size_text(result),
        certainty=certainty(result),
        next_line=next_line(result),
        points=points,
        line=" ".join(f"{point['x']:.1f},{point['y']:.1f}" for point in frontier),
        width=WIDTH,
        height=HEIGHT,
        left=_LEFT,
        bottom=HEIGHT - _BOTTOM,
        x_ticks=[(memory.place(value), format_memory(value)) for value in memory.ticks],
        y_ticks=[(time.place(value), format_seconds(value)) for value in time.ticks],
        rows=[
            (
                f"{number}. {layout_text(row.keys, is_ranking=ranking)}",
                row.num_gpus,
                format_seconds(row.iteration_s),
                format_memory(row.memory_bytes),
                f"{100 * row.mfu:.1f} %",
                f"{100 * row.exposed_share:.1f} %",
            )
            for number, row in enumerate(result.rows[:MAX_ROWS], start=1)
        ],
        refused=[(layout_text(one.keys, is_ranking=False), one.why) for one in result.refused[:MAX_ROWS]],
    )
