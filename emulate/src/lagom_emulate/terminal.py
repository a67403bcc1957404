"""An emulated job for a terminal."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.emulate.words import headline, priced_text, size_text
from lagom_overlap.report.fitted import WIDTH, Fitted
from lagom_overlap.results.emulate import EmulateResult
from lagom_overlap.units import format_seconds


def emulation_summary(result: EmulateResult) -> Group:
    """Headline, what the last step was spent on, prices, notes."""
    parts: list[Text | Fitted] = [Text(size_text(result), style="dim"), Text(headline(result), style="bold"), Text()]
    if result.parts:
        parts += [_step(result), Text()]
    parts += [Text(line, style="bold") for line in result.refusals]
    parts += [Text(line, style="dim") for line in (priced_text(result), *result.notes)]
    return Group(*parts)


def _step(result: EmulateResult) -> Fitted:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column("last step, mean of ranks", ratio=1)
    table.add_column("time", justify="right", no_wrap=True)
    for name, seconds in result.parts.items():
        table.add_row(Text(name), Text(format_seconds(seconds)))
    return Fitted(table)
