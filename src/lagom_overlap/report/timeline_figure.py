"""Simulated timelines as a figure: what ran when on which stream."""

from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lagom_overlap.report.style import COMPUTE, colour_of, label, lay_out, time_unit
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.units import format_seconds

MAX_SPANS = 3000
"""Spans of each timeline that are drawn."""
_ROW_PX, _FRAME_PX = 30, 130
"""Pixels of a stream, and of axis and titles. Chosen by eye."""


def streams_figure(lines: Mapping[str, Timeline]) -> go.Figure:
    """A row of streams per timeline, one below the other on one time axis; ranks of several are told apart."""
    unit, unit_name = time_unit(max(line.makespan_s for line in lines.values()))
    titles = [f"{name}: {format_seconds(line.makespan_s)}" for name, line in lines.items()]
    drawn = make_subplots(rows=len(lines), cols=1, shared_xaxes=True, subplot_titles=titles)
    num_rows = 0
    for row, line in enumerate(lines.values(), start=1):
        num_rows += len({(span.rank, span.stream) for span in line.spans})
        _add(drawn, line, unit, row)
    drawn.update_xaxes(title_text=unit_name, row=len(lines), col=1)
    return lay_out(drawn, _ROW_PX * num_rows + _FRAME_PX, showlegend=False, barmode="overlay", bargap=0.2)


def _add(drawn: go.Figure, line: Timeline, unit: float, row: int) -> None:
    spans = line.spans[:MAX_SPANS]
    several = len({span.rank for span in spans}) > 1
    streams = {stream: index for index, stream in enumerate(dict.fromkeys(span.stream for span in spans))}
    drawn.add_bar(
        orientation="h",
        base=[span.start_s / unit for span in spans],
        x=[span.duration_s / unit for span in spans],
        y=[label(f"{span.stream}, rank {span.rank}" if several else span.stream) for span in spans],
        marker={
            "color": [
                COMPUTE[number % 2] if span.kind is SpanKind.COMP else colour_of(streams[span.stream])
                for number, span in enumerate(spans)
            ],
            "line": {"width": 0},
        },
        hovertext=[f"{label(span.name)}: {format_seconds(span.duration_s)}" for span in spans],
        hoverinfo="text",
        row=row,
        col=1,
    )
