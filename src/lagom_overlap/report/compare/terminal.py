"""A comparison of tuners for a terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted import WIDTH, Fitted
from lagom_overlap.report.tune.terminal import printable
from lagom_overlap.results.compare import CompareRow
from lagom_overlap.units import format_seconds

REGRET = "Regret: the makespan over that of the best tuner here, minus one."
"""What `compare_table` says below its rows."""


def compare_table(rows: Sequence[CompareRow]) -> Fitted:
    """One row per tuner, in the order given."""
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim", caption=REGRET, caption_justify="left")
    table.add_column("tuner", overflow="fold", ratio=1)
    for name, width in (("meas.", 7), ("makespan", 9), ("over default", 12), ("95 % interval", 16), ("regret", 8)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(
            Text(printable(row.tuner)),
            Text(str(row.num_measurements)),
            Text("-" if row.makespan_s is None else format_seconds(row.makespan_s)),
            Text("-" if row.speedup_over_default is None else f"{row.speedup_over_default:.3f}×"),
            Text("-" if row.speedup_interval is None else "{:.3f} to {:.3f}".format(*row.speedup_interval)),
            Text("-" if row.regret_over_best is None else f"{row.regret_over_best * 100:.1f} %"),
        )
    return Fitted(table)
