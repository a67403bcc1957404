"""The page of one simulated iteration; its figures are inline SVG."""

from typing import Final

from lagom_overlap.report.bars import WIDTH, Bar, longest_spans, span_bar, time_ticks
from lagom_overlap.report.render import render
from lagom_overlap.report.simulate.words import IterationShare, headline, size_text, stage_parts
from lagom_overlap.report.style import COMPUTE, colour_of
from lagom_overlap.report.what_if import what_if_section
from lagom_overlap.results.simulate import SimulateResult
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.units import format_memory, format_seconds

MAX_SPANS: Final = 2400
"""Spans of the timeline that are drawn, 140 bytes each: the page is to be half a megabyte at most."""


def _stage_bars(result: SimulateResult) -> tuple[list[Bar], list[IterationShare]]:
    """One stacked bar per stage, and every kind of part once for the legend."""
    bars, legend = [], dict[str, IterationShare]()
    communicators = sorted({name for stage in result.stages for name in stage.communicators})
    for row, stage in enumerate(result.stages):
        x = 0.0
        for part in stage_parts(stage, result.iteration_s, communicators):
            width = WIDTH * part.seconds / result.iteration_s
            title = f"stage {stage.stage}: {part.name} {format_seconds(part.seconds)}"
            bars.append(Bar(x, width, row, part.colour, title))
            legend.setdefault(part.name, part)
            x += width
    return bars, list(legend.values())


def _timeline_bars(timeline: Timeline, iteration_s: float) -> list[Bar]:
    bars = []
    for span in longest_spans(timeline.spans, MAX_SPANS):
        colour = colour_of(2) if span.kind is SpanKind.COMM else COMPUTE[0]
        if span.name.startswith("B"):
            colour = colour_of(1)
        bars.append(span_bar(span, iteration_s, span.rank, colour))
    return bars


def render_simulation(result: SimulateResult) -> str:
    """The whole page; the same result gives the same page."""
    bars, legend = _stage_bars(result)
    return render(
        "simulate.html.j2",
        result=result,
        headline=headline(result),
        size=size_text(result),
        bars=bars,
        legend=[(part.colour, part.name) for part in legend],
        ticks=time_ticks(result.iteration_s),
        slots=[(COMPUTE[0], "forward"), (colour_of(1), "backward"), (colour_of(2), "gradients")],
        what_if_part=what_if_section(result.what_ifs, has_job=True),
        spans=_timeline_bars(result.timeline, result.iteration_s),
        num_left_out=max(0, len(result.timeline.spans) - MAX_SPANS),
        seconds=format_seconds,
        memory=format_memory,
        width=WIDTH,
    )
