"""The figure of a plan that stands for it in a notebook."""

import plotly.graph_objects as go

from lagom_overlap.report.streams import streams_figure
from lagom_overlap.results.plan import PlanResult


def figure(result: PlanResult) -> go.Figure:
    """What ran when on which stream: as simulated before and after the plan."""
    return streams_figure(result.step.timelines)
