"""A tuning run for a terminal: rich renderables that the command line prints.

Names are data: they are never read as markup, and characters that would move the cursor are made visible.
"""

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted_table import WIDTH, Fitted
from lagom_overlap.report.tune.cells import sentences, sum_rows, time_row
from lagom_overlap.report.tune.overview import overview
from lagom_overlap.report.tune.probes import histories
from lagom_overlap.report.tune.verdict_words import (
    KNOB_WORDS,
    comm_time,
    headline,
    knob_text,
    launch_text,
    printable,
    step_sentence,
)
from lagom_overlap.results.tune import TuneResult
from lagom_overlap.tuners.problem import GroupProblem

MAX_LINES = 12
"""Lines of collectives and sums that are shown without being asked for: more than that is an overview."""


def verdict_panel(result: TuneResult) -> Panel:
    """The verdict in a box: green where adopted, red where not, plain where there is none or nothing was run."""
    plain = result.verdict is None or result.is_prediction or (result.verdict.adopted and result.is_simulated)
    style = "white" if plain or result.verdict is None else "green" if result.verdict.adopted else "red"
    lines = [Text(printable(headline(result)), style="bold")]
    if step := step_sentence(result):
        lines.append(Text(step, style="bold"))
    lines += [Text(printable(sentence)) for sentence in sentences(result)]
    guard = "guarded" if result.guarded else "unguarded"
    small = f"{result.backend_description}; {result.tuner} ({guard}), {result.num_measurements} measurements"
    lines.append(Text(printable(small), style="dim"))
    title = Text(short(result.job, WIDTH - 10))
    return Panel(Group(*lines), title=title, title_align="left", border_style=style, width=WIDTH, padding=(0, 1))


def changes(result: TuneResult, *, details: bool) -> RenderableType:
    """What changes: every collective where asked for or where they are few, else an overview."""
    num_lines = sum(len(problem.group.comms) + 4 for problem in result.search.problems)
    return config_table(result) if details or num_lines <= MAX_LINES else overview(result)


def config_table(result: TuneResult) -> Fitted:
    """Per collective what changes and its time before and after; per group its makespan."""
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column("collective", overflow="fold", ratio=1)
    table.add_column("default → tuned", overflow="fold", ratio=1)
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True, min_width=9)
    for history in histories(result):
        group = history.problem.group
        count = Text(f" × {group.count}", style="dim")
        table.add_row(Text(printable(group.name), style="bold") + count)
        changed = result.search.tuned_of(history.problem) != history.problem.default
        if launch := launch_text(history.problem, result.search.tuned_of(history.problem)):
            table.add_row(Text("  computation's side"), Text(launch), "", "", "")
        for index, name in enumerate(group.comm_names):
            row = time_row(name, comm_time(history.default, index), comm_time(history.tuned, index))
            changes = _changes(result, history.problem, index)
            same = history.problem.default[index] == result.search.tuned_of(history.problem)[index]
            times = _times(row.before, row.after if changed else "", "" if same else row.change)
            table.add_row(Text("  " + printable(name)), changes, *times)
        for row in sum_rows(history, changed=changed):
            style = "bold" if row.css else "dim"
            table.add_row(Text("  " + row.name, style=style), "", *_times(row.before, row.after, row.change, style))
    return Fitted(table)


def _changes(result: TuneResult, problem: GroupProblem, index: int) -> Text:
    """The knobs that change, one a line."""
    before, after = problem.default[index], result.search.tuned_of(problem)[index]
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


def short(text: str, width: int) -> str:
    """The text in at most `width` columns."""
    plain = printable(text)
    return plain if len(plain) <= width else plain[: width - 1] + "…"
