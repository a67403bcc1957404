"""The page of one plan: one HTML file that needs no network; its figures are inline SVG.

Names come from programs and job files: jinja2 escapes them.
"""

from dataclasses import dataclass
from importlib import resources
from typing import Final

import jinja2
from markupsafe import Markup

from lagom_overlap.report.plan_model import ExecutionJson
from lagom_overlap.report.plan_terminal import decision_text, decisions_headline, headline
from lagom_overlap.report.plan_view import PathPart, PlanView
from lagom_overlap.report.style import COMPUTE, colour_of
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.units import format_bytes, format_seconds

MAX_SPANS: Final = 6000
"""Spans of a timeline that are drawn; the page says so where there are more."""
MAX_DECISIONS: Final = 200
MAX_PATH_PARTS: Final = 60
WIDTH: Final = 1000.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle of a figure of `WIDTH` units."""

    x: float
    width: float
    row: int
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A timeline: its rows' names from the top, what is drawn, what was left out."""

    title: str
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    num_left_out: int


def timeline_figure(title: str, timeline: Timeline, longest_s: float, colours: dict[str, str]) -> Figure:
    """A timeline on an axis that is `longest_s` long; a row per stream, computations on top."""
    computing = {span.stream for span in timeline.of(SpanKind.COMP)}
    rows = sorted({span.stream for span in timeline.spans}, key=lambda stream: (stream not in computing, stream))
    place = {stream: row for row, stream in enumerate(rows)}
    bars = []
    for number, span in enumerate(timeline.spans[:MAX_SPANS]):
        colour = (
            COMPUTE[number % 2]
            if span.kind is SpanKind.COMP
            else colours.setdefault(span.stream, colour_of(len(colours)))
        )
        text = f"{span.name}: {format_seconds(span.duration_s)} from {format_seconds(span.start_s)}"
        width = max(0.1, WIDTH * span.duration_s / longest_s)
        bars.append(Bar(WIDTH * span.start_s / longest_s, width, place[span.stream], colour, text))
    left_out = max(0, len(timeline.spans) - MAX_SPANS)
    return Figure(f"{title}: {format_seconds(timeline.makespan_s)}", tuple(rows), tuple(bars), left_out)


def _path_bars(parts: tuple[PathPart, ...], colours: dict[str, str]) -> tuple[Bar, ...]:
    total = sum(part.seconds for part in parts) or 1.0
    bars, x = [], 0.0
    for number, part in enumerate(parts):
        width = WIDTH * part.seconds / total
        colour = (
            COMPUTE[number % 2]
            if part.kind is SpanKind.COMP
            else colours.setdefault(part.what, colour_of(len(colours)))
        )
        bars.append(Bar(x, width, 0, colour, f"{part.what}: {part.num_ops}, {format_seconds(part.seconds)}"))
        x += width
    return tuple(bars)


def _figures(view: PlanView) -> list[Figure]:
    figures: list[Figure] = []
    for source, timelines in (("predicted", view.timelines), ("measured, rank 0", view.measured)):
        longest_s = max((line.makespan_s for line in timelines.values()), default=0.0) or 1.0
        colours: dict[str, str] = {}
        figures += [timeline_figure(f"{name}, {source}", line, longest_s, colours) for name, line in timelines.items()]
    return figures


def render_plan(view: PlanView) -> str:
    """The whole page; the same plan gives the same page."""
    folder = resources.files(__package__) / "templates"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((folder / "plan.html.j2").read_text(encoding="utf-8"))
    result = view.result
    run = result.execution if isinstance(result.execution, ExecutionJson) else None
    return template.render(
        view=view,
        result=result,
        run=run,
        headline=headline(result),
        figures=_figures(view),
        path=_path_bars(view.critical, {}),
        path_parts=sorted(_path_sums(view.critical), key=lambda row: -row[2])[:MAX_PATH_PARTS],
        decisions=[(decision.comm, decision_text(decision)) for decision in result.decisions[:MAX_DECISIONS]],
        decisions_headline=decisions_headline(result.decisions),
        decisions_left=max(0, len(result.decisions) - MAX_DECISIONS),
        seconds=format_seconds,
        size=format_bytes,
        width=WIDTH,
        css=Markup((folder / "report.css").read_text(encoding="utf-8")),
    )


def _path_sums(parts: tuple[PathPart, ...]) -> list[tuple[str, int, float]]:
    """The critical path by sort of operator: name, operators, seconds."""
    sums: dict[str, tuple[int, float]] = {}
    for part in parts:
        number, seconds = sums.get(part.what, (0, 0.0))
        sums[part.what] = (number + part.num_ops, seconds + part.seconds)
    return [(what, number, seconds) for what, (number, seconds) in sums.items()]
