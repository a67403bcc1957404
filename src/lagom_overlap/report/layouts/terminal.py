"""Ranked layouts for a terminal."""

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted import WIDTH, Fitted, to_type
from lagom_overlap.report.layouts.words import certainty, headline, layout_text, next_line, order_text, size_text
from lagom_overlap.results.layouts import LayoutsResult
from lagom_overlap.units import format_memory, format_seconds

MAX_ROWS: Final = 10
"""Rows of a ranking in the table, and the frontier's behind them; all are in the page and in --json."""
MAX_VARIANTS: Final = 40
_MAX_FRONTIER: Final = 5
_MAX_REFUSED: Final = 5


def layouts_summary(result: LayoutsResult) -> Group:
    """The fastest, the table, what was refused, notes, and the next line."""
    parts: list[RenderableType] = [Text(size_text(result), style="dim"), Text(headline(result), style="bold"), Text()]
    parts += [_table(result), Text()]
    parts += [Text(said) for said in (order_text(result), certainty(result)) if said]
    for one in result.refused[:_MAX_REFUSED]:
        parts.append(Text(f"Not simulated: {layout_text(one.keys, is_ranking=False)}: {one.why}"))
    if len(result.refused) > _MAX_REFUSED:
        parts.append(Text(f"and {len(result.refused) - _MAX_REFUSED} more, all in run.json"))
    parts += [Text(note, style="dim") for note in result.notes]
    if line := next_line(result):
        parts += [Text(), to_type(f"Next: {line}")]
    return Group(*parts)


def _table(result: LayoutsResult) -> Fitted:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column("", justify="right", no_wrap=True)
    ranking = result.is_ranking
    table.add_column("layout" if ranking else "variant", ratio=1)
    several = len({row.num_gpus for row in result.rows}) > 1
    for name in (*(("GPUs",) if several else ()), "iteration", "tokens/s/GPU", "memory", "MFU", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    most = MAX_ROWS if ranking else MAX_VARIANTS
    numbered = list(enumerate(result.rows, start=1))
    shown = numbered[:most]
    shown += [one for one in numbered[most:] if one[1].is_on_frontier][:_MAX_FRONTIER]
    for number, row in shown:
        cells = [Text(f"{number}{'*' if row.is_on_frontier else ' '}"), Text(layout_text(row.keys, is_ranking=ranking))]
        cells += [Text(str(row.num_gpus))] if several else []
        cells += [Text(format_seconds(row.iteration_s)), Text(f"{row.tokens_per_s_per_gpu:,.0f}")]
        cells.append(Text(format_memory(row.memory_bytes)))
        table.add_row(*cells, Text(f"{100 * row.mfu:.1f} %"), Text(f"{100 * row.exposed_share:.1f} %"))
    table.caption = "* nothing simulated needs less memory and is as fast"
    table.caption_justify = "left"
    return Fitted(table)
