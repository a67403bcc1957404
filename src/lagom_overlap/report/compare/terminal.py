"""A comparison of tuners for a terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted import WIDTH, Fitted
from lagom_overlap.report.tune.words import change_text, printable
from lagom_overlap.results.compare import CompareRow
from lagom_overlap.units import format_percent, format_seconds

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
