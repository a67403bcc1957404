"""Ranked layouts: in words, in the terminal, as a page and as a figure of time against memory."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lagom_overlap.report.fitted_table import WIDTH, Fitted, to_type
from lagom_overlap.report.render import embedded, render
from lagom_overlap.report.style import ACCENT, NEUTRAL, label, lay_out, time_unit
from lagom_overlap.results.layouts import BEST_FILE, LayoutRow, LayoutsResult
from lagom_overlap.units import format_memory, format_percent, format_seconds

if TYPE_CHECKING:  # the terminal must not wait for plotly
    import plotly.graph_objects as go


_DEGREES: Final = {"tensor": "TP", "context": "CP", "pipeline": "PP", "expert": "EP", "data": "DP", "fsdp": "FSDP"}
_TOLD_OTHERWISE: Final = (
    *("framework", "chunks", "schedule", "sequence_parallel", "overlap_gradients", "overlap_parameters", "overlap_p2p"),
    *("whole_experts", "global_batch", "recompute_modules", "tables_as_layers", "pipeline_layout"),
)
"""Keys that follow from others in a ranking, or are told with them."""


def layout_text(keys: Mapping[str, Any], *, is_ranking: bool) -> str:
    """The keys of a row: of a ranking as people write layouts (TP8 PP4x5 DP2), of variants as they stand."""
    if not is_ranking:
        return ", ".join(f"{key} = {_value(value)}" for key, value in keys.items())
    degrees = [f"{name}{keys[key]}" for key, name in _DEGREES.items() if keys.get(key, 1) != 1]
    if "chunks" in keys:
        place = next(number for number, text in enumerate(degrees) if text.startswith("PP"))
        degrees[place] += f"x{keys['chunks']}"
    parts = [f"{keys.get('framework', '')} {' '.join(degrees) or 'one GPU'}".strip()]
    if keys.get("zero_stage"):
        parts.append(f"ZeRO-{keys['zero_stage']}")
    parts.append(f"micro-batch {keys.get('micro_batch', 1)}")
    if "recompute" in keys:
        modules = "+".join(keys.get("recompute_modules", ()))
        parts.append(f"recompute {modules or keys['recompute']}")
    known = {*_DEGREES, *_TOLD_OTHERWISE, "zero_stage", "micro_batch", "recompute"}
    parts += [f"{key} = {_value(value)}" for key, value in keys.items() if key not in known]
    return ", ".join(parts)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def headline(result: LayoutsResult) -> str:
    """The fastest, in one sentence."""
    row = result.rows[0]
    return f"{layout_text(row.keys, is_ranking=result.is_ranking)}: {row_text(row)}"


def row_text(row: LayoutRow) -> str:
    """What a row's job takes."""
    return (
        f"{format_seconds(row.iteration_s)} per iteration, {row.tokens_per_s:,.0f} tokens/s, "
        f"MFU {100 * row.mfu:.1f} %, {format_memory(row.memory_bytes)} per GPU"
    )


def size_text(result: LayoutsResult) -> str:
    """Model, GPUs and what was looked at."""
    what = "layouts" if result.is_ranking else "variants"
    gpus = f"{result.num_gpus} GPU{'s' if result.num_gpus > 1 else ''}"
    gpus = gpus if len({row.num_gpus for row in result.rows}) == 1 else "several numbers of GPUs"
    work = f", {result.global_batch} sequences of {result.seq_len} tokens" if result.same_work else ""
    return (
        f"{result.model} on {gpus} ({result.cluster}){work}: {result.num_layouts} {what}, {len(result.rows)} simulated"
    )


def order_text(result: LayoutsResult) -> str:
    """What the order is, where seconds per iteration do not say; "" where they do."""
    if result.same_work:
        return ""
    return "The variants train different numbers of tokens per iteration: the order is by tokens per second."


def certainty(result: LayoutsResult) -> str:
    """Which of the rows are the fastest of all; "" where all were simulated."""
    if result.interrupted:
        return "Interrupted: these were simulated by then, and faster ones may be missing."
    if result.num_certain and result.num_certain < len(result.rows):
        first = "one" if result.num_certain == 1 else result.num_certain
        return f"No layout that was not simulated can be faster than the first {first}: its computation takes longer."
    return ""


def next_line(result: LayoutsResult) -> str:
    """What to type next."""
    files = {path.name: path for path in result.files}
    return f"lagom simulate {shlex.quote(str(files[BEST_FILE]))}" if BEST_FILE in files else ""


def summary(result: LayoutsResult) -> str:
    """The fastest layout, what was looked at, and the caveats."""
    lines = (
        f"{result.job}: {headline(result)}",
        f"{size_text(result)}.",
        order_text(result),
        certainty(result),
        *result.notes,
    )
    return "\n".join(filter(None, lines))


MAX_ROWS: Final = 10
"""Rows of a ranking in the table, and the frontier's behind them; all are in the page and in --json."""
MAX_VARIANTS: Final = 40
"""Rows of the table where variants were asked for; all are in the page and in --json."""
_MAX_FRONTIER: Final = 5
"""Further rows that are as fast as anything of their memory."""
_MAX_REFUSED: Final = 5
"""Refusals that are said one by one; the others are counted."""


def layouts_summary(result: LayoutsResult) -> Group:
    """The fastest, the table, what was refused, notes, and the next line."""
    parts: list[RenderableType] = [Text(size_text(result), style="dim"), Text(headline(result), style="bold"), Text()]
    parts.append(_table(result))
    before = len(parts)
    parts += [Text(words) for words in (order_text(result), certainty(result)) if words]
    for one in result.refused[:_MAX_REFUSED]:
        parts.append(Text(f"Not simulated: {layout_text(one.keys, is_ranking=False)}: {one.why}"))
    if len(result.refused) > _MAX_REFUSED:
        parts.append(Text(f"and {len(result.refused) - _MAX_REFUSED} more, all in run.json"))
    parts += [Text(note, style="dim") for note in result.notes]
    if len(parts) > before:
        parts.insert(before, Text())
    if report := next((path for path in result.files if path.name == "report.html"), None):
        parts += [Text(), to_type(f"Report: {report}")]
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
    last = 0
    for number, row in shown:
        if number > last + 1:
            table.add_row("", Text(f"{number - last - 1} in between: slower, and no smaller", style="dim"))
        last = number
        cells = [Text(f"{number}{'*' if row.is_on_frontier else ' '}"), Text(layout_text(row.keys, is_ranking=ranking))]
        cells += [Text(str(row.num_gpus))] if several else []
        cells += [Text(format_seconds(row.iteration_s)), Text(f"{row.tokens_per_s_per_gpu:,.0f}")]
        cells.append(Text(format_memory(row.memory_bytes)))
        table.add_row(*cells, Text(f"{100 * row.mfu:.1f} %"), Text(f"{100 * row.exposed_share:.1f} %"))
    table.caption = "* nothing simulated needs less memory and is as fast"
    table.caption_justify = "left"
    return Fitted(table)


MAX_PAGE_ROWS: Final = 200
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
            for number, row in enumerate(result.rows[:MAX_PAGE_ROWS], start=1)
        ],
        refused=[(layout_text(one.keys, is_ranking=False), one.why) for one in result.refused[:MAX_PAGE_ROWS]],
    )


_HEIGHT_PX = 420
"""Chosen by eye."""


def figure(result: LayoutsResult) -> "go.Figure":
    """A point per layout; those that are as fast as anything of their memory are joined by a line."""
    import plotly.graph_objects as go  # noqa: PLC0415 - the terminal must not wait for it

    unit, unit_name = time_unit(max(row.iteration_s for row in result.rows))
    drawn = go.Figure()
    for on_frontier, colour, mode in ((False, NEUTRAL, "markers"), (True, ACCENT, "lines+markers")):
        # In the order of memory, which is the line's.
        rows = [
            row for row in sorted(result.rows, key=lambda row: row.memory_bytes) if row.is_on_frontier is on_frontier
        ]
        drawn.add_scatter(
            x=[row.memory_bytes / 1e9 for row in rows],
            y=[row.iteration_s / unit if result.same_work else row.tokens_per_s_per_gpu for row in rows],
            mode=mode,
            marker={"color": colour, "size": 9 if on_frontier else 6},
            name="frontier" if on_frontier else "others",
            hovertext=[label(layout_text(row.keys, is_ranking=result.is_ranking), 120) for row in rows],
        )
    drawn.update_xaxes(title_text="memory of the fullest GPU (GB)")
    drawn.update_yaxes(title_text=f"one iteration ({unit_name})" if result.same_work else "tokens/s per GPU")
    return lay_out(drawn, _HEIGHT_PX)
