"""Ranked layouts as a figure: time, or tokens per second where the work differs, against memory."""

import plotly.graph_objects as go

from lagom_overlap.report.layouts.words import layout_text
from lagom_overlap.report.style import ACCENT, NEUTRAL, label, lay_out, time_unit
from lagom_overlap.results.layouts import LayoutsResult

_HEIGHT_PX = 420


def figure(result: LayoutsResult) -> go.Figure:
    """A point per layout; those that are as fast as anything of their memory are joined by a line."""
    unit, unit_name = time_unit(max(row.iteration_s for row in result.rows))
    drawn = go.Figure()
    for on_frontier, colour, mode in ((False, NEUTRAL, "markers"), (True, ACCENT, "lines+markers")):
        # In the order of memory, which is the line's.
        rows = [
            row for row in sorted(result.rows, key=lambda row: row.memory_bytes) if row.is_on_frontier is on_frontier
        ]
        drawn.add_scatter(
            x=[row.memory_bytes / 1e9 for row in rows],
            y=[row.iteration_s / unit if result.same_work else row.tokens_per_s_per_gpu for row in rows],
            mode=mode,
            marker={"color": colour, "size": 9 if on_frontier else 6},
            name="frontier" if on_frontier else "others",
            hovertext=[label(layout_text(row.keys, is_ranking=result.is_ranking), 120) for row in rows],
        )
    drawn.update_xaxes(title_text="memory of the fullest GPU (GB)")
    drawn.update_yaxes(title_text=f"one iteration ({unit_name})" if result.same_work else "tokens/s per GPU")
    return lay_out(drawn, _HEIGHT_PX)
