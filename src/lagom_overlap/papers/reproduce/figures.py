"""The figures of a reproduction: the paper's, as far as its text gives them, with ours."""

from collections.abc import Sequence
from typing import Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lagom_overlap.papers.reproduce.result import Case, Curve, Line, ReproducedSurface, ReproducedVerdict, SpeedupBar
from lagom_overlap.report.style import (
    ACCENT,
    BAD,
    COMPUTE,
    GOOD,
    NEUTRAL,
    PALETTE,
    colour_of,
    label,
    lay_out,
    log_axis,
)
from lagom_overlap.units import format_bytes

VERDICT_COLOURS: Final = {
    ReproducedVerdict.REPRODUCED: GOOD,
    ReproducedVerdict.DIRECTION: PALETTE[2],
    ReproducedVerdict.BUILT_IN: NEUTRAL,
    ReproducedVerdict.NOT: BAD,
}
PUBLISHED_GAINS: Final = {"fsdp": (1.10, 1.33), "tp": (1.08, 1.16), "ep": (1.07, 1.08)}
"""Lagom over NCCL by strategy (section 4.2)."""
OVER_TITLES: Final = {"y": 1.1}
"""Where a legend stands that leaves room for the titles of panels."""
CLUSTERS: Final = {"a40_nvlink": "A", "a40_pcie": "B"}


def verdicts_figure(lines: Sequence[Line]) -> go.Figure:
    """How many lines of each chapter got which verdict."""
    chapters = list(dict.fromkeys(line.figure for line in lines))
    figure = go.Figure()
    for verdict, colour in VERDICT_COLOURS.items():
        counts = [sum(li.figure == chapter and li.verdict is verdict for li in lines) for chapter in chapters]
        figure.add_bar(
            name=verdict.value,
            orientation="h",
            y=chapters,
            x=counts,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate="%{y}: %{x} " + verdict.value + "<extra></extra>",
        )
    axis = {"title": {"text": "lines, both profiles"}}
    rows = {"autorange": "reversed", "type": "category"}
    lay_out(figure, 130 + 28 * len(chapters), barmode="stack", bargap=0.3, xaxis=axis, yaxis=rows)
    return figure.update_layout(legend={"traceorder": "normal"})


def surface_figure(surfaces: Sequence[ReproducedSurface]) -> go.Figure:
    """Fig. 3a: slowdown of the computation by channels and chunk, one panel per profile on one scale."""
    figure = make_subplots(cols=len(surfaces), rows=1, subplot_titles=[s.profile for s in surfaces], shared_yaxes=True)
    top = max(value for surface in surfaces for row in surface.values for value in row)
    for place, surface in enumerate(surfaces, start=1):
        figure.add_trace(
            go.Heatmap(
                x=[str(n) for n in surface.channels],
                y=[format_bytes(size) for size in surface.chunks_bytes],
                z=surface.values,
                zmin=1.0,
                zmax=top,
                colorscale="Viridis",
                showscale=place == len(surfaces),
                colorbar={"title": {"text": "Y / alone"}, "thickness": 12},
                text=[[f"{value:.2f}" for value in row] for row in surface.values],
                texttemplate="%{text}",
                hovertemplate="NC %{x}, C %{y}: %{z:.3f}<extra></extra>",
            ),
            row=1,
            col=place,
        )
    lay_out(figure, 380)
    figure.update_xaxes(title_text="channels (NC)", type="category")
    figure.update_yaxes(title_text="slice (C)", type="category", col=1)
    return figure


def sweep_figure(curves: Sequence[Curve], kind: str, axis: str) -> go.Figure:
    """Fig. 3b or 3c: communication (left axis) and computation (right axis) along one knob, one panel per profile."""
    mine = [curve for curve in curves if curve.kind == kind]
    profiles = list(dict.fromkeys(curve.profile for curve in mine))
    figure = make_subplots(
        cols=len(profiles), rows=1, subplot_titles=profiles, specs=[[{"secondary_y": True}] * len(profiles)]
    )
    for curve in mine:
        place, second = profiles.index(curve.profile) + 1, curve.name.startswith("computation")
        figure.add_trace(
            go.Scatter(
                x=curve.x,
                y=curve.y,
                name=curve.name,
                legendgroup=curve.name,
                showlegend=place == 1,
                mode="lines+markers",
                line={"color": COMPUTE[0] if second else BAD, "width": 2, "dash": "dot" if second else "solid"},
                hovertemplate=f"%{{x:g}}: %{{y:.3f}}<extra>{label(curve.name)}</extra>",
            ),
            row=1,
            col=place,
            secondary_y=second,
        )
    lay_out(figure, 340)
    everywhere = [x for curve in mine for x in curve.x]
    ends = min(everywhere) / 1.15, max(everywhere) * 1.15
    figure.update_xaxes(title_text=axis, **log_axis(*ends))
    tops = [max(y for c in mine for y in c.y if c.name.startswith(what)) for what in ("communication", "computation")]
    figure.update_yaxes(range=[0, 1.08 * tops[0]], secondary_y=False)
    figure.update_yaxes(range=[1, 1.02 * tops[1]], tickformat=".2f", secondary_y=True, showgrid=False)
    # Titles at the outer edges only: between two panels they would lie on each other.
    figure.update_yaxes(title_text="communication (ms)", secondary_y=False, col=1)
    figure.update_yaxes(title_text="computation / alone", secondary_y=True, col=len(profiles))
    return figure.update_layout(legend=OVER_TITLES)


def trade_figure(curves: Sequence[Curve]) -> go.Figure:
    """Fig. 5: what tuning one of two collectives does to both streams."""
    mine = [curve for curve in curves if curve.kind == "5"]
    profiles = list(dict.fromkeys(curve.profile for curve in mine))
    figure = make_subplots(cols=len(profiles), rows=1, subplot_titles=profiles, shared_yaxes=True)
    for place, curve in enumerate(mine):
        col = profiles.index(curve.profile) + 1
        figure.add_trace(
            go.Scatter(
                x=curve.x,
                y=curve.y,
                name=curve.name,
                legendgroup=curve.name,
                showlegend=col == 1,
                mode="lines+markers",
                line={"color": colour_of(place % 2), "width": 2},
                marker={"symbol": ["circle", "arrow"], "size": [8, 14], "angleref": "previous"},
                hovertemplate="X %{x:.2f} ms, Y %{y:.2f} ms<extra></extra>",
            ),
            row=1,
            col=col,
        )
    lay_out(figure, 330)
    figure.update_xaxes(title_text="communication X (ms)")
    figure.update_yaxes(title_text="computation Y (ms)", col=1)
    return figure.update_layout(legend=OVER_TITLES)


def gains_figure(cases: Sequence[Case], profile: str) -> go.Figure:
    """Fig. 7: speedups over NCCL's default of every workload and cluster; bands are the paper's ranges for Lagom."""
    mine = [case for case in cases if case.profile == profile]
    names = [f"{CLUSTERS.get(case.cluster, case.cluster)}: {case.workload}" for case in mine]
    figure = go.Figure()
    for low_high, what in ((PUBLISHED_GAINS, "paper, Lagom: range"),):
        figure.add_bar(
            name=what,
            orientation="h",
            y=names,
            x=[low_high[case.strategy][1] - low_high[case.strategy][0] for case in mine],
            base=[low_high[case.strategy][0] for case in mine],
            marker={"color": ACCENT, "opacity": 0.22, "line": {"width": 0}},
            hovertemplate="%{y}: the paper's range<extra></extra>",
        )
    for what, symbol, colour, values in (
        ("AutoCCL", "x", BAD, [case.autoccl for case in mine]),
        ("Lagom", "circle", ACCENT, [case.lagom for case in mine]),
        ("best found", "circle-open", GOOD, [case.best for case in mine]),
    ):
        figure.add_scatter(
            name=what,
            x=values,
            y=names,
            mode="markers",
            marker={"symbol": symbol, "size": 9, "color": colour, "line": {"width": 2, "color": colour}},
            hovertemplate=f"%{{y}}: {what} %{{x:.3f}}x<extra></extra>",
        )
    figure.add_vline(x=1, line={"color": NEUTRAL, "width": 1, "dash": "dot"})
    axis = {"title": {"text": "speedup over NCCL's default"}, "range": [0.74, 1.36]}
    rows = {"autorange": "reversed", "type": "category"}
    return lay_out(figure, 140 + 22 * len(mine), xaxis=axis, yaxis=rows, bargap=0.25)


def patterns_figure(bars: Sequence[SpeedupBar]) -> go.Figure:
    """Fig. 8 a and b: speedups of the two patterns, the paper's next to ours."""
    rows = list(dict.fromkeys((bar.pattern, bar.config) for bar in bars))
    names = [f"{pattern}: {config}" for pattern, config in rows]
    figure = go.Figure()
    published = {(bar.pattern, bar.config): bar.published for bar in bars}
    given = [(name, value) for name, row in zip(names, rows, strict=True) if (value := published[row]) is not None]
    figure.add_scatter(
        name="paper",
        x=[value for _, value in given],
        y=[name for name, _ in given],
        mode="markers",
        marker={"symbol": "diamond", "size": 11, "color": NEUTRAL},
        hovertemplate="%{y}: paper %{x:.2f}x<extra></extra>",
    )
    for place, profile in enumerate(dict.fromkeys(bar.profile for bar in bars)):
        ours = {(bar.pattern, bar.config): bar.ours for bar in bars if bar.profile == profile}
        figure.add_scatter(
            name=profile,
            x=[ours[row] for row in rows],
            y=names,
            mode="markers",
            marker={"size": 10, "color": (ACCENT, PALETTE[3])[place % 2]},
            hovertemplate=f"%{{y}}: {label(profile)} %{{x:.3f}}x<extra></extra>",
        )
    figure.add_vline(x=1, line={"color": NEUTRAL, "width": 1, "dash": "dot"})
    axis = {"title": {"text": "speedup over NC = 8, C = 2 MB"}}
    return lay_out(figure, 130 + 34 * len(rows), xaxis=axis, yaxis={"autorange": "reversed", "type": "category"})


def convergence_figure(curves: Sequence[Curve]) -> go.Figure:
    """Fig. 8c: the best makespan of pattern 2 after each measurement."""
    figure = go.Figure()
    for curve in [curve for curve in curves if curve.kind == "8c"]:
        colour = BAD if curve.name == "AutoCCL" else ACCENT
        dash = "solid" if curve.profile == "plausible" else "dot"
        figure.add_scatter(
            name=f"{curve.name}, {curve.profile}",
            x=curve.x,
            y=curve.y,
            mode="lines",
            line={"color": colour, "width": 2, "dash": dash, "shape": "hv"},
            hovertemplate="measurement %{x}: %{y:.3f} ms<extra></extra>",
        )
    axis = {"title": {"text": "measurement"}}
    return lay_out(figure, 320, xaxis=axis, yaxis={"title": {"text": "best makespan (ms)"}})


def measurements_figure(curves: Sequence[Curve]) -> go.Figure:
    """How many measurements a search takes, by the number of collectives."""
    figure = go.Figure()
    for curve in [curve for curve in curves if curve.kind == "linear"]:
        figure.add_scatter(
            name=f"{curve.name}, {curve.profile}",
            x=curve.x,
            y=curve.y,
            mode="lines+markers",
            line={
                "color": BAD if curve.name.startswith("AutoCCL") else ACCENT,
                "width": 2,
                "dash": "solid" if curve.profile == "plausible" else "dot",
            },
            hovertemplate="%{x} collectives: %{y} measurements<extra></extra>",
        )
    axis = {"title": {"text": "collectives in the group"}, "rangemode": "tozero"}
    return lay_out(figure, 320, xaxis=axis, yaxis={"title": {"text": "measurements"}, "rangemode": "tozero"})


def _line(
    curve: Curve, values: Sequence[float], hover: str, *, colour: int, is_named: bool, dash: str = "solid"
) -> go.Scatter:
    """One curve of a panel; the first panel names it for all."""
    return go.Scatter(
        x=curve.x,
        y=values,
        name=curve.name,
        legendgroup=curve.name,
        showlegend=is_named,
        mode="lines+markers",
        line={"color": colour_of(colour), "width": 2, "dash": dash},
        hovertemplate=f"{hover}<extra>{label(curve.name)}</extra>",
    )


def hidden_figure(curves: Sequence[Curve]) -> go.Figure:
    """Hidden communication by micro-batch; bands are the notes' ranges."""
    mine = [curve for curve in curves if curve.kind == "hidden"]
    profiles = list(dict.fromkeys(curve.profile for curve in mine))
    kinds = list(dict.fromkeys(curve.name for curve in mine))
    figure = make_subplots(cols=len(profiles), rows=1, subplot_titles=profiles, shared_yaxes=True)
    for curve in mine:
        col = profiles.index(curve.profile) + 1
        figure.add_trace(
            _line(curve, curve.y, "%{x:g} sequences: %{y:.0f} %", colour=kinds.index(curve.name), is_named=col == 1),
            row=1,
            col=col,
        )
    for low, high, place in ((80, 90, 0), (70, 80, 1), (60, 70, 2)):
        figure.add_hrect(y0=low, y1=high, fillcolor=colour_of(place), opacity=0.12, line_width=0, row="all", col="all")
    lay_out(figure, 360)
    figure.update_xaxes(title_text="micro-batch (sequences of 2048 tokens)")
    figure.update_yaxes(title_text="hidden (%)", range=[0, 100], col=1)
    return figure.update_layout(legend=OVER_TITLES)


def scaling_figure(curves: Sequence[Curve]) -> go.Figure:
    """Efficiency by number of GPUs, weak and strong, with overlap and without."""
    mine = [curve for curve in curves if curve.kind == "scaling"]
    profiles = list(dict.fromkeys(curve.profile for curve in mine))
    names = list(dict.fromkeys(curve.name for curve in mine))
    figure = make_subplots(cols=len(profiles), rows=1, subplot_titles=profiles, shared_yaxes=True)
    for curve in mine:
        col = profiles.index(curve.profile) + 1
        figure.add_trace(
            _line(
                curve,
                [100 * value for value in curve.y],
                "%{x:g} GPUs: %{y:.1f} %",
                colour=names.index(curve.name) // 2,
                is_named=col == 1,
                dash="dot" if "not" in curve.name else "solid",
            ),
            row=1,
            col=col,
        )
    for x, y in ((1024, 90), (512, 80)):
        figure.add_scatter(
            x=[x],
            y=[y],
            mode="markers",
            marker={"symbol": "diamond", "size": 10, "color": NEUTRAL},
            showlegend=False,
            hovertemplate="the notes: %{y} % at %{x} GPUs<extra></extra>",
        )
    lay_out(figure, 340)
    figure.update_xaxes(title_text="GPUs", **log_axis(14, 1200))
    figure.update_yaxes(title_text="efficiency (%)", range=[0, 105], col=1)
    return figure.update_layout(legend=OVER_TITLES)
