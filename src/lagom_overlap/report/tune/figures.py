"""The figure of a tuning run that stands for it in a notebook."""

import plotly.graph_objects as go

from lagom_overlap.report.tune.probes import GroupHistory, histories
from lagom_overlap.report.tune.rounds import ratio_figure
from lagom_overlap.report.tune.trajectory import trajectory_figure
from lagom_overlap.results.tune import TuneResult


def figure(result: TuneResult) -> go.Figure:
    """The verdict's ratios; without a verdict, or where nothing was run, the search of the group that takes longest.

    Raises:
        ValueError: if nothing was measured.
    """
    if result.verdict is not None and not result.is_prediction:
        drawn = ratio_figure(result, result.verdict)
        if drawn is not None:
            return drawn
    longest = max(histories(result), key=_time_s)
    drawn = trajectory_figure(result, longest)
    if drawn is None:
        raise ValueError("nothing to draw: nothing was measured")
    return drawn


def _time_s(history: GroupHistory) -> float:
    return history.problem.group.count * history.default.makespan_s if history.default else 0.0
