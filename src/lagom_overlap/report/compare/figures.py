"""A comparison of tuners as a figure."""

import plotly.graph_objects as go

from lagom_overlap.report.style import ACCENT, NEUTRAL, label, lay_out
from lagom_overlap.results.compare import CompareResult

_ROW_PX, _FRAME_PX = 34, 90
_FAR_BELOW = 0.5
"""Speeds below this are written at the edge: on one axis with them the others would be one point."""


def figure(result: CompareResult) -> go.Figure:
    """Every tuner's speed over the default with its 95 % interval.

    Raises:
        ValueError: if the comparison ended before anything was measured side by side.
    """
    measured = [
        (row, row.speedup_over_default) for row in reversed(result.rows) if row.speedup_over_default is not None
    ]
    if not measured:
        raise ValueError("nothing to draw: the comparison ended before the results were measured side by side")
    drawn = go.Figure()
    drawn.add_scatter(
        x=[ratio for _, ratio in measured],
        y=[label(row.tuner) for row, _ in measured],
        mode="markers",
        marker={"color": ACCENT, "size": 9},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [
                0.0 if row.speedup_interval is None else row.speedup_interval[1] - ratio for row, ratio in measured
            ],
            "arrayminus": [
                0.0 if row.speedup_interval is None else ratio - row.speedup_interval[0] for row, ratio in measured
            ],
        },
        hovertext=[f"{label(row.tuner)}: {ratio:.3f}×, {row.num_measurements} measurements" for row, ratio in measured],
        hoverinfo="text",
    )
    far = [(row, ratio) for row, ratio in measured if ratio < _FAR_BELOW]
    if far and len(far) < len(measured):
        near = [end for row, ratio in measured if ratio >= _FAR_BELOW for end in (ratio, *(row.speedup_interval or ()))]
        low, high = min(near), max(1.0, *near)
        margin = 0.06 * (high - low)
        drawn.update_xaxes(range=[min(low, 1.0) - 2 * margin, high + margin])
        for row, ratio in far:
            drawn.add_annotation(
                x=0, xref="paper", xanchor="left", y=label(row.tuner), text=f"◂ {ratio:.3f}×", showarrow=False
            )
    drawn.add_vline(x=1, line={"color": NEUTRAL, "width": 1.2, "dash": "dash"})
    drawn.update_xaxes(title_text="speed over the default (right of 1: faster)")
    return lay_out(drawn, _ROW_PX * len(measured) + _FRAME_PX, showlegend=False)
