"""Computation time against communication time for every probe: the paper's Fig. 5 as a picture of one run.

Source: Lagom (arXiv 2602.20656v1), section 3.3. Each arrow is one step of the search, drawn in the colour of the
collective whose configuration it changed; its slope is what that step cost the computation for what it gained the
communication. The ground and its contours are max(X, Y), the makespan of Eq. 1.

Departures: an arrow starts at the latest earlier probe that differs in the fewest collectives, because a search that
takes a step back does not go on from its last probe. Points are coloured by the measured makespan Z, which may lie
above max(X, Y) where a collective has to wait for a computation.
"""

from collections.abc import Iterator
from math import ceil, floor, log10

import plotly.graph_objects as go

from lagom_overlap.report.style import ACCENT, MAKESPAN_SCALE, NEUTRAL, colour_of, label, lay_out, log_axis, time_unit
from lagom_overlap.report.tune.probes import GroupHistory, ProbePoint
from lagom_overlap.report.tune.verdict_words import config_text, launch_lines
from lagom_overlap.results.tune import ENGINE_DEFAULT, TuneResult
from lagom_overlap.tuners.problem import Measurement
from lagom_overlap.tuners.verdict import DEFAULT_ARM, TUNED_ARM
from lagom_overlap.units import format_seconds

MAX_ARROWS = 200
"""Beyond that many probes the picture shows points only."""
LOG_ABOVE = 12.0
"""An axis whose largest value is that many times its smallest is logarithmic."""

MIN_PAD = 0.05
"""An axis reaches at least that share of its largest value beyond the points, lest noise look like a trend."""

MOST_COLOURED = 2.0
"""The colour scale ends at that many times the shortest makespan, so that those near the shortest can be told apart."""
_GROUND_STEPS = 40
"""Cells of a side of the coloured ground. Chosen: fine enough to look even, 1,600 numbers in the page."""
_SYMBOLS = {ENGINE_DEFAULT: "square-open", "fixed_min": "triangle-down-open", "fixed_max": "triangle-up-open"}
_Range = tuple[float, float]


def plane_figure(result: TuneResult, history: GroupHistory) -> go.Figure | None:
    """The figure of one group; None where nothing was measured."""
    marks = _marks(result, history)
    points = [measurement for _, measurement in history.measured] + [measurement for *_, measurement in marks]
    if not points:
        return None
    unit, name = time_unit(max(max(p.total_comm_s, p.comp_s) for p in points))
    xs, ys = [p.total_comm_s / unit for p in points], [p.comp_s / unit for p in points]
    x_log, y_log = _is_wide(xs), _is_wide(ys)
    x_range, y_range = _padded(xs, x_log), _padded(ys, y_log)
    figure = go.Figure()
    figure.add_trace(_valley(x_range, y_range, x_log or y_log))
    for trace in _contours(x_range, y_range, name):
        figure.add_trace(trace)
    if len(history.measured) <= MAX_ARROWS:
        for trace in _arrows(history, unit):
            figure.add_trace(trace)
    if history.measured:
        figure.add_trace(_points(history, unit))
    for trace in _mark_traces(marks, unit):
        figure.add_trace(trace)
    x_title, y_title = f"time of all collectives, X ({name})", f"computation, Y ({name})"
    lay_out(
        figure,
        520,
        margin={"l": 64, "r": 16, "t": 60, "b": 48},
        coloraxis=_colour_axis(points, unit, name),
        xaxis={"title": {"text": x_title}, "showgrid": False, **_axis(x_range, x_log)},
        yaxis={"title": {"text": y_title}, "showgrid": False, **_axis(y_range, y_log)},
    )
    _name_regions(figure, x_range, y_range)
    return figure


def _colour_axis(points: list[Measurement], unit: float, name: str) -> dict[str, object]:
    makespans = [point.makespan_s / unit for point in points]
    return {
        "colorscale": MAKESPAN_SCALE,
        "cmin": min(makespans),
        "cmax": min(max(makespans), MOST_COLOURED * min(makespans)),
        "colorbar": {"title": {"text": f"whole group,<br>Z ({name})"}, "thickness": 10, "len": 0.8, "outlinewidth": 0},
    }


def _valley(x_range: _Range, y_range: _Range, log: bool) -> go.Heatmap:
    """max(X, Y) as a pale ground under the points, on their colour scale."""
    xs, ys = (_steps(shown, log, _GROUND_STEPS) for shown in (x_range, y_range))
    return go.Heatmap(
        x=xs,
        y=ys,
        z=[[float(f"{max(x, y):.4g}") for x in xs] for y in ys],
        zsmooth=False if log else "best",
        coloraxis="coloraxis",
        opacity=0.16,
        hoverinfo="skip",
        showlegend=False,
    )


def _steps(shown: _Range, log: bool, num: int) -> list[float]:
    low, high = max(shown[0], 1e-9), shown[1]
    if log:
        return [low * (high / low) ** (index / (num - 1)) for index in range(num)]
    return [low + (high - low) * index / (num - 1) for index in range(num)]


def _marks(result: TuneResult, history: GroupHistory) -> list[tuple[str, str, str, Measurement]]:
    """The contenders to mark: legend text, symbol, colour, times."""
    marks = []
    for arm, measurement in history.arms.items():
        if arm not in (DEFAULT_ARM, TUNED_ARM):
            marks.append((label(result.words_for(arm), 28), _SYMBOLS.get(arm, "cross-open"), NEUTRAL, measurement))
    if history.default is not None:
        marks.append((label(result.words_for(DEFAULT_ARM), 28), "diamond-open", NEUTRAL, history.default))
    if history.best is not None:
        marks.append(("fastest probe", "circle-open", ACCENT, history.best[1]))
    if history.tuned is not None:
        marks.append(("tuned", "star-open", ACCENT, history.tuned))
    return marks


def _is_wide(values: list[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > LOG_ABOVE


def _padded(values: list[float], log: bool) -> _Range:
    low, high = min(values), max(values)
    if log:
        return low / 1.25, high * 1.25
    pad = max(0.12 * (high - low), MIN_PAD * high) or 1.0
    return max(0.0, low - pad), high + pad


def _axis(shown: _Range, log: bool) -> dict[str, object]:
    if log:
        return log_axis(*shown)
    return {"type": "linear", "range": list(shown)}


def _levels(low: float, high: float) -> list[float]:
    """About five round numbers between low and high."""
    if high <= low:
        return []
    raw = (high - low) / 5
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    return [index * step for index in range(ceil(low / step), floor(high / step) + 1)]


def _contours(x_range: _Range, y_range: _Range, name: str) -> Iterator[go.Scatter]:
    """Lines of equal max(X, Y), the line X = Y, and the levels' labels."""
    (x_low, x_high), (y_low, y_high) = x_range, y_range
    low, high = max(x_low, y_low), min(x_high, y_high)
    levels = sorted({*_levels(low, high), *_levels(max(low, high), max(x_high, y_high))})
    xs: list[float | None] = []
    ys: list[float | None] = []
    labels: list[tuple[float, float, str, str]] = []
    for level in levels:
        text = f"{level:g} {name}"
        if y_low < level < y_high:
            xs += [x_low, min(level, x_high), None]
            ys += [level, level, None]
            labels.append((x_low, level, text, "top right"))
        if x_low < level < x_high:
            xs += [level, level, None]
            ys += [y_low, min(level, y_high), None]
            # A label to the right of the last lines would be cut by the frame.
            if not y_low < level < y_high and level < x_low + 0.85 * (x_high - x_low):
                labels.append((level, y_low, text, "top right"))
    quiet = {"hoverinfo": "skip", "showlegend": False}
    yield go.Scatter(x=xs, y=ys, mode="lines", line={"color": NEUTRAL, "width": 0.8}, opacity=0.7, **quiet)
    if low < high:
        line = {"color": NEUTRAL, "width": 1.2, "dash": "dash"}
        yield go.Scatter(x=[low, high], y=[low, high], mode="lines", line=line, **quiet)
    if labels:
        yield go.Scatter(
            x=[x for x, *_ in labels],
            y=[y for _, y, *_ in labels],
            text=[text for *_, text, _ in labels],
            textposition=[place for *_, place in labels],
            mode="text",
            textfont={"size": 10, "color": NEUTRAL},
            **quiet,
        )


def _parents(measured: tuple[tuple[ProbePoint, Measurement], ...]) -> Iterator[tuple[int, int, int | None]]:
    """(from, to, collective that changed or None for several) for every probe that changed something."""
    for to in range(1, len(measured)):
        mine = measured[to][0].assignment

        def changed(index: int, mine: tuple[object, ...] = mine) -> list[int]:
            theirs = measured[index][0].assignment
            return [j for j, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b]

        differing = [(len(changed(index)) or len(mine) + 1, -index) for index in range(to)]
        _, nearest = min(differing)
        which = changed(-nearest)
        if which:
            yield -nearest, to, which[0] if len(which) == 1 else None


def _arrows(history: GroupHistory, unit: float) -> Iterator[go.Scatter]:
    measured = history.measured
    steps: dict[int | None, list[tuple[int, int]]] = {}
    for start, end, which in _parents(measured):
        steps.setdefault(which, []).append((start, end))
    for which in sorted(steps, key=lambda index: (index is None, index)):
        xs: list[float | None] = []
        ys: list[float | None] = []
        for start, end in steps[which]:
            xs += [measured[start][1].total_comm_s / unit, measured[end][1].total_comm_s / unit, None]
            ys += [measured[start][1].comp_s / unit, measured[end][1].comp_s / unit, None]
        colour = NEUTRAL if which is None else colour_of(which)
        yield go.Scatter(
            x=xs,
            y=ys,
            mode="lines+markers",
            name="several at once" if which is None else label(history.problem.group.comm_names[which], 24),
            line={
                "color": colour,
                "width": 1.6 if which is not None else 1,
                "dash": None if which is not None else "dot",
            },
            marker={"symbol": "arrow", "angleref": "previous", "size": [0, 9, 0] * len(steps[which]), "standoff": 5},
            opacity=0.85,
            hoverinfo="skip",
        )


def _points(history: GroupHistory, unit: float) -> go.Scatter:
    group = history.problem.group
    hover = []
    for probe, measurement in history.measured:
        configs = "<br>".join(
            f"{label(comm, 24)}: {config_text(config)}"
            for comm, config in zip(group.comm_names, probe.assignment, strict=True)
        )
        configs = "<br>".join((configs, *launch_lines(probe.assignment)))
        reason = f"<br><i>{label(probe.reason, 80)}</i>" if probe.reason else ""
        hover.append(
            f"<b>step {probe.number}</b>  Z {format_seconds(measurement.makespan_s)}<br>"
            f"X {format_seconds(measurement.total_comm_s)}, Y {format_seconds(measurement.comp_s)}<br>{configs}{reason}"
        )
    return go.Scatter(
        x=[m.total_comm_s / unit for _, m in history.measured],
        y=[m.comp_s / unit for _, m in history.measured],
        mode="markers",
        name="probe",
        showlegend=False,
        marker={
            "size": 9,
            "color": [m.makespan_s / unit for _, m in history.measured],
            "coloraxis": "coloraxis",
            "line": {"width": 1, "color": NEUTRAL},
        },
        hovertext=hover,
        hoverinfo="text",
    )


def _mark_traces(marks: list[tuple[str, str, str, Measurement]], unit: float) -> Iterator[go.Scatter]:
    for text, symbol, colour, measurement in marks:
        yield go.Scatter(
            x=[measurement.total_comm_s / unit],
            y=[measurement.comp_s / unit],
            mode="markers",
            name=text,
            marker={
                "symbol": symbol,
                "size": 17 if colour == ACCENT else 13,
                "color": colour,
                "line": {"width": 2},
            },
            hovertext=f"<b>{text}</b>  Z {format_seconds(measurement.makespan_s)}",
            hoverinfo="text",
        )


def _name_regions(figure: go.Figure, x_range: _Range, y_range: _Range) -> None:
    """Says which side of X = Y is which, where that side is in view."""
    quiet = {"xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 11, "color": NEUTRAL}}
    if x_range[1] > y_range[0]:
        figure.add_annotation(text="communication-bound", x=0.99, y=0.06, xanchor="right", yanchor="bottom", **quiet)
    if y_range[1] > x_range[0]:
        figure.add_annotation(text="computation-bound", x=0.1, y=0.98, xanchor="left", yanchor="top", **quiet)
