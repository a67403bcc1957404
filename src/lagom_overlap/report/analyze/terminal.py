"""The analysis for a terminal, on one screen: rich renderables that the command line prints.

Names are data: they are never read as markup, and characters that would move the cursor are made visible.
"""

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lagom_overlap.analysis.against import AgainstRun
from lagom_overlap.report.analyze.against import against_headline, change_cells, only_communicator_of, step_cells
from lagom_overlap.report.analyze.words import (
    advice_texts,
    collective_cells,
    collectives_head,
    contention_cells,
    contention_sentence,
    has_steps,
    headline,
    only_communicator,
    part_cells,
    rank_cells,
    ranks_head,
    unreachable_sentence,
)
from lagom_overlap.report.fitted_table import WIDTH, Fitted, to_type
from lagom_overlap.report.what_if import what_if_parts
from lagom_overlap.results.analyze import AnalyzeResult

# Rows of the tables: chosen so that a screen or two hold the answer; the page and `--json` have all.
MAX_RANKS: Final = 8  # a node's
MAX_COLLECTIVES: Final = 6  # half as many where another run is compared
MAX_PARTS: Final = 8  # phases and groups
MAX_CLASSES: Final = 5  # of kernels, and half as many
MAX_ADVICE: Final = 5  # the most worth first
MAX_WARNINGS: Final = 4  # or five, rather than four and "one more"
MAX_KINDS: Final = 4  # of changes between two runs
MAX_CHANGES: Final = 5  # of single collectives and kernels
_NAME: Final = 32
"""Characters of a name that are always shown, on as many lines as it takes: a file's name is told by its beginning."""
_RAGGED: Final = 12
"""Columns that a break between words may leave empty at the end of a name's first line."""


def plain(text: str) -> str:
    """A text whose unprintable characters are made visible."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _short(text: str, width: int) -> str:
    shown = plain(text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def _cell(text: str) -> Text:
    """A number, and its share on a line below it."""
    first, *below = text.split("\n")
    shown = Text(plain(first))
    for line in below:
        shown.append(f"\n{plain(line)}", style="dim")
    return shown


def _table(
    title: str, columns: Sequence[tuple[str, int]], rows: Sequence[Sequence[str]], most: int, tail: str
) -> RenderableType:
    """A table whose first column is a name on at most two lines, the others numbers that are never cut."""
    table = Table(box=None, width=WIDTH, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", title_justify="left")
    table.add_column(title, overflow="fold", ratio=1)
    room = WIDTH - sum(width + 1 for _, width in columns)
    for name, width in columns:
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    most += len(rows) == most + 1  # the last row takes no more room than a line that leaves it out
    for name, *cells in rows[:most]:
        table.add_row(Text(_short(name, max(2 * room - _RAGGED, _NAME))), *map(_cell, cells))
    if len(rows) > most:
        table.add_row(Text(f"and {len(rows) - most} more {tail}", style="dim"))
    return Fitted(table)


def analysis_summary(result: AnalyzeResult, written: Sequence[str] = ()) -> RenderableType:
    """The whole summary."""
    parts: list[RenderableType] = [Text(plain(headline(result)), style="bold"), Text("")]
    if result.against is not None:
        parts += _against(result.against)
    ranks = rank_cells(result)
    if ranks:
        parts.append(
            _table(
                ranks_head(result),
                (
                    ("step" if result.compat is None else "span", 8),
                    ("compute", 8),
                    ("comm", 8),
                    ("exposed", 8),
                    ("overlap", 8),
                    ("stretch", 8),
                    ("idle", 8),
                ),
                ranks,
                MAX_RANKS,
                "ranks",
            )
        )
    by_part = part_cells(result)
    if by_part:
        parts += [
            Text(""),
            _table(
                "part, per step" if has_steps(result) else "part, per trace",
                (("calls", 5), ("compute", 8), ("comm", 8), ("exposed", 8), ("overlap", 8)),
                by_part,
                MAX_PARTS,
                "groups",
            ),
        ]
    only = only_communicator(result)
    collectives = collective_cells(result, only)
    if collectives:
        parts += [
            Text(""),
            _table(
                plain(collectives_head(result, only)),
                (("calls", 5), ("total", 8), ("exposed", 8), ("stretch", 8), ("waiting", 8), ("busbw", 9)),
                collectives,
                MAX_COLLECTIVES if result.against is None else MAX_COLLECTIVES // 2,
                "collectives",
            ),
        ]
    parts += [Text(""), Text(plain(contention_sentence(result)))]
    classes = contention_cells(result, only)
    if classes:
        parts.append(
            _table(
                "kernels during a collective",
                (("all runs", 8), ("slowdown", 8), ("95 %", 11), ("stretch", 8)),
                classes,
                MAX_CLASSES if result.against is None else MAX_CLASSES // 2,
                "pairs",
            )
        )
    unreachable = unreachable_sentence(result)
    parts += [Text(""), Text(plain(unreachable))] if unreachable else []
    parts += [Text(""), *what_if_parts(result.what_ifs)][: -1 if result.what_ifs else 0]
    parts += _advice(result)
    warnings = result.analysis.findings.warnings
    parts += [Text("")] if warnings else []
    most = MAX_WARNINGS + (len(warnings) == MAX_WARNINGS + 1)
    parts += [Text(f"! {plain(text)}", style="yellow") for text in warnings[:most]]
    if len(warnings) > most:
        parts.append(Text(f"! and {len(warnings) - most} more warnings (--json)", style="yellow"))
    parts += [Text(""), *map(to_type, written)] if written else []
    parts += [Text(""), to_type(f"Next: {plain(result.next_line)}")]
    return Group(*parts)


def _against(compared: AgainstRun) -> list[RenderableType]:
    only = only_communicator_of(compared)
    columns = (("calls", 9), ("total", 8), ("Δ total", 8), ("Δ exposed", 9), ("Δ stretch", 9), ("channels", 8))
    parts: list[RenderableType] = [
        Text(plain(against_headline(compared)), style="bold"),
        _table(
            "per step",
            (("other run", 10), ("this run", 10), ("difference", 10), ("", 9)),
            step_cells(compared),
            MAX_RANKS,
            "",
        ),
        Text(""),
    ]
    if len(compared.kinds) > 1:
        parts += [_table("changed, by kind", columns, change_cells(compared.kinds), MAX_KINDS, "kinds"), Text("")]
    if compared.collectives:
        parts += [
            _table(
                "changed most" if only is None else f"changed, on {plain(only)}",
                columns,
                change_cells(compared.collectives, only),
                MAX_CHANGES,
                "collectives",
            ),
            Text(""),
        ]
    parts += [Text(f"! {plain(text)}", style="yellow") for text in compared.warnings]
    return parts


def _advice(result: AnalyzeResult) -> list[RenderableType]:
    texts = advice_texts(result)
    parts: list[RenderableType] = [Text("")]
    if not texts:
        parts.append(Text(f"No advice. {plain(result.looked_for)}"))
    for number, (gain, what, evidence, line) in enumerate(texts[:MAX_ADVICE], start=1):
        parts.append(Text(f"{number}. {plain(what)} ", style="bold").append(Text(f"[{gain}]", style="green")))
        parts.append(Padding(Text(plain(evidence), style="dim"), (0, 0, 0, 3)))
        parts.append(Padding(Text(plain(line), style="cyan"), (0, 0, 0, 3)))
    if len(texts) > MAX_ADVICE:
        parts.append(Text(f"and {len(texts) - MAX_ADVICE} more (--json or --out)", style="dim"))
    return parts
