"""The figure of a simulated step that stands for it in a notebook."""

import plotly.graph_objects as go

from lagom_overlap.report.streams import streams_figure
from lagom_overlap.results.simulate import SimulateResult


def figure(result: SimulateResult) -> go.Figure:
    """What ran when on which stream."""
    return streams_figure({result.job: result.timeline})
