"""The page of a comparison, of tuners or of planners: the words, the figure and the table of the result."""

from typing import Final

from lagom_overlap.report.render import EmbeddedFigure, embedded, render
from lagom_overlap.results.base import Cell
from lagom_overlap.results.compare import CompareResult
from lagom_overlap.results.compare_planners import ComparePlannersResult
from lagom_overlap.units import format_memory, format_percent, format_seconds

HEADS: Final = {
    "num_measurements": "measurements",
    "makespan_s": "time",
    "speedup_over_default": "over the default",
    "speedup_low": "95 % from",
    "speedup_high": "to",
    "regret_over_best": "behind the best",
    "step_s": "whole step",
    "before_s": "before",
    "after_s": "after",
    "lower_bound_s": "cannot be below",
    "exposed_comm_s": "exposed",
    "peak_memory_bytes": "peak memory",
    "solve_s": "solved in",
}
"""Heads of the columns that people read under another name than the JSON's."""


def render_comparison(result: CompareResult | ComparePlannersResult) -> str:
    """The whole page; the same result gives the same page."""
    headline, *said = result.summary().splitlines()
    table = [dict(row) for row in result.table()]
    if all(row.get("failure") is None for row in table):
        table = [{name: cell for name, cell in row.items() if name != "failure"} for row in table]
    figure = _figure(result)
    return render(
        "compare.html.j2",
        result=result,
        headline=headline,
        said=said,
        figure=figure,
        commands=_commands(result),
        heads=[HEADS.get(name, name) for name in table[0]] if table else [],
        rows=[[_text(name, cell) for name, cell in row.items()] for row in table],
    )


def _commands(result: CompareResult | ComparePlannersResult) -> tuple[str, ...]:
    """What to type to get the best row's files."""
    if isinstance(result, CompareResult):
        best = min((row for row in result.rows if row.makespan_s), key=lambda row: row.makespan_s or 0.0, default=None)
        return () if best is None else (f"lagom tune JOB.toml --tuner {best.tuner}",)
    planned = min((row for row in result.rows if row.after_s), key=lambda row: row.after_s or 0.0, default=None)
    return () if planned is None else (f"lagom plan JOB.toml --planner {planned.planner}",)


def _figure(result: CompareResult | ComparePlannersResult) -> EmbeddedFigure | None:
    try:
        is_of_tuners = isinstance(result, CompareResult)
        return embedded(result.figure(), "Every row against the default." if is_of_tuners else "The step by planner.")
    except ValueError:  # the comparison ended before there was anything to draw
        return None


def _text(name: str, cell: Cell) -> str:
    if cell is None:
        return "-"
    if not isinstance(cell, float | int):
        return str(cell)
    if name.endswith("_s"):
        return format_seconds(cell)
    if name.endswith("_bytes"):
        return format_memory(cell)
    if name.startswith("speedup"):
        return f"{cell:.3f}×"
    return format_percent(cell) if name.startswith("regret") else str(cell)
