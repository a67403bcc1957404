"""A simulated iteration, as its terminal, its page and its figure show it; the page's figures are inline SVG.

A stage is drawn as parts that add up to its time: one colour and one word each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from lagom_overlap.report.bars import BARS_WIDTH, Bar, longest_spans, span_bar, time_ticks
from lagom_overlap.report.fitted_table import Fitted, numbers_table
from lagom_overlap.report.render import render
from lagom_overlap.report.style import BAD, COMPUTE, colour_of
from lagom_overlap.report.what_if import what_if_parts, what_if_section
from lagom_overlap.results.simulate import SimulatedStage, SimulateResult
from lagom_overlap.sim.what_if import whether
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.units import format_memory, format_seconds

if TYPE_CHECKING:  # the terminal must not wait for plotly
    import plotly.graph_objects as go


_COLOURS: Final = {"compute": COMPUTE[0], "launch gaps": "#8C6BB1", "bubble": "#C9CED6", "optimizer": "#7A5C3E"}
"""Only one is a dark grey and only one a light grey, so that all are told apart; from `style.PALETTE`."""


@dataclass(frozen=True, slots=True)
class IterationShare:
    """A share of a stage's iteration."""

    name: str
    seconds: float
    colour: str


def stage_parts(stage: SimulatedStage, iteration_s: float, communicators: Sequence[str]) -> tuple[IterationShare, ...]:
    """The parts of one stage, in the order in which they are drawn; what is empty is left out.

    `communicators` are those of all stages. One counts what of it is exposed; what it stretches computation by is
    `stretched`. What is left at the end is waiting for a stage that ends later.
    """
    sizes = [("compute", stage.compute_s), ("launch gaps", stage.launch_s)]
    sizes += [(f"{name} exposed", comm.exposed_s) for name, comm in stage.communicators.items()]
    sizes += [("stretched", sum(comm.stretched_s for comm in stage.communicators.values()))]
    sizes += [("bubble", stage.bubble_s), ("optimizer", stage.optimizer_s)]
    rest = iteration_s - sum(seconds for _, seconds in sizes)
    sizes += [("waits at the end", rest)]
    shown = [(name, seconds) for name, seconds in sizes if seconds > 1e-9 * iteration_s]
    return tuple(IterationShare(name, seconds, _colour(name, communicators)) for name, seconds in shown)


def _colour(name: str, communicators: Sequence[str]) -> str:
    """Of a communicator, by its place among the job's, so that every stage and the legend agree."""
    if name == "stretched":
        return BAD
    if name.endswith(" exposed"):
        return colour_of(communicators.index(name.removesuffix(" exposed")) + 1)
    return _COLOURS.get(name, "#EFE3C2")


def summary(result: SimulateResult) -> str:
    """The iteration, what it runs on, whether a change would pay, and the caveats."""
    lines = (f"{result.job}: {headline(result)}", f"{size_text(result)}.", whether(result.what_ifs), *result.notes)
    return "\n".join(filter(None, lines))


def size_text(result: SimulateResult) -> str:
    """Model, GPUs and micro-batches."""
    batches = "1 micro-batch" if result.num_micro_batches == 1 else f"{result.num_micro_batches} micro-batches"
    return f"{result.model} on {result.num_gpus} GPUs ({result.cluster}), {batches}"


def headline(result: SimulateResult) -> str:
    """The iteration in one sentence."""
    memory = f"{format_memory(result.memory_bytes)} of {format_memory(result.memory_limit_bytes)}"
    return (
        f"{format_seconds(result.iteration_s)} per iteration, {result.tokens_per_s:,.0f} tokens/s, "
        f"MFU {100 * result.mfu:.1f} %, {memory} per GPU"
    )


MAX_STAGES = 8
"""Stages in the table; the others are in the page and in --json."""


def simulation_summary(result: SimulateResult) -> Group:
    """Headline, communicators of the stage that ends last, stages, what changes would do, notes."""
    parts: list[RenderableType] = [Text(size_text(result), style="dim"), Text(headline(result), style="bold"), Text()]
    if result.communicators:
        parts += [_communicators(result), Text()]
    parts += [_stages(result), Text(), *what_if_parts(result.what_ifs, has_job=True)]
    parts += [Text(note, style="dim") for note in result.notes]
    return Group(*parts)


def _communicators(result: SimulateResult) -> Fitted:
    table = numbers_table("communicator", "running", "exposed", "stretches compute by")
    for name, comm in result.communicators.items():
        times = (comm.total_s, comm.exposed_s, comm.stretched_s)
        table.add_row(Text(name), *(Text(format_seconds(seconds)) for seconds in times))
    return Fitted(table)


def _shown(stages: tuple[SimulatedStage, ...]) -> tuple[SimulatedStage, ...]:
    """The first stages and the last one."""
    return stages if len(stages) <= MAX_STAGES else (*stages[: MAX_STAGES - 1], stages[-1])


def _stages(result: SimulateResult) -> Fitted:
    table = numbers_table("stage", "compute", "launch", "bubble", "gradients", "optimizer", "memory")
    for stage in _shown(result.stages):
        times = (stage.compute_s, stage.launch_s, stage.bubble_s, stage.gradients_s, stage.optimizer_s)
        cells = [format_seconds(seconds) for seconds in times]
        table.add_row(str(stage.stage), *cells, format_memory(stage.memory.total_bytes))
    if len(result.stages) > MAX_STAGES:
        table.caption = f"{len(result.stages) - MAX_STAGES} stages between are left out here"
    return Fitted(table)


MAX_SPANS: Final = 2400
"""Spans of the timeline that are drawn, 140 bytes each: the page is to be half a megabyte at most."""


def _stage_bars(result: SimulateResult) -> tuple[list[Bar], list[IterationShare]]:
    """One stacked bar per stage, and every kind of part once for the legend."""
    bars, legend = [], dict[str, IterationShare]()
    communicators = sorted({name for stage in result.stages for name in stage.communicators})
    for row, stage in enumerate(result.stages):
        x = 0.0
        for part in stage_parts(stage, result.iteration_s, communicators):
            width = BARS_WIDTH * part.seconds / result.iteration_s
            title = f"stage {stage.stage}: {part.name} {format_seconds(part.seconds)}"
            bars.append(Bar(x, width, row, part.colour, title))
            legend.setdefault(part.name, part)
            x += width
    return bars, list(legend.values())


def _timeline_bars(timeline: Timeline, iteration_s: float) -> list[Bar]:
    bars = []
    for span in longest_spans(timeline.spans, MAX_SPANS):
        colour = colour_of(2) if span.kind is SpanKind.COMM else COMPUTE[0]
        if span.name.startswith("B"):
            colour = colour_of(1)
        bars.append(span_bar(span, iteration_s, span.rank, colour))
    return bars


def render_simulation(result: SimulateResult) -> str:
    """The whole page; the same result gives the same page."""
    bars, legend = _stage_bars(result)
    return render(
        "simulate.html.j2",
        result=result,
        headline=headline(result),
        size=size_text(result),
        bars=bars,
        legend=[(part.colour, part.name) for part in legend],
        ticks=time_ticks(result.iteration_s),
        slots=[(COMPUTE[0], "forward"), (colour_of(1), "backward"), (colour_of(2), "gradients")],
        what_if_part=what_if_section(result.what_ifs, has_job=True),
        spans=_timeline_bars(result.timeline, result.iteration_s),
        num_left_out=max(0, len(result.timeline.spans) - MAX_SPANS),
        seconds=format_seconds,
        memory=format_memory,
        width=BARS_WIDTH,
    )


def figure(result: SimulateResult) -> "go.Figure":
    """What ran when on which stream."""
    from lagom_overlap.report.timeline_figure import streams_figure  # noqa: PLC0415 - the terminal must not wait for plotly

    return streams_figure({result.job: result.timeline})
