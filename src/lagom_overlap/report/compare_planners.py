"""A comparison of planners: in words, in the terminal and as a figure; its page is `compare`'s."""

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from lagom_overlap.report.fitted_table import Fitted, numbers_table
from lagom_overlap.report.style import ACCENT, NEUTRAL, bars_height, label, lay_out, time_unit
from lagom_overlap.results.compare import ComparePlannersResult
from lagom_overlap.units import format_memory, format_percent, format_seconds

if TYPE_CHECKING:  # the terminal must not wait for plotly
    import plotly.graph_objects as go


def summary(result: ComparePlannersResult) -> str:
    """The shortest plan against the step as it is, who found none, and the caveats."""
    planned = [(row.after_s, row) for row in result.rows if row.after_s is not None]
    failures = [f"{row.planner}: {row.failure}" for row in result.rows if row.failure is not None]
    if not planned:
        return "\n".join((f"{result.job}: no planner found a plan.", *failures, *result.notes))
    least_s = min(after_s for after_s, _ in planned)
    best = next(row for after_s, row in planned if after_s == least_s)
    return "\n".join(
        (
            f"{result.job}: {best.planner} plans the shortest step of {len(planned)}, simulated {result.simulation}: "
            f"{result.baseline} {format_seconds(best.before_s)} -> {format_seconds(least_s)} "
            f"({best.before_s / least_s:.3f}x).",
            *failures,
            *result.notes,
        )
    )


def planners_table(result: ComparePlannersResult) -> Group:
    """`lagom compare --planners`: one row per planner; below what the figures are, and why some have no plan."""
    table = numbers_table("planner", "before", "after", "bound", "over bound", "exposed", "memory", "solved in")
    for row in result.rows:
        over = row.after_s / row.lower_bound_s - 1 if row.after_s and row.lower_bound_s else None
        table.add_row(
            Text(row.planner),
            format_seconds(row.before_s),
            _seconds(row.after_s),
            _seconds(row.lower_bound_s),
            "-" if over is None else format_percent(over, 2),
            _seconds(row.exposed_comm_s),
            "-" if row.peak_memory_bytes is None else format_memory(row.peak_memory_bytes),
            _seconds(row.solve_s),
        )
    caption = f"Before is {result.baseline}. Simulated {result.simulation}; the bound assumes none."
    failures = (f"{row.planner}: {row.failure}" for row in result.rows if row.failure)
    return Group(Fitted(table), *(Text(line, style="dim") for line in (caption, *failures)))


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def figure(result: ComparePlannersResult) -> "go.Figure":
    """The step before any plan, and as each planner plans it.

    Raises:
        ValueError: if no planner found a plan.
    """
    import plotly.graph_objects as go  # noqa: PLC0415 - the terminal must not wait for it

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
    return lay_out(drawn, bars_height(len(planned)), showlegend=False)
