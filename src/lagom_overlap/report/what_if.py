"""Whether a change is worth it, for a terminal: the answer first, then each change with its setting and interval."""

from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted import WIDTH, Fitted
from lagom_overlap.sim.what_if import WhatIf, interval_text, percent_text, whether

MAX_SHOWN: Final = 6


def what_if_parts(answers: Sequence[WhatIf], *, has_job: bool = False) -> list[RenderableType]:
    """The sentence and the table; nothing where nothing was asked. `has_job`: there is a job file to set keys in."""
    if not answers:
        return []
    table = Table(box=None, width=WIDTH, pad_edge=False, header_style="dim")
    table.add_column("what if", ratio=1)
    for name in ("gain", "by the model's error", "answer"):
        table.add_column(name, justify="right", no_wrap=True)
    for answer in answers[:MAX_SHOWN]:
        cells = (percent_text(answer.share), interval_text(answer), answer.verdict.value)
        asked = Text(answer.change)
        if has_job and answer.setting:
            asked.append(f"\n{answer.setting}", style="dim")
        table.add_row(asked, *(Text(cell) for cell in cells))
    if len(answers) > MAX_SHOWN:
        table.add_row(Text(f"and {len(answers) - MAX_SHOWN} more, none better (--json)", style="dim"))
    return [Text(whether(answers), style="bold"), Fitted(table), Text()]
