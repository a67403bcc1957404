"""The report of an analysis."""

from typing import TYPE_CHECKING

from lagom_overlap.report.analyze.words import summary as summary
from lagom_overlap.results.analyze import AnalyzeResult

if TYPE_CHECKING:  # the terminal must not wait for plotly
    import plotly.graph_objects as go


def figure(result: AnalyzeResult) -> "go.Figure":
    """The result's figure; see `analyze.charts`."""
    from lagom_overlap.report.analyze import charts  # noqa: PLC0415 - loads plotly

    return charts.figure(result)
