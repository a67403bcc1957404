"""One group before and after: what ran when on which stream, on one time axis."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lagom_overlap.report.style import COMPUTE, NEUTRAL, axis_of, colour_of, ink_on, label, lay_out, time_unit
from lagom_overlap.report.tune.probes import GroupHistory
from lagom_overlap.results.tune import TuneResult
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.tuners.verdict import DEFAULT_ARM, TUNED_ARM
from lagom_overlap.units import format_seconds

_ROW_PX, _TITLE_PX, _FRAME_PX = 34, 44, 70
"""Pixels of a stream, of a timeline's title, and of the axis. Chosen by eye."""
MAX_SPANS = 1500
"""A timeline with more is shown up to here, and the figure says so."""


def gantt_figure(result: TuneResult, history: GroupHistory) -> go.Figure | None:
    """The figure of one group; None where no timeline was kept."""
    name = history.problem.group.name
    titled = [
        (f"before: {result.words_for(DEFAULT_ARM)}", result.search.timelines_under(DEFAULT_ARM).get(name)),
        ("after: tuned", result.search.timelines_under(TUNED_ARM).get(name)),
    ]
    shown = [(title, timeline) for title, timeline in titled if timeline is not None and timeline.spans]
    if not shown:
        return None
    longest = max(timeline.makespan_s for _, timeline in shown)
    unit, unit_name = time_unit(longest)
    rows = [_rows_of(timeline) for _, timeline in shown]
    heights = [_ROW_PX * len(row) + _TITLE_PX for row in rows]
    figure = make_subplots(
        rows=len(shown),
        cols=1,
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=0 if len(shown) == 1 else _TITLE_PX / (sum(heights) + _FRAME_PX),
        subplot_titles=[_title(title, timeline) for title, timeline in shown],
    )
    lanes: dict[str, object] = {}
    for index, (_, timeline) in enumerate(shown, start=1):
        _add_spans(figure, history, timeline, unit, index)
        figure.add_vline(x=timeline.makespan_s / unit, line={"color": NEUTRAL, "dash": "dash", "width": 1}, row=index)
        lanes[axis_of("y", index)] = {"categoryarray": rows[index - 1][::-1]}
    lay_out(
        figure,
        sum(heights) + _FRAME_PX,
        xaxes={"range": [0, longest / unit * 1.02]},
        yaxes={"type": "category", "categoryorder": "array", "showgrid": False},
        barmode="overlay",
        bargap=0.25,
        showlegend=False,
        uniformtext={"minsize": 9, "mode": "hide"},
        **{axis_of("x", len(shown)): {"title": {"text": f"time ({unit_name})"}}},
        **lanes,
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 12})
    return figure


def _title(title: str, timeline: Timeline) -> str:
    text = f"{label(title, 60)}, {format_seconds(timeline.makespan_s)}"
    return f"{text} (first {MAX_SPANS} of {len(timeline.spans)} spans)" if len(timeline.spans) > MAX_SPANS else text


def _row_of(span: Span, several_ranks: bool) -> str:
    return label(f"{span.stream}, rank {span.rank}" if several_ranks else span.stream, 28)


def _rows_of(timeline: Timeline) -> list[str]:
    """The rows of a timeline: per rank the streams that compute, then the others."""
    several = len({span.rank for span in timeline.spans}) > 1
    computing = {(span.rank, span.stream) for span in timeline.of(SpanKind.COMP)}
    ordered = sorted(timeline.spans, key=lambda s: (s.rank, (s.rank, s.stream) not in computing, s.stream))
    return list(dict.fromkeys(_row_of(span, several) for span in ordered))


def _add_spans(figure: go.Figure, history: GroupHistory, timeline: Timeline, unit: float, row: int) -> None:
    spans = timeline.spans[:MAX_SPANS]
    several = len({span.rank for span in timeline.spans}) > 1
    origin = timeline.spans[0].start_s
    comms = {name: colour_of(index) for index, name in enumerate(history.problem.group.comm_names)}
    turn = {op.name: COMPUTE[index % 2] for index, op in enumerate(history.problem.group.computations)}
    colours = [comms.get(span.name) or turn.get(span.name) or NEUTRAL for span in spans]
    figure.add_bar(
        orientation="h",
        x=[span.duration_s / unit for span in spans],
        base=[(span.start_s - origin) / unit for span in spans],
        y=[_row_of(span, several) for span in spans],
        marker={"color": colours, "line": {"width": 0}},
        text=[label(span.name, 24) for span in spans],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": [ink_on(colour) for colour in colours]},
        hovertext=[
            f"<b>{label(span.name)}</b><br>{format_seconds(span.duration_s)}, from "
            f"{format_seconds(span.start_s - origin)} to {format_seconds(span.end_s - origin)}"
            for span in spans
        ],
        hoverinfo="text",
        row=row,
        col=1,
    )
