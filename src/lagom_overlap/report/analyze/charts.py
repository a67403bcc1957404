"""The figures of an analysis: where the time of ranks and steps went, one step's streams, slowdowns with intervals."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go

from lagom_overlap.analysis.contention import ClassSlowdown
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.analysis.measures import Measures, StepMeasures
from lagom_overlap.report.analyze.words import collective_text
from lagom_overlap.report.style import ACCENT, BAD, COMPUTE, GOOD, NEUTRAL, PALETTE, label, lay_out, time_unit
from lagom_overlap.results.analyze import AnalyzeResult
from lagom_overlap.trace.gpu_trace import NS_PER_S, ROLE_CODES, EventRole

MAX_BARS: Final = 64
"""Bars that can be told apart on a page."""
MAX_EVENTS: Final = 3000
"""Events of a timeline: the page is to be half a megabyte at most."""
MAX_ROWS: Final = 16
"""Rows of a figure that fit a screen."""
MAX_FALLS: Final = 6
"""Collectives that have a step of their own in the waterfall, those that are exposed longest; the rest is one."""
_PARTS: Final = (
    ("computation alone", COMPUTE[0]),
    ("computation during communication", GOOD),
    ("exposed communication", BAD),
    ("copies alone", PALETTE[4]),
    ("idle, waiting for the CPU", PALETTE[3]),
    ("idle, other", NEUTRAL),
)


def parts_of(measures: Measures) -> tuple[int, ...]:
    """The span as a sum, in the order of the figure's legend, in ns."""
    return (
        measures.compute_ns - measures.overlap_ns,
        measures.overlap_ns,
        measures.exposed_comm_ns,
        measures.copies_alone_ns,
        measures.host_bound_ns,
        measures.idle_ns - measures.host_bound_ns,
    )


def _bars(names: Sequence[str], measured: Sequence[Measures]) -> go.Figure:
    unit, unit_name = time_unit(max((measures.span_ns for measures in measured), default=0) / NS_PER_S)
    figure = go.Figure()
    rows = [parts_of(measures) for measures in measured]
    for index, (part, colour) in enumerate(_PARTS):
        figure.add_bar(
            name=part,
            orientation="h",
            y=[label(name) for name in names],
            x=[row[index] / NS_PER_S / unit for row in rows],
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"%{{y}}: {part} %{{x:.4g}} {unit_name}<extra></extra>",
        )
    height = 150 + 24 * len(names)
    axis = {"title": {"text": unit_name}}
    rows_axis = {"autorange": "reversed", "type": "category"}
    lay_out(figure, height, barmode="stack", bargap=0.25, xaxis=axis, yaxis=rows_axis)
    return figure.update_layout(legend={"traceorder": "normal"})


def ranks_figure(ranks: Sequence[RankFindings]) -> go.Figure | None:
    """Where the time of every rank went."""
    timed = [rank for rank in ranks if len(rank.trace.events)][:MAX_BARS]
    if not timed:
        return None
    names = [f"rank {rank.trace.rank}" if rank.trace.rank is not None else rank.trace.file for rank in timed]
    return _bars(names, [rank.measures for rank in timed])


def steps_figure(rank: RankFindings) -> go.Figure | None:
    """Where the time of every step of a rank went."""
    steps = rank.steps[:MAX_BARS]
    if not rank.trace.steps or not steps:
        return None
    return _bars([f"step {step.number}" for step in steps], [step.measures for step in steps])


def waterfall_of(findings: Findings) -> tuple[tuple[str, float, str], ...]:
    """(part, ns, colour) whose sum is the step of the average rank; the collectives' parts are their exposed time."""
    timed = [rank.measures for rank in findings.ranks if len(rank.trace.events)]
    if not timed:
        return ()
    whole = sum(timed[1:], timed[0])
    rows = sorted(findings.rows, key=lambda row: (-row.exposed_ns, row.key))
    bare = [(collective_text(row.key), row.exposed_ns, BAD) for row in rows[:MAX_FALLS] if row.exposed_ns > 0]
    rest_ns = sum(row.exposed_ns for row in rows[MAX_FALLS:])
    parts = [
        ("computation", whole.compute_ns, COMPUTE[0]),
        *bare,
        ("other collectives, exposed", rest_ns, BAD),
        ("exposed at once, counted twice", whole.exposed_comm_ns - sum(row.exposed_ns for row in rows), ACCENT),
        ("copies alone", whole.copies_alone_ns, PALETTE[4]),
        ("idle, waiting for the CPU", whole.host_bound_ns, PALETTE[3]),
        ("idle, other", whole.idle_ns - whole.host_bound_ns, NEUTRAL),
    ]
    num = findings.num_windows
    return tuple((name, length_ns / num, colour) for name, length_ns, colour in parts if length_ns)


def _told_apart(names: Sequence[str]) -> list[str]:
    """The names, with a number after each repeated one: equal names would share a row."""
    seen: Counter[str] = Counter()
    labels = []
    for name in names:
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return labels


def waterfall_figure(findings: Findings) -> go.Figure | None:
    """How a step of the average rank adds up, part after part."""
    parts = waterfall_of(findings)
    if not parts:
        return None
    total_ns = sum(length_ns for _, length_ns, _ in parts)
    unit, unit_name = time_unit(total_ns / NS_PER_S)
    scale = NS_PER_S * unit
    ends = np.cumsum([length_ns for _, length_ns, _ in parts])
    bases = [*(ends - [length_ns for _, length_ns, _ in parts]).tolist(), 0.0]
    names = _told_apart([*(label(name, 44) for name, _, _ in parts), "the step"])
    lengths = [*(length_ns for _, length_ns, _ in parts), total_ns]
    figure = go.Figure()
    figure.add_bar(
        orientation="h",
        y=names,
        x=[length_ns / scale for length_ns in lengths],
        base=[base / scale for base in bases],
        marker={"color": [*(colour for _, _, colour in parts), ACCENT], "line": {"width": 0}},
        text=[f"{length_ns / scale:.3g} {unit_name}" for length_ns in lengths],
        textposition="outside",
        cliponaxis=False,
        hovertemplate=f"%{{y}}: %{{x:.4g}} {unit_name}<extra></extra>",
        showlegend=False,
    )
    axis = {"title": {"text": f"{unit_name} per step"}, "range": [0, 1.22 * total_ns / scale]}
    rows_axis = {"autorange": "reversed", "type": "category"}
    return lay_out(figure, 110 + 26 * len(names), bargap=0.25, xaxis=axis, yaxis=rows_axis)


def typical_step(rank: RankFindings) -> StepMeasures | None:
    """The step of median length, the earlier of two."""
    ordered = sorted(rank.steps, key=lambda step: (step.measures.span_ns, step.number))
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def streams_figure(rank: RankFindings, step: StepMeasures) -> go.Figure:
    """The streams of one step; of too many events only the longest."""
    events = rank.trace.events
    rows = np.flatnonzero((events.start_ns < step.end_ns) & (events.end_ns > step.start_ns))
    if len(rows) > MAX_EVENTS:
        length = events.end_ns[rows] - events.start_ns[rows]
        rows = np.sort(rows[np.argsort(-length, kind="stable")[:MAX_EVENTS]])
    unit, unit_name = time_unit((step.end_ns - step.start_ns) / NS_PER_S)
    busiest = np.unique(events.stream[rows], return_counts=True)
    streams = [int(s) for s in busiest[0][np.argsort(-busiest[1], kind="stable")][:MAX_ROWS]]
    figure = go.Figure()
    colours = {EventRole.COMPUTE: COMPUTE[0], EventRole.COMM: BAD, EventRole.MEMORY: PALETTE[4]}
    for role, colour in colours.items():
        mine = rows[(events.role[rows] == ROLE_CODES[role]) & np.isin(events.stream[rows], streams)]
        if not len(mine):
            continue
        scale = NS_PER_S * unit
        figure.add_bar(
            name={
                EventRole.COMPUTE: "computation",
                EventRole.COMM: "communication",
                EventRole.MEMORY: "copies and sets",
            }[role],
            orientation="h",
            y=[label(events.streams[int(s)]) for s in events.stream[mine]],
            base=((events.start_ns[mine] - step.start_ns) / scale).round(6).tolist(),
            x=((events.end_ns[mine] - events.start_ns[mine]) / scale).round(6).tolist(),
            marker={"color": colour, "line": {"width": 0}},
            text=[label(events.names[int(n)], 60) for n in events.name[mine]],
            textposition="none",
            hovertemplate=f"%{{text}}<br>%{{x:.4g}} {unit_name} from %{{base:.4g}}<extra></extra>",
        )
    axis = {"title": {"text": f"{unit_name} since the step began"}}
    height = 150 + 30 * len(streams)
    return lay_out(figure, height, barmode="overlay", bargap=0.2, xaxis=axis, yaxis={"type": "category"})


def slowdown_figure(rows: Sequence[ClassSlowdown]) -> go.Figure | None:
    """Slowdowns with their 95 % intervals, the costliest on top."""
    shown = [row for row in rows if row.found.low is not None and row.found.high is not None][:MAX_ROWS]
    if not shown:
        return None
    names = [f"{row.kernel_class} | {label(collective_text(row.collective), 44)}" for row in shown]
    values = [row.found.slowdown for row in shown]
    figure = go.Figure()
    figure.add_scatter(
        x=values,
        y=names,
        mode="markers",
        marker={"color": [BAD if row.found.is_proven else NEUTRAL for row in shown], "size": 9},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, (row.found.high or 0) - row.found.slowdown) for row in shown],
            "arrayminus": [max(0.0, row.found.slowdown - (row.found.low or 0)) for row in shown],
            "color": NEUTRAL,
            "thickness": 1.5,
        },
        customdata=[[row.found.num_overlapped, row.found.num_alone] for row in shown],
        hovertemplate="%{y}<br>%{x:.3f}, %{customdata[0]} runs during one, %{customdata[1]} alone<extra></extra>",
        showlegend=False,
    )
    figure.add_vline(x=1, line={"color": ACCENT, "width": 1, "dash": "dot"})
    axis = {"title": {"text": "duration during the collective over duration alone"}}
    return lay_out(figure, 130 + 26 * len(shown), xaxis=axis, yaxis={"autorange": "reversed"})


def figure(result: AnalyzeResult) -> go.Figure:
    """How a step of the average rank adds up.

    Raises:
        ValueError: if no trace has a timeline.
    """
    drawn = waterfall_figure(result.analysis.findings)
    if drawn is None:
        raise ValueError("nothing to draw: no trace has a timeline")
    return drawn
