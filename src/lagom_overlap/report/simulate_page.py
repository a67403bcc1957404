"""The page of one simulated iteration: one HTML file that needs no network; its figures are inline SVG.

Names come from the job file: jinja2 escapes them.
"""

from dataclasses import dataclass
from importlib import resources
from typing import Final

import jinja2
from markupsafe import Markup

from lagom_overlap.report.simulate_model import SimulateJson
from lagom_overlap.report.simulate_parts import Part, headline, stage_parts
from lagom_overlap.report.style import COMPUTE, colour_of
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.units import format_seconds

MAX_SPANS: Final = 4000
"""Spans of the timeline that are drawn; the page says so where there are more."""
WIDTH: Final = 1000.0


@dataclass(frozen=True, slots=True)
class _Bar:
    x: float
    width: float
    row: int
    colour: str
    title: str


def _stage_bars(result: SimulateJson) -> tuple[list[_Bar], list[Part]]:
    """One stacked bar per stage, and every kind of part once for the legend."""
    bars, legend = [], dict[str, Part]()
    for row, stage in enumerate(result.stages):
        x = 0.0
        for part in stage_parts(stage, result.iteration_s):
            width = WIDTH * part.seconds / result.iteration_s
            title = f"stage {stage.stage}: {part.name} {format_seconds(part.seconds)}"
            bars.append(_Bar(x, width, row, part.colour, title))
            legend.setdefault(part.name, part)
            x += width
    return bars, list(legend.values())


def _timeline_bars(timeline: Timeline, iteration_s: float) -> list[_Bar]:
    bars = []
    for span in timeline.spans[:MAX_SPANS]:
        colour = colour_of(2) if span.kind is SpanKind.COMM else COMPUTE[0]
        if span.name.startswith("B"):
            colour = colour_of(1)
        title = f"{span.name}: {format_seconds(span.duration_s)} from {format_seconds(span.start_s)}"
        x, width = WIDTH * span.start_s / iteration_s, WIDTH * span.duration_s / iteration_s
        bars.append(_Bar(x, max(0.1, width), span.rank, colour, title))
    return bars


def render_simulation(result: SimulateJson, timeline: Timeline) -> str:
    """The whole page."""
    folder = resources.files(__package__) / "templates"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((folder / "simulate.html.j2").read_text(encoding="utf-8"))
    bars, legend = _stage_bars(result)
    return template.render(
        result=result,
        headline=headline(result),
        bars=bars,
        legend=legend,
        spans=_timeline_bars(timeline, result.iteration_s),
        num_left_out=max(0, len(timeline.spans) - MAX_SPANS),
        seconds=format_seconds,
        width=WIDTH,
        css=Markup((folder / "report.css").read_text(encoding="utf-8")),
    )
