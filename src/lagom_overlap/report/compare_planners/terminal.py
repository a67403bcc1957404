"""A comparison of planners for a terminal."""

from rich.console import Group
from rich.text import Text

from lagom_overlap.report.fitted import Fitted
from lagom_overlap.report.plan.terminal import plan_table
from lagom_overlap.results.compare_planners import ComparePlannersResult
from lagom_overlap.units import format_memory, format_percent, format_seconds


def planners_table(result: ComparePlannersResult) -> Group:
    """`lagom compare --planners`: one row per planner; below what the figures are, and why some have no plan."""
    table = plan_table("planner", "before", "after", "bound", "over bound", "exposed", "memory", "solved in")
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
    said = f"Before is {result.baseline}. Simulated {result.simulation}; the bound assumes none."
    failures = (f"{row.planner}: {row.failure}" for row in result.rows if row.failure)
    return Group(Fitted(table), *(Text(line, style="dim") for line in (said, *failures)))


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
