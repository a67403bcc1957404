"""A comparison of tuners: in words, in the terminal and as a figure; and the page of one, of tuners or of planners."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted_table import WIDTH, Fitted
from lagom_overlap.report.render import EmbeddedFigure, embedded, render
from lagom_overlap.report.style import ACCENT, NEUTRAL, bars_height, label, lay_out
from lagom_overlap.report.tune.verdict_words import change_text, printable
from lagom_overlap.results.base import Cell
from lagom_overlap.results.compare import ComparePlannersResult, CompareResult, CompareRow
from lagom_overlap.units import format_memory, format_percent, format_seconds

if TYPE_CHECKING:  # the terminal must not wait for plotly
    import plotly.graph_objects as go


def summary(result: CompareResult) -> str:
    """The fastest tuner against the default, and the caveats."""
    measured = [(row.makespan_s, row) for row in result.rows if row.makespan_s is not None]
    if not measured:
        outcome = f"{len(result.rows)} searches were done; the results were not measured side by side."
    else:
        best_s = min(makespan_s for makespan_s, _ in measured)
        outcome = _best(
            next(row for makespan_s, row in measured if makespan_s == best_s), best_s, len(measured), result.step_s
        )
    return "\n".join((f"{result.job}: {outcome}", *result.notes))


def _best(row: CompareRow, makespan_s: float, num_rows: int, step_s: float | None) -> str:
    ratio, interval = row.speedup_over_default, row.speedup_interval
    over = "" if ratio is None else f", {ratio:.3f}× the default's speed"
    within = "" if interval is None else f" (95 % interval {interval[0]:.3f} to {interval[1]:.3f})"
    even = interval is not None and interval[0] <= 1 <= interval[1]
    claim = "has the shortest time" if even else "is the fastest"
    doubt = " It is not measurably different from the default." if even else ""
    return (
        f"{row.tuner} {claim} of {num_rows}: {format_seconds(makespan_s)}{over}{within}, "
        f"after {row.num_measurements} measurements.{doubt}{_of_step(row, step_s)}"
    )


def _of_step(row: CompareRow, step_s: float | None) -> str:
    """What the fastest is worth of the whole step."""
    if step_s is None or row.step_s is None:
        return ""
    change = change_text(step_s, row.step_s)
    return f" The whole step: {format_seconds(step_s)} to {format_seconds(row.step_s)} ({change}), by lagom simulate."


REGRET = (
    "Meas.: measurements of the search, of each tuner as published; lagom tune adds those of its guard. "
    "Time: from a group's first start to its last end, summed over the groups. Speed: over the default, median of the "
    "pairs, with its 95 % interval. Behind: how much longer than the best tuner here (regret)."
)
"""What `compare_table` says below its rows."""
STEP = "Step: the whole step with what was found, by lagom simulate; {step} untouched."


def compare_table(rows: Sequence[CompareRow], step_s: float | None = None) -> Fitted:
    """One row per tuner, in the order given; with the whole step where that of the untouched job is known."""
    caption = REGRET if step_s is None else f"{REGRET} {STEP.format(step=format_seconds(step_s))}"
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim", caption=caption, caption_justify="left")
    table.add_column("tuner", overflow="fold", ratio=1)
    names = ["meas.", "time", "speed", "95 %", "behind"]
    for name in [*names, "step", "change"] if step_s is not None else names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(printable(row.tuner)),
            Text(str(row.num_measurements)),
            Text("-" if row.makespan_s is None else format_seconds(row.makespan_s)),
            Text("-" if row.speedup_over_default is None else f"{row.speedup_over_default:.3f}×"),
            Text("-" if row.speedup_interval is None else "{:.3f}–{:.3f}".format(*row.speedup_interval)),
            Text("-" if row.regret_over_best is None else format_percent(row.regret_over_best)),
            *_step(row, step_s),
        )
    return Fitted(table)


def _step(row: CompareRow, step_s: float | None) -> tuple[Text, ...]:
    if step_s is None:
        return ()
    return Text("-" if row.step_s is None else format_seconds(row.step_s)), Text(change_text(step_s, row.step_s) or "-")


_FAR_BELOW = 0.5
"""Speeds below this are written at the edge: on one axis with them the others would be one point."""


def figure(result: CompareResult) -> "go.Figure":
    """Every tuner's speed over the default with its 95 % interval.

    Raises:
        ValueError: if the comparison ended before anything was measured side by side.
    """
    import plotly.graph_objects as go  # noqa: PLC0415 - the terminal must not wait for it

    measured = [
        (row, row.speedup_over_default) for row in reversed(result.rows) if row.speedup_over_default is not None
    ]
    if not measured:
        raise ValueError("nothing to draw: the comparison ended before the results were measured side by side")
    drawn = go.Figure()
    drawn.add_scatter(
        x=[ratio for _, ratio in measured],
        y=[label(row.tuner) for row, _ in measured],
        mode="markers",
        marker={"color": ACCENT, "size": 9},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [
                0.0 if row.speedup_interval is None else row.speedup_interval[1] - ratio for row, ratio in measured
            ],
            "arrayminus": [
                0.0 if row.speedup_interval is None else ratio - row.speedup_interval[0] for row, ratio in measured
            ],
        },
        hovertext=[f"{label(row.tuner)}: {ratio:.3f}×, {row.num_measurements} measurements" for row, ratio in measured],
        hoverinfo="text",
    )
    far = [(row, ratio) for row, ratio in measured if ratio < _FAR_BELOW]
    if far and len(far) < len(measured):
        near = [end for row, ratio in measured if ratio >= _FAR_BELOW for end in (ratio, *(row.speedup_interval or ()))]
        low, high = min(near), max(1.0, *near)
        margin = 0.06 * (high - low)
        drawn.update_xaxes(range=[min(low, 1.0) - 2 * margin, high + margin])
        for row, ratio in far:
            drawn.add_annotation(
                x=0, xref="paper", xanchor="left", y=label(row.tuner), text=f"◂ {ratio:.3f}×", showarrow=False
            )
    drawn.add_vline(x=1, line={"color": NEUTRAL, "width": 1.2, "dash": "dash"})
    drawn.update_xaxes(title_text="speed over the default (right of 1: faster)")
    return lay_out(drawn, bars_height(len(measured)), showlegend=False)


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
    headline, *further = result.summary().splitlines()
    table = [dict(row) for row in result.table()]
    if all(row.get("failure") is None for row in table):
        table = [{name: cell for name, cell in row.items() if name != "failure"} for row in table]
    figure = _figure(result)
    return render(
        "compare.html.j2",
        result=result,
        headline=headline,
        said=further,
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
