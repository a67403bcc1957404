"""The report of a tuning run."""

from typing import TYPE_CHECKING

from lagom_overlap.report.tune.verdict_words import summary as summary
from lagom_overlap.results.tune import TuneResult

if TYPE_CHECKING:  # the terminal must not wait for plotly
    import plotly.graph_objects as go


def figure(result: TuneResult) -> "go.Figure":
    """The result's figure; see `page.figure`."""
    from lagom_overlap.report.tune import page  # noqa: PLC0415 - loads plotly

    return page.figure(result)
