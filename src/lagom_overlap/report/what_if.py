"""Whether a change is worth it, for terminal and page: the answer first, then each change with setting and interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from lagom_overlap.report.fitted_table import Fitted, numbers_table
from lagom_overlap.sim.what_if import (
    LEAST,
    GainEstimate,
    WhatIf,
    best_first,
    errors_text,
    interval_text,
    whether,
)
from lagom_overlap.units import format_percent, format_seconds

MAX_SHOWN: Final = 6
"""Changes in the terminal; the page and --json have all."""
BAR_WIDTH: Final = 200.0
"""Units of an SVG's width, which the page scales."""
_LONGEST_LOSS: Final = 2.0
"""Of the longest gain: what the bars show of a loss, so that one bad change does not shrink all the others."""
_MORE: Final = (
    "To choose several settings together: lagom plan JOB.toml for those of FSDP2 and Megatron-LM, lagom tune JOB.toml "
    "for those of each collective."
)
_CLASSES: Final = {GainEstimate.GAIN: "better", GainEstimate.LOSS: "worse"}


def what_if_parts(answers: Sequence[WhatIf], *, has_job: bool = False) -> list[RenderableType]:
    """The sentence and the table; nothing where nothing was asked. `has_job`: there is a job file to set keys in."""
    if not answers:
        return []
    table = numbers_table("what if", "gain", "error range", "answer")
    for answer in answers[:MAX_SHOWN]:
        cells = (format_percent(answer.share, signed=True), interval_text(answer), answer.verdict.value)
        asked = Text(answer.change)
        if has_job and answer.setting:
            asked.append(f"\n{answer.setting}", style="dim")
        table.add_row(asked, *(Text(cell) for cell in cells))
    if len(answers) > MAX_SHOWN:
        table.add_row(Text(f"and {len(answers) - MAX_SHOWN} more, none better (--json)", style="dim"))
    parts: list[RenderableType] = [Text(whether(answers), style="bold")]
    if best_first(answers)[0].verdict is GainEstimate.GAIN:
        parts.append(Text(f"How: {best_first(answers)[0].apply}"))
    parts.append(Fitted(table))
    if has_job:
        parts.append(Text(_MORE, style="dim"))
    return [*parts, Text()]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRow:
    """One change as the page has it; `low`, `high` and `at` are places on a bar of `BAR_WIDTH` units.

    `is_cut`: it goes on to the left of the bar.
    """

    change: str
    apply: str
    time: str
    share: str
    interval: str
    verdict: str
    style: str
    low: float
    high: float
    at: float
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPart:
    """The page's section; `zero` is where neither gain nor loss lies on the bars, which share one axis."""

    sentence: str
    notes: tuple[str, ...]
    heads: tuple[str, ...]
    rows: tuple[WhatIfRow, ...]
    bar_width: float
    zero: float


def what_if_section(answers: Sequence[WhatIf], *, has_job: bool = False) -> WhatIfPart | None:
    """All answers for a page; None where nothing was asked. `has_job`: there is a job file to plan with."""
    if not answers:
        return None
    most = max(0.0, *(answer.high_s for answer in answers))
    least = min(0.0, *(answer.low_s for answer in answers))
    if most > 0.0:
        least = max(least, -_LONGEST_LOSS * most)
    scale = BAR_WIDTH / ((most - least) or 1.0)
    how_sure = (
        "Predicted, each change alone, on the same step by the same model; nothing was measured or changed. The "
        f"interval is the gain plus and minus what the model was found to miss: {errors_text(answers)}. Less than "
        f"{format_percent(LEAST)} of the step is no gain. Compare a few hundred steps with and without a change before "
        "you keep it; to undo it, take the setting away again."
    )
    return WhatIfPart(
        sentence=whether(answers),
        notes=(how_sure, _MORE) if has_job else (how_sure,),
        heads=("what if", "gain", "of the step", "by the model's error", "answer"),
        rows=tuple(_row(answer, least, scale) for answer in answers),
        bar_width=BAR_WIDTH,
        zero=-least * scale,
    )


def _row(answer: WhatIf, least_s: float, scale: float) -> WhatIfRow:
    low, at, high = (scale * (s - least_s) for s in (answer.low_s, answer.gain_s, answer.high_s))
    return WhatIfRow(
        change=answer.change,
        apply=answer.apply,
        time=f"{'-' if answer.gain_s < 0 else '+'}{format_seconds(abs(answer.gain_s))}",
        share=format_percent(answer.share, signed=True),
        interval=interval_text(answer),
        verdict=answer.verdict.value,
        style=_CLASSES.get(answer.verdict, "same"),
        low=max(0.0, low),
        high=max(0.0, high),
        at=at,
        is_cut=at < 0.0,
    )
