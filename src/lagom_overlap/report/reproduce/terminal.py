"""A reproduction for a terminal."""

from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted import WIDTH, Fitted
from lagom_overlap.results.reproduce import ReproducedVerdict, ReproduceReport

_STYLES: Final = {
    ReproducedVerdict.REPRODUCED: "green",
    ReproducedVerdict.DIRECTION: "yellow",
    ReproducedVerdict.NOT: "red",
}


def lines_table(report: ReproduceReport) -> Group:
    """Every line by chapter and profile, with its verdict; reasons are in the page and in the JSON."""
    parts: list[Fitted] = []
    for chapter in report.chapters:
        for profile in dict.fromkeys(line.profile for line in report.lines if line.figure == chapter):
            words = chapter if profile == "none" else f"{chapter}, {profile}"
            table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim", title=words, title_justify="left")
            for name, ratio in (("published", 4), ("paper", 2), ("ours", 4)):
                table.add_column(name, ratio=ratio, overflow="fold")
            table.add_column("verdict", min_width=10, overflow="fold")
            for line in report.lines:
                if (line.figure, line.profile) == (chapter, profile):
                    verdict = Text(line.verdict.value, style=_STYLES[line.verdict])
                    table.add_row(Text(line.what), Text(line.published), Text(line.ours), verdict)
            parts.append(Fitted(table))
    return Group(*parts)
