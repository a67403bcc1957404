"""A comparison of planners as a figure."""

import plotly.graph_objects as go

from lagom_overlap.report.style import ACCENT, NEUTRAL, label, lay_out, time_unit
from lagom_overlap.results.compare_planners import ComparePlannersResult

_ROW_PX, _FRAME_PX = 34, 90


def figure(result: ComparePlannersResult) -> go.Figure:
    """The step before any plan, and as each planner plans it.

    Raises:
        ValueError: if no planner found a plan.
    """
    planned = [(row.planner, row.after_s) for row in reversed(result.rows) if row.after_s is not None]
    if not planned:
        raise ValueError("nothing to draw: no planner found a plan")
    before_s = result.rows[0].before_s
    unit, unit_name = time_unit(before_s)
    drawn = go.Figure()
    drawn.add_bar(
        orientation="h",
        x=[after_s / unit for _, after_s in planned],
        y=[label(planner) for planner, _ in planned],
        marker={"color": ACCENT, "line": {"width": 0}},
        hovertemplate=f"%{{y}}: %{{x:.4g}} {unit_name}<extra></extra>",
    )
    drawn.add_vline(x=before_s / unit, line={"color": NEUTRAL, "width": 1.2, "dash": "dash"})
    drawn.update_xaxes(title_text=f"one step ({unit_name}; dashed: {label(result.baseline)})")
    return lay_out(drawn, _ROW_PX * len(planned) + _FRAME_PX, showlegend=False)
