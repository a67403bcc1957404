"""A simulated step of a captured rank: its terminal, its page and its figure."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from lagom_overlap.report.bars import BARS_WIDTH
from lagom_overlap.report.plan import timeline_figure
from lagom_overlap.report.render import render
from lagom_overlap.report.what_if import what_if_parts, what_if_section
from lagom_overlap.results.simulate import SimulateCaptureResult

if TYPE_CHECKING:  # the terminal must not wait for plotly
    import plotly.graph_objects as go


def captured_summary(result: SimulateCaptureResult) -> Group:
    """The step, its parts, what changes would do, notes."""
    step, parts = result.headline()
    shown: list[RenderableType] = [Text(step, style="bold"), Text(parts), Text()]
    shown += what_if_parts(result.what_ifs, has_job=True)
    return Group(*shown, *(Text(note, style="dim") for note in result.notes))


def render_captured(result: SimulateCaptureResult) -> str:
    """The whole page; the same result gives the same page."""
    step, parts = result.headline()
    return render(
        "simulate_capture.html.j2",
        result=result,
        step=step,
        parts=parts,
        what_if_part=what_if_section(result.what_ifs, has_job=True),
        figure=timeline_figure("The step", result.timeline, result.iteration_s or 1.0, {}, {}),
        width=BARS_WIDTH,
    )


def figure(result: SimulateCaptureResult) -> "go.Figure":
    """What ran when on which stream."""
    from lagom_overlap.report.timeline_figure import streams_figure  # noqa: PLC0415 - the terminal must not wait for plotly

    return streams_figure({result.job: result.timeline})
