"""A reproduction for a terminal."""

from typing import Final

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lagom_overlap.papers.reproduce.result import Line, Region, ReproducedVerdict, ReproduceReport
from lagom_overlap.report.fitted import WIDTH, Fitted

_STYLES: Final = {
    ReproducedVerdict.REPRODUCED: "green",
    ReproducedVerdict.DIRECTION: "yellow",
    ReproducedVerdict.BUILT_IN: "dim",
    ReproducedVerdict.NOT: "red",
}


def lines_table(report: ReproduceReport) -> Group:
    """Every line by chapter and profile with its verdict, the reasons by number, and where the lines hold."""
    parts: list[RenderableType] = []
    for chapter in report.chapters:
        for profile in dict.fromkeys(line.profile for line in report.lines if line.figure == chapter):
            words = chapter if profile == "none" else f"{chapter}, {profile}"
            lines = [line for line in report.lines if (line.figure, line.profile) == (chapter, profile)]
            parts += [Fitted(_verdicts(words, lines)), *_reasons(lines)]
            swept = [region for region in report.regions if (region.figure, region.profile) == (chapter, profile)]
            if swept:
                parts.append(Fitted(_regions(f"{words}, over what the paper leaves open", swept)))
    return Group(*parts)


def _verdicts(title: str, lines: list[Line]) -> Table:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim", title=title, title_justify="left")
    for name, ratio in (("published", 4), ("paper", 2), ("ours", 4)):
        table.add_column(name, ratio=ratio, overflow="fold")
    table.add_column("verdict", min_width=10, overflow="fold")
    for number, line in enumerate(lines, start=1):
        verdict = Text(line.verdict.value, style=_STYLES[line.verdict])
        table.add_row(Text(f"{number}. {line.what}"), Text(line.published), Text(line.ours), verdict)
    return table


def _regions(title: str, swept: list[Region]) -> Table:
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim", title=title, title_justify="left")
    for name, ratio in (("published", 4), ("paper", 2), ("where it holds", 7)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for number, region in enumerate(swept, start=1):
        where = "; ".join(filter(None, (region.where, region.needed)))
        table.add_row(Text(f"{number}. {region.what}"), Text(region.published), Text(where))
    return table


def _reasons(lines: list[Line]) -> list[RenderableType]:
    """Why each line came out so, and what of the paper went into it; lines that share a sentence share its place."""
    whys, taken = [line.why for line in lines], [line.taken for line in lines]
    sentences = [f"{_numbers(why, whys)}: {why}" for why in dict.fromkeys(whys)]
    sentences += [f"Taken from the paper ({_numbers(what, taken)}): {what}." for what in dict.fromkeys(taken)]
    return [
        Constrain(Padding(Text(sentence, style="dim"), (0, 0, 0, 2), expand=False), WIDTH) for sentence in sentences
    ]


def _numbers(wanted: str, texts: list[str]) -> str:
    return ", ".join(str(number) for number, text in enumerate(texts, start=1) if text == wanted)
