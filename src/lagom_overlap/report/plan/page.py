"""The page of one plan; its figures are inline SVG."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.report.bars import WIDTH, Bar, Tick, longest_spans, span_bar, time_ticks
from lagom_overlap.report.plan.path import PathPart, critical_path, exposed_by
from lagom_overlap.report.plan.words import (
    carrier_text,
    command_lines,
    decision_text,
    decisions_headline,
    headline,
    run_rows,
    solved_text,
)
from lagom_overlap.report.render import render
from lagom_overlap.report.style import COMPUTE, colour_of
from lagom_overlap.results.plan import PlanResult
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.units import format_memory, format_seconds

MAX_SPANS: Final = 2600
"""Spans that are drawn in all timelines of a page, 140 bytes each: the page is to be half a megabyte at most."""
MAX_DECISIONS: Final = 200
MAX_PATH_PARTS: Final = 60


@dataclass(frozen=True, slots=True)
class Figure:
    """A timeline: its rows' names from the top, what is drawn, what was left out."""

    title: str
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    num_left_out: int
    ticks: tuple[Tick, ...]
    key: tuple[tuple[str, str], ...]
    """(colour, name) of what is drawn."""


def timeline_figure(
    title: str,
    timeline: Timeline,
    longest_s: float,
    colours: dict[str, str],
    kinds: Mapping[str, str],
    *,
    max_spans: int = MAX_SPANS,
) -> Figure:
    """A timeline on an axis that is `longest_s` long; a row per stream, computations on top.

    A plan may put all of a link's collectives on one stream, so a row names the kinds that run on it.
    """
    computing = {span.stream for span in timeline.of(SpanKind.COMP)}
    rows = sorted({span.stream for span in timeline.spans}, key=lambda stream: (stream not in computing, stream))
    place = {stream: row for row, stream in enumerate(rows)}
    bars = []
    for number, span in enumerate(longest_spans(timeline.spans, max_spans)):
        colour = (
            COMPUTE[number % 2]
            if span.kind is SpanKind.COMP
            else colours.setdefault(kinds.get(span.name, span.stream), colour_of(len(colours)))
        )
        bars.append(span_bar(span, longest_s, place[span.stream], colour))
    left_out = max(0, len(timeline.spans) - max_spans)
    held: dict[str, set[str]] = {row: set() for row in rows}
    for span in timeline.of(SpanKind.COMM):
        held[span.stream].add(kinds.get(span.name, span.stream))
    names = tuple(", ".join(sorted(held[row])) if len(held[row]) > 1 else row for row in rows)
    key = ((COMPUTE[0], "computation"), *((colour, kind) for kind, colour in colours.items()))
    title = f"{title}: {format_seconds(timeline.makespan_s)}"
    return Figure(title, names, tuple(bars), left_out, time_ticks(longest_s), key)


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


def _figures(result: PlanResult) -> list[Figure]:
    figures: list[Figure] = []
    max_spans = MAX_SPANS // (len(result.step.timelines) + len(result.step.measured))
    kinds = {op.name: op.collective.kind.value for op in result.step.plan.iteration.comms}
    for source, timelines in (("predicted", result.step.timelines), ("measured, rank 0", result.step.measured)):
        longest_s = max((line.makespan_s for line in timelines.values()), default=0.0) or 1.0
        colours: dict[str, str] = {}
        figures += [
            timeline_figure(
                f"{name}, {source}",
                line if result.megatron is None else _by_stage(line),
                longest_s,
                colours,
                kinds,
                max_spans=max_spans,
            )
            for name, line in timelines.items()
        ]
    return figures


def _by_stage(timeline: Timeline) -> Timeline:
    """A whole iteration with a row per pipeline stage."""
    spans = (replace(span, stream=f"stage {span.rank}, {span.stream}") for span in timeline.spans)
    return Timeline(tuple(spans))


def render_plan(result: PlanResult) -> str:
    """The whole page; the same plan gives the same page."""
    iteration, after = result.step.plan.iteration, result.step.timelines["after"]
    is_whole = result.megatron is not None  # slots of all stages, which are no operators
    critical = () if is_whole else critical_path(iteration, after)
    return render(
        "plan.html.j2",
        result=result,
        run=result.execution,
        run_rows=() if result.execution is None else run_rows(result.execution),
        headline=headline(result),
        solved=solved_text(result),
        carrier=carrier_text(result),
        commands=command_lines(result),
        figures=_figures(result),
        exposed=() if is_whole else exposed_by(after, iteration),
        path=_path_bars(critical, {}),
        path_parts=sorted(_path_sums(critical), key=lambda row: -row[2])[:MAX_PATH_PARTS],
        decisions=[(decision.comm, decision_text(decision)) for decision in result.decisions[:MAX_DECISIONS]],
        decisions_headline=decisions_headline(result.decisions),
        decisions_left=max(0, len(result.decisions) - MAX_DECISIONS),
        seconds=format_seconds,
        size=format_memory,
        width=WIDTH,
    )


def _path_sums(parts: tuple[PathPart, ...]) -> list[tuple[str, int, float]]:
    """The critical path by sort of operator: name, operators, seconds."""
    sums: dict[str, tuple[int, float]] = {}
    for part in parts:
        number, seconds = sums.get(part.what, (0, 0.0))
        sums[part.what] = (number + part.num_ops, seconds + part.seconds)
    return [(what, number, seconds) for what, (number, seconds) in sums.items()]
