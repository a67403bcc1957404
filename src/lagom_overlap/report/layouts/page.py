"""The page of ranked layouts."""

from typing import Final

from lagom_overlap.report.layouts.figures import figure
from lagom_overlap.report.layouts.words import certainty, headline, layout_text, next_line, order_text, size_text
from lagom_overlap.report.render import embedded, render
from lagom_overlap.results.layouts import LayoutsResult
from lagom_overlap.units import format_memory, format_percent, format_seconds

MAX_ROWS: Final = 200
"""Rows of the page's table; run.json has all."""
_CAPTION: Final = (
    "One point per simulated layout: its speed, and the memory of its fullest GPU. Blue: nothing simulated needs "
    "less memory and is as fast. Names are shown under the pointer."
)


def render_layouts(result: LayoutsResult) -> str:
    """The whole page; the same result gives the same page."""
    return render(
        "layouts.html.j2",
        result=result,
        headline=headline(result),
        size=size_text(result),
        certainty=" ".join(filter(None, (order_text(result), certainty(result)))),
        next_line=next_line(result),
        figure=embedded(figure(result), _CAPTION),
        rows=[
            (
                f"{number}. {layout_text(row.keys, is_ranking=result.is_ranking)}",
                row.num_gpus,
                format_seconds(row.iteration_s),
                f"{row.tokens_per_s_per_gpu:,.0f}",
                format_memory(row.memory_bytes),
                format_percent(row.mfu),
                format_percent(row.exposed_share),
            )
            for number, row in enumerate(result.rows[:MAX_ROWS], start=1)
        ],
        refused=[(layout_text(one.keys, is_ranking=False), one.why) for one in result.refused[:MAX_ROWS]],
    )
