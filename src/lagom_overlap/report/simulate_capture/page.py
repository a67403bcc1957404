"""The page of one simulated step of a captured rank."""

from lagom_overlap.report.bars import WIDTH
from lagom_overlap.report.plan.page import timeline_figure
from lagom_overlap.report.render import render
from lagom_overlap.report.what_if import what_if_section
from lagom_overlap.results.simulate import SimulateCaptureResult


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
        width=WIDTH,
    )
