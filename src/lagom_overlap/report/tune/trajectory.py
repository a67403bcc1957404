"""The search measurement by measurement: makespan, the best so far, the knobs that moved, and H where there is one."""

from collections.abc import Callable
from itertools import accumulate
from math import log2

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lagom_overlap.collective import CommConfig
from lagom_overlap.report.style import (
    ACCENT,
    BAD,
    NEUTRAL,
    axis_of,
    colour_of,
    dash_of,
    label,
    lay_out,
    log_axis,
    time_unit,
)
from lagom_overlap.report.tune.probes import GroupHistory, ProbePoint
from lagom_overlap.report.tune.verdict_words import KNOB_WORDS, config_text, knob_text, launch_lines
from lagom_overlap.results.tune import TuneResult
from lagom_overlap.tuners.verdict import DEFAULT_ARM
from lagom_overlap.units import format_seconds

LOG_ABOVE = 4.0
"""Makespans whose largest is that many times the smallest are shown on a logarithmic axis."""

_TOP_PX, _ROW_PX, _FRAME_PX = 240, 120, 110
"""Pixels of the times, of a knob below them, and of the frame. Chosen by eye."""


def trajectory_figure(result: TuneResult, history: GroupHistory) -> go.Figure | None:
    """The figure of one group; None where it was never measured in the search."""
    if not history.probes:
        return None
    knobs = _moving_knobs(history)
    has_h = any(value is not None for probe in history.probes for value in probe.priority)
    rows = 1 + len(knobs) + has_h
    heights = [_TOP_PX] + [_ROW_PX] * (rows - 1)
    figure = make_subplots(
        rows=rows, cols=1, shared_xaxes=True, row_heights=heights, vertical_spacing=min(0.05, 0.5 / rows)
    )
    _add_makespan(figure, result, history)
    for row, knob in enumerate(knobs, start=2):
        _add_knob(figure, history, knob, row)
    if has_h:
        _add_priority(figure, history, rows)
    _name_collectives(figure, history, rows > 1)
    numbers = [probe.number for probe in history.probes]
    return lay_out(
        figure,
        sum(heights) + _FRAME_PX,
        xaxes={"range": [min(numbers) - 0.7, max(numbers) + 0.7]},
        margin={"l": 64, "r": 16, "t": 60, "b": 48},
        **{axis_of("x", rows): {"title": {"text": "step of the run"}}},
    )


def _moving_knobs(history: GroupHistory) -> list[str]:
    return [
        knob
        for knob in KNOB_WORDS
        if len({getattr(config, knob) for probe in history.probes for config in probe.assignment} - {None}) > 1
    ]


def _add_makespan(figure: go.Figure, result: TuneResult, history: GroupHistory) -> None:
    measured = history.measured
    times = [m.makespan_s for _, m in measured]
    default = history.default.makespan_s if history.default else None
    unit, name = time_unit(max([*times, default or 0.0]))
    numbers = [probe.number for probe, _ in measured]
    figure.add_scatter(
        x=numbers,
        y=[time / unit for time in times],
        mode="markers",
        name="measured",
        marker={"color": NEUTRAL, "size": 7},
        hovertext=[_hover(history, probe, format_seconds(m.makespan_s)) for probe, m in measured],
        hoverinfo="text",
        row=1,
        col=1,
    )
    figure.add_scatter(
        x=numbers,
        y=[time / unit for time in accumulate(times, min)],
        mode="lines",
        name="best so far",
        line={"color": ACCENT, "width": 2.5, "shape": "hv"},
        hoverinfo="skip",
        row=1,
        col=1,
    )
    if default is not None:
        ends = [history.probes[0].number - 0.7, history.probes[-1].number + 0.7]
        figure.add_scatter(
            x=ends,
            y=[default / unit] * 2,
            mode="lines",
            name=label(result.words_for(DEFAULT_ARM)),
            line={"color": NEUTRAL, "width": 1.5, "dash": "dash"},
            hovertext=f"{label(result.words_for(DEFAULT_ARM))}: {format_seconds(default)}",
            hoverinfo="text",
            row=1,
            col=1,
        )
    failed = [probe for probe in history.probes if probe.measurement is None]
    if failed:
        top = max([*times, default or 0.0]) / unit or 1.0
        figure.add_scatter(
            x=[probe.number for probe in failed],
            y=[top] * len(failed),
            mode="markers",
            name="could not run",
            marker={"symbol": "x", "color": BAD, "size": 9},
            hovertext=[_hover(history, probe, label(getattr(probe.outcome, "reason", ""), 80)) for probe in failed],
            hoverinfo="text",
            row=1,
            col=1,
        )
    shown = [time for time in [*times, default] if time]
    wide = bool(shown) and max(shown) / min(shown) > LOG_ABOVE
    scale = log_axis(min(shown) / unit / 1.1, max(shown) / unit * 1.1) if wide else {}
    figure.update_yaxes(title_text=f"makespan ({name})", **scale, row=1, col=1)


def _hover(history: GroupHistory, probe: ProbePoint, result: str) -> str:
    lines = [f"<b>step {probe.number}</b>  {result}"]
    names = history.problem.group.comm_names
    lines += [f"{label(n, 24)}: {config_text(c)}" for n, c in zip(names, probe.assignment, strict=True)]
    lines += launch_lines(probe.assignment)
    if probe.reason:
        lines.append(f"<i>{label(probe.reason, 80)}</i>")
    return "<br>".join(lines)


def _scale(history: GroupHistory, knob: str) -> tuple[Callable[[object], float], dict[float, str]]:
    """Where a knob's value sits on its axis (numbers by their logarithm, words by their place), and the ticks."""
    seen = {getattr(config, knob): config for probe in history.probes for config in probe.assignment}
    seen.pop(None, None)
    numeric = all(isinstance(value, int) for value in seen)
    order = sorted(seen, key=lambda value: value if isinstance(value, int) else str(value))
    places = {value: log2(value) if numeric else float(index) for index, value in enumerate(order)}
    ticks: dict[float, str] = {}
    gap = (max(places.values()) - min(places.values())) / 7
    for value, place in places.items():
        if not ticks or place - max(ticks) >= gap:
            ticks[place] = knob_text(seen[value], knob)
    return places.__getitem__, ticks


def _add_knob(figure: go.Figure, history: GroupHistory, knob: str, row: int) -> None:
    place, ticks = _scale(history, knob)
    num_comms = len(history.problem.group.comms)
    nudge = (max(ticks) - min(ticks)) * 0.025

    def level(config: CommConfig, index: int) -> float | None:
        value = getattr(config, knob)
        return None if value is None else place(value) + nudge * (index - (num_comms - 1) / 2)

    for index, name in enumerate(history.problem.group.comm_names):
        figure.add_scatter(
            x=[probe.number for probe in history.probes],
            y=[level(probe.assignment[index], index) for probe in history.probes],
            mode="lines+markers",
            line={"color": colour_of(index), "dash": dash_of(index), "width": 1.6, "shape": "hv"},
            marker={"size": 4},
            showlegend=False,
            hovertext=[
                f"step {probe.number}, {label(name, 24)}: {knob_text(probe.assignment[index], knob)}"
                for probe in history.probes
            ],
            hoverinfo="text",
            row=row,
            col=1,
        )
    figure.update_yaxes(
        title_text=KNOB_WORDS[knob],
        tickmode="array",
        tickvals=list(ticks),
        ticktext=[label(text, 14) for text in ticks.values()],
        row=row,
        col=1,
    )


def _add_priority(figure: go.Figure, history: GroupHistory, row: int) -> None:
    for index, name in enumerate(history.problem.group.comm_names):
        values = [probe.priority[index] for probe in history.probes]
        figure.add_scatter(
            x=[probe.number for probe in history.probes],
            y=values,
            mode="lines+markers",
            line={"color": colour_of(index), "dash": dash_of(index), "width": 1.6},
            marker={"size": 4},
            showlegend=False,
            hovertext=[
                "" if value is None else f"step {probe.number}, {label(name, 24)}: H {value:.3g}"
                for probe, value in zip(history.probes, values, strict=True)
            ],
            hoverinfo="text",
            row=row,
            col=1,
        )
    figure.update_yaxes(title_text="H", row=row, col=1)


def _name_collectives(figure: go.Figure, history: GroupHistory, has_rows: bool) -> None:
    """One legend entry per collective, for the rows below the first."""
    if not has_rows:
        return
    for index, name in enumerate(history.problem.group.comm_names):
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="lines",
            name=label(name, 24),
            line={"color": colour_of(index), "dash": dash_of(index), "width": 2},
            row=1,
            col=1,
        )
