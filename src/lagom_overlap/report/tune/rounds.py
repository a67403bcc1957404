"""The paired A/B as two figures: how much faster tuned is than each contender, and each round's makespan."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import plotly.graph_objects as go

from lagom_overlap.report.style import ACCENT, BAD, GOOD, NEUTRAL, label, lay_out, time_unit
from lagom_overlap.report.tune.verdict_words import median_text
from lagom_overlap.results.tune import ENGINE_DEFAULT, TuneResult
from lagom_overlap.tuners.sequential import Decision, judged_pairs
from lagom_overlap.tuners.verdict import DEFAULT_ARM, TUNED_ARM, PairedRatio, Verdict
from lagom_overlap.units import format_seconds

FAR_ABOVE = 1.5
"""A contender whose median is that many times the fastest is a number at the edge: on one axis with it the others
would be one point."""

_ROW_PX, _FRAME_PX = 58, 76
"""Pixels of a contender, and of the axis. Chosen by eye."""


_LABEL: Final = 20
"""Characters of a line of a label. Chosen by eye."""


def _order(verdict: Verdict, arms: set[str]) -> list[str]:
    """Tuned last, before it the default, the engine, the best fixed setting, the others by name."""
    first = [DEFAULT_ARM, ENGINE_DEFAULT, *([verdict.best_fixed] if verdict.best_fixed else [])]
    known = [arm for arm in dict.fromkeys(first) if arm in arms]
    return known + sorted(arms - set(known) - {TUNED_ARM}) + ([TUNED_ARM] if TUNED_ARM in arms else [])


def _jitter(num: int) -> list[float]:
    """Fixed offsets around 0 that keep neighbouring rounds apart."""
    return [((index * 5) % 7 - 3) / 24 for index in range(num)]


def _wrapped(text: str) -> str:
    """A label on several lines."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) + 1 > _LABEL:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(label(line, _LABEL + 6) for line in lines[:3])


def ratio_figure(result: TuneResult, verdict: Verdict) -> go.Figure | None:
    """The makespan of the default, the engine and the best fixed setting over tuned's.

    The pairs are dots, the quartiles a bar, the median a stroke. None where there are no pairs.
    """
    if verdict.over_default.num_pairs == 0:
        return None
    ratios: dict[str, PairedRatio] = {DEFAULT_ARM: verdict.over_default, **verdict.over_baselines}
    asked = {DEFAULT_ARM, ENGINE_DEFAULT, verdict.best_fixed}
    arms = list(reversed([arm for arm in _order(verdict, set(ratios)) if arm in asked]))
    figure = go.Figure()
    for row, arm in enumerate(arms):
        ratio = ratios[arm]
        colour = _colour(verdict, arm)
        _add_pairs(figure, verdict, arm, row)
        figure.add_scatter(
            x=[ratio.q25, ratio.q75], y=[row, row], mode="lines", line={"color": colour, "width": 7}, hoverinfo="skip"
        )
        figure.add_scatter(
            x=[ratio.median_ratio],
            y=[row],
            mode="markers",
            marker={"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": colour}},
            hovertext=f"over {label(result.words_for(arm))}: {median_text(ratio)}",
            hoverinfo="text",
        )
    figure.add_vline(x=1, line={"color": NEUTRAL, "width": 1.2, "dash": "dash"})
    lay_out(figure, _ROW_PX * len(arms) + _FRAME_PX, showlegend=False, margin={"l": 8, "r": 16, "t": 12, "b": 48})
    shown = [x for trace in figure.data for x in trace.x] + [1.0]
    pad = 0.06 * (max(shown) - min(shown)) or 0.05
    figure.update_xaxes(
        title_text="speed of tuned over it (right of 1: faster)", range=[min(shown) - pad, max(shown) + pad]
    )
    _name_rows(figure, [f"{_wrapped(result.words_for(arm))}<br><b>{median_text(ratios[arm])}</b>" for arm in arms])
    return figure


def _colour(verdict: Verdict, arm: str) -> str:
    """Whether the sequential test tells tuned from a contender."""
    decision = judged_pairs(verdict.makespans_s[arm], verdict.makespans_s[TUNED_ARM]).decision
    return {Decision.FASTER: GOOD, Decision.SLOWER: BAD}.get(decision, NEUTRAL)


def _add_pairs(figure: go.Figure, verdict: Verdict, arm: str, row: int) -> None:
    mine, tuned = verdict.makespans_s.get(arm, ()), verdict.makespans_s.get(TUNED_ARM, ())
    if len(mine) != len(tuned) or not tuned or min(tuned) <= 0:
        return
    ratios = [base / best for base, best in zip(mine, tuned, strict=True)]
    figure.add_scatter(
        x=ratios,
        y=[row - 0.02 + offset for offset in _jitter(len(ratios))],
        mode="markers",
        marker={"color": NEUTRAL, "size": 6, "opacity": 0.6},
        hovertext=[f"round {index + 1}: {ratio:.3f}×" for index, ratio in enumerate(ratios)],
        hoverinfo="text",
    )


def _name_rows(figure: go.Figure, names: list[str]) -> None:
    figure.update_yaxes(
        tickmode="array", tickvals=list(range(len(names))), ticktext=names, range=[-0.6, len(names) - 0.3],
        showgrid=False, ticks="", showline=False,
    )  # fmt: skip


def _is_far(kept: Mapping[str, Sequence[float]], times: Sequence[float]) -> bool:
    return median(times) > FAR_ABOVE * min(map(median, kept.values()))


def rounds_figure(result: TuneResult, verdict: Verdict) -> go.Figure | None:
    """Every round's makespan by contender, with its median; None where no rounds are kept."""
    kept = {arm: times for arm, times in verdict.makespans_s.items() if times}
    if not kept:
        return None
    arms = list(reversed(_order(verdict, set(kept))))
    unit, name = time_unit(max(max(times) for times in kept.values()))
    figure = go.Figure()
    for row, arm in enumerate(arms):
        times = kept[arm]
        if _is_far(kept, times):
            continue
        middle = median(times)
        figure.add_scatter(
            x=[time / unit for time in times],
            y=[row + offset for offset in _jitter(len(times))],
            mode="markers",
            marker={"color": ACCENT if arm == TUNED_ARM else NEUTRAL, "size": 7, "opacity": 0.7},
            hovertext=[f"round {index + 1}: {format_seconds(time)}" for index, time in enumerate(times)],
            hoverinfo="text",
        )
        figure.add_scatter(
            x=[middle / unit],
            y=[row],
            mode="markers",
            marker={
                "symbol": "line-ns",
                "size": 26,
                "line": {"width": 3, "color": ACCENT if arm == TUNED_ARM else NEUTRAL},
            },
            hovertext=f"{label(result.words_for(arm))}: median {format_seconds(middle)}",
            hoverinfo="text",
        )
    lay_out(figure, _ROW_PX * len(arms) + _FRAME_PX, showlegend=False, margin={"l": 8, "r": 16, "t": 12, "b": 48})
    near = [time / unit for times in kept.values() if not _is_far(kept, times) for time in times]
    margin = 0.06 * (max(near) - min(near)) or 0.05 * max(near)
    for row, arm in enumerate(arms):
        if _is_far(kept, kept[arm]):
            figure.add_annotation(
                x=1,
                xref="paper",
                xanchor="right",
                y=row,
                text=f"{format_seconds(median(kept[arm]))} ▸",
                showarrow=False,
            )
    figure.update_xaxes(
        title_text=f"time of all groups in a step ({name})", range=[min(near) - margin, max(near) + margin]
    )
    _name_rows(
        figure, [f"{_wrapped(result.words_for(arm))}<br><b>{format_seconds(median(kept[arm]))}</b>" for arm in arms]
    )
    return figure
