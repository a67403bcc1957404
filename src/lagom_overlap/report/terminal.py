"""The same for a terminal of 80 columns: rich renderables that the command line prints.

Names are data: they are never read as markup, and characters that would move the cursor are made visible.
"""

from collections.abc import Sequence

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lagom_overlap.backends.base import GroupProblem
from lagom_overlap.report.model import CompareRow, TuneReport
from lagom_overlap.report.page import sentences, sum_rows, time_row
from lagom_overlap.report.probes import histories
from lagom_overlap.report.sentences import KNOB_WORDS, comm_time, headline, knob_text, launch_text, num_search_steps
from lagom_overlap.units import format_seconds

WIDTH = 80
"""Columns that every renderable fits into."""
MAX_GROUPS = 12
"""Groups in the table; the others are in the page."""
REGRET = "Regret: the makespan over that of the best tuner here, minus one."
"""What `compare_table` says below its rows."""
_NAME_WIDTH = 24


def verdict_panel(report: TuneReport) -> Panel:
    """The verdict in a box: green where adopted, red where not, plain where there is none or nothing was run."""
    plain = report.verdict is None or report.is_prediction
    style = "white" if plain or report.verdict is None else "green" if report.verdict.adopted else "red"
    lines = [Text(_plain(headline(report)), style="bold")]
    lines += [Text(_plain(sentence)) for sentence in sentences(report)]
    guard = "guarded" if report.guarded else "unguarded"
    small = f"{report.backend_description}; {report.tuner} ({guard}), {num_search_steps(report)} measurements"
    lines.append(Text(_plain(small), style="dim"))
    title = Text(_short(report.job, WIDTH - 10))
    return Panel(Group(*lines), title=title, title_align="left", border_style=style, width=WIDTH, padding=(0, 1))


def config_table(report: TuneReport) -> Table:
    """Per collective what changes and its time before and after; per group its makespan."""
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column("collective", max_width=_NAME_WIDTH, no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("default → tuned", overflow="fold", ratio=1)
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True, width=9)
    found = histories(report)
    for history in found[:MAX_GROUPS]:
        group = history.problem.group
        count = Text(f" × {group.count}", style="dim")
        table.add_row(Text(_short(group.name, _NAME_WIDTH - len(count)), style="bold") + count)
        if launch := launch_text(history.problem, report.tuned_of(history.problem)):
            table.add_row(Text("  computation's side"), Text(launch), "", "", "")
        for index, name in enumerate(group.comm_names):
            row = time_row(name, comm_time(history.default, index), comm_time(history.tuned, index))
            changes = _changes(report, history.problem, index)
            same = history.problem.default[index] == report.tuned_of(history.problem)[index]
            times = _times(row.before, row.after, "" if same else row.change)
            table.add_row(Text("  " + _short(name, _NAME_WIDTH - 2)), changes, *times)
        for row in sum_rows(history, changed=report.tuned_of(history.problem) != history.problem.default):
            style = "bold" if row.css else "dim"
            table.add_row(Text("  " + row.name, style=style), "", *_times(row.before, row.after, row.change, style))
    if len(found) > MAX_GROUPS:
        table.add_row(Text(f"and {len(found) - MAX_GROUPS} more groups", style="dim"))
    return table


def compare_table(rows: Sequence[CompareRow]) -> Table:
    """One row per tuner, in the order given."""
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim", caption=REGRET, caption_justify="left")
    table.add_column("tuner", no_wrap=True, overflow="ellipsis", ratio=1)
    for name, width in (("meas.", 7), ("makespan", 9), ("over default", 12), ("95 % interval", 16), ("regret", 8)):
        table.add_column(name, justify="right", no_wrap=True, width=width)
    for row in rows:
        table.add_row(
            Text(_short(row.tuner, _NAME_WIDTH)),
            Text(str(row.num_measurements)),
            Text("-" if row.makespan_s is None else format_seconds(row.makespan_s)),
            Text("-" if row.speedup_over_default is None else f"{row.speedup_over_default:.3f}×"),
            Text("-" if row.speedup_interval is None else "{:.3f} to {:.3f}".format(*row.speedup_interval)),
            Text("-" if row.regret_over_best is None else f"{row.regret_over_best * 100:.1f} %"),
        )
    return table


def _changes(report: TuneReport, problem: GroupProblem, index: int) -> Text:
    """The knobs that change, one a line."""
    before, after = problem.default[index], report.tuned_of(problem)[index]
    lines = [
        f"{word} {knob_text(before, knob)} → {knob_text(after, knob)}"
        for knob, word in KNOB_WORDS.items()
        if getattr(before, knob) != getattr(after, knob)
    ]
    return Text("\n".join(lines)) if lines else Text("unchanged", style="dim")


def _times(before: str, after: str, change: str, style: str = "") -> tuple[Text, Text, Text]:
    texts = ("–" if text == "not measured" else text for text in (before, after, change))
    first, second, third = (Text(text, style=style) for text in texts)
    return first, second, third


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _short(text: str, width: int) -> str:
    plain = _plain(text)
    return plain if len(plain) <= width else plain[: width - 1] + "…"
