"""The figure of an emulated job that stands for it in a notebook."""

import plotly.graph_objects as go

from lagom_overlap.report.streams import streams_figure
from lagom_overlap.results.emulate import EmulateResult


def figure(result: EmulateResult) -> go.Figure:
    """What ran when in the last step."""
    return streams_figure({" ".join(result.command[-1:]) or "job": result.timeline})
