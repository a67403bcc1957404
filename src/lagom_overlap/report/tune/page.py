"""The page of one tuning run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import plotly.graph_objects as go

from lagom_overlap.report.render import EmbeddedFigure, embedded_if_any, render
from lagom_overlap.report.tune.cells import (
    CommRow,
    ProbeRow,
    Tile,
    TimeRow,
    comm_rows,
    facts,
    probe_rows,
    shown_knobs,
    sum_rows,
    tiles,
)
from lagom_overlap.report.tune.gantt import gantt_figure
from lagom_overlap.report.tune.overview import alike_groups, times_text
from lagom_overlap.report.tune.plane import MAX_ARROWS, plane_figure
from lagom_overlap.report.tune.probes import GroupHistory, histories
from lagom_overlap.report.tune.rounds import ratio_figure, rounds_figure
from lagom_overlap.report.tune.trajectory import trajectory_figure
from lagom_overlap.report.tune.verdict_words import (
    KNOB_WORDS,
    busy_sentence,
    change_text,
    failure_sentences,
    headline,
    launch_text,
    next_commands,
    share_sentence,
    step_sentence,
)
from lagom_overlap.results.tune import TuneResult
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.tuners.sequential import ALPHA, MIN_EFFECT
from lagom_overlap.tuners.verdict import DEFAULT_ARM, TUNED_ARM
from lagom_overlap.units import format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupPart:
    title: str
    size: str
    summary: str
    comms: tuple[CommRow, ...]
    sums: tuple[TimeRow, ...]
    plane: EmbeddedFigure | None
    plane_caption: str
    trajectory: EmbeddedFigure | None
    trajectory_caption: str
    gantt: EmbeddedFigure | None
    probes: tuple[ProbeRow, ...]
    num_probes: int
    is_short: bool = False
    """Whether its figures are left out for the page's size."""


MOST_BYTES: Final = 300_000
"""Figures and measurements of the groups take at most this much of the page, of which all is to be half a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    title: str
    job: str
    backend_description: str
    meta: str
    verdict_class: str
    verdict_word: str
    headline: str
    commands: tuple[str, ...]
    overview: tuple[tuple[str, str, str, str], ...]
    tiles: tuple[Tile, ...]
    sentences: tuple[str, ...]
    changes_note: str
    knobs: tuple[str, ...]
    groups: tuple[_GroupPart, ...]
    opened: int
    rounds_note: str
    ratios: EmbeddedFigure | None
    rounds: EmbeddedFigure | None
    search_note: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def render_tuning(result: TuneResult) -> str:
    """The run as one HTML page; the same result gives the same page."""
    return render("tune.html.j2", page=_page(result))


def _page(result: TuneResult) -> _Page:
    verdict = result.verdict
    probes = histories(result)
    shares = _shares(probes)
    guard = "guarded" if result.guarded else "unguarded"
    verdict_class, verdict_word = _verdict_words(result)
    paired = None if result.is_prediction else verdict
    return _Page(
        title=f"{result.job}: tuning report",
        job=result.job,
        backend_description=result.backend_description,
        meta=f"tuner {result.tuner} ({guard}), seed {result.seed}, {result.date}",
        verdict_class=verdict_class,
        verdict_word=verdict_word,
        headline=headline(result),
        commands=next_commands(result),
        overview=_overview(result),
        tiles=tiles(result),
        sentences=_sentences(result),
        changes_note=_changes_note(result),
        knobs=tuple(KNOB_WORDS[knob] for knob in shown_knobs(result)),
        groups=_group_parts(result, probes, shares),
        opened=max(range(len(shares)), key=lambda index: shares[index] or 0.0) + 1,
        rounds_note=_rounds_note(result),
        ratios=embedded_if_any(ratio_figure(result, paired)) if paired is not None else None,
        rounds=embedded_if_any(rounds_figure(result, paired)) if paired is not None else None,
        search_note=_search_note(result),
        facts=facts(result),
        notes=result.notes,
    )


def _group_parts(
    result: TuneResult, probes: Sequence[GroupHistory], shares: Sequence[float | None]
) -> tuple[_GroupPart, ...]:
    """The groups, with figures and lists of measurements for as many as `MOST_BYTES` holds, at least one."""
    left = MOST_BYTES
    parts: dict[int, _GroupPart] = {}
    for place in sorted(range(len(probes)), key=lambda index: -(shares[index] or 0.0)):
        short = _group_part(result, probes[place], shares[place])
        full = _with_figures(short, result, probes[place]) if left >= 0 else short
        figures = [figure for figure in (full.plane, full.trajectory, full.gantt) if figure is not None]
        left -= sum(len(figure.json) for figure in figures) + sum(len(str(probe)) for probe in full.probes)
        parts[place] = full if left >= 0 or not parts else short
    return tuple(parts[place] for place in range(len(probes)))


def _overview(result: TuneResult) -> tuple[tuple[str, str, str, str], ...]:
    """What changes, those with most gain first: groups of a kind, their time in a step, of the step, the settings."""
    rows = alike_groups(result)
    overview = []
    for row in rows:
        times, _, of_step = times_text(result, row).removesuffix(" of the step").partition(", ")
        settings = "; ".join(row.changes) or "unchanged"
        overview.append(
            (f"{row.count} × {row.what}", settings, times if row.changes else "", of_step if row.changes else "")
        )
    return tuple(overview)


def _verdict_words(result: TuneResult) -> tuple[str, str]:
    """(colour, word) of the verdict."""
    if result.verdict is None:
        return "none", "No verdict"
    if result.is_prediction:
        return "none", "Predicted"
    if not result.verdict.adopted:
        return "refused", "Not adopted"
    return ("none", "Predicted") if result.is_simulated else ("adopted", "Adopted")


def _sentences(result: TuneResult) -> tuple[str, ...]:
    """The words that the tiles do not say already."""
    share = result.engine_share
    is_said = share is None or share.engine is not None or result.changes_nothing
    engines = "" if is_said else share_sentence(result)
    texts = (step_sentence(result), engines, *failure_sentences(result), busy_sentence(result))
    return tuple(text for text in texts if text)


def _changes_note(result: TuneResult) -> str:
    if result.is_prediction:
        times = "Times are the fitted model's."
    elif result.verdict is not None:
        times = (
            "Times are medians of the A/B's rounds; the ratios above are of pairs, so the two differ where rounds do."
        )
    elif any(entry.step.kind is StepKind.VERDICT for entry in result.search.entries):
        times = "The A/B was not finished: times are medians of the rounds that ran, and prove nothing."
    else:
        times = "No A/B ran: times are the search's own, one after the other, and prove nothing."
    before = result.words_for(DEFAULT_ARM)
    kept = "" if result.verdict is None or result.verdict.adopted or result.is_prediction else " It was not adopted."
    return f"Before: {before}. After: what the tuner recommends.{kept} “auto” leaves a knob to the engine. {times}"


def _rounds_note(result: TuneResult) -> str:
    if result.verdict is None:
        return ""
    if result.is_prediction:
        return "Nothing was run: every time on this page is the fitted model's, so there are no rounds to compare."
    if TUNED_ARM in result.verdict.failures:
        return "Tuned failed in the rounds, so there is nothing to compare; the makespans are those that ran."
    num = result.verdict.over_default.num_pairs
    words = result.words_for(TUNED_ARM)
    return (
        f"In each of {num} rounds every contender ran once, in shuffled order; {words} is compared with the others of "
        "the same round. The times are from a group's first start to its last end (its makespan), "
        "times its occurrences in an iteration. "
        f"It is adopted only if a sequential test finds it faster than {result.words_for(DEFAULT_ARM)}: of settings "
        f"that are no faster it adopts {format_percent(ALPHA, 0)} at most, at any end. Gains below "
        f"{format_percent(MIN_EFFECT)} do not count."
    )


def _search_note(result: TuneResult) -> str:
    num = result.num_measurements
    if result.is_prediction:
        return f"{_number(num, 'prediction')}, asked for by {result.tuner}."
    return f"{_number(num, 'measurement')}, chosen by {result.tuner}; the A/B's rounds are not among them."


def _shares(histories: tuple[GroupHistory, ...]) -> tuple[float | None, ...]:
    """Each group's part of the iteration's makespan under the default, None where a group was not measured."""
    times = [h.problem.group.count * h.default.makespan_s if h.default else None for h in histories]
    total = sum(time or 0.0 for time in times)
    return tuple(None if time is None or not total else time / total for time in times)


def _group_part(result: TuneResult, history: GroupHistory, share: float | None) -> _GroupPart:
    """Without figures."""
    group = history.problem.group
    launch = launch_text(history.problem, result.search.tuned_of(history.problem))
    failures = f" {history.num_failures} could not run." if history.num_failures else ""
    arrows = (
        "An arrow is a step of the search in the colour of the collective that it changed: "
        "its slope is what the computation paid for what the communication gained. "
        if 1 < len(history.measured) <= MAX_ARROWS
        else ""
    )
    return _GroupPart(
        title=group.name,
        size=(
            f"{_number(len(group.computations), 'computation')} with {_number(len(group.comms), 'collective')}, "
            f"{group.count} × per iteration{f'; computation: {launch}' if launch else ''}"
        ),
        summary=_summary(history, share),
        comms=tuple(comm_rows(result, history)),
        sums=sum_rows(history, changed=result.search.tuned_of(history.problem) != history.problem.default),
        plane=None,
        plane_caption=(
            f"Each dot is one measurement, coloured by its makespan. {arrows}Thin lines join points of equal "
            f"max(X, Y), the dashed one is X = Y.{failures}"
        ),
        trajectory=None,
        trajectory_caption=_trajectory_caption(history),
        gantt=None,
        probes=(),
        num_probes=len(history.probes),
        is_short=True,
    )


def _with_figures(part: _GroupPart, result: TuneResult, history: GroupHistory) -> _GroupPart:
    return replace(
        part,
        plane=embedded_if_any(plane_figure(result, history)),
        trajectory=embedded_if_any(trajectory_figure(result, history)),
        gantt=embedded_if_any(gantt_figure(result, history)),
        probes=probe_rows(history),
        is_short=False,
    )


def _trajectory_caption(history: GroupHistory) -> str:
    below = "Below: the knobs that moved, by collective"
    if any(value is not None for probe in history.probes for value in probe.priority):
        below += ", and H, the computation lost per communication gained: the search goes on with the smallest"
    return f"Makespan of each measurement and the best so far. {below}."


def _number(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"


def _summary(history: GroupHistory, share: float | None) -> str:
    if history.default is None or history.tuned is None:
        return ""
    before, after = history.default.makespan_s, history.tuned.makespan_s
    part = "" if share is None else f", {format_percent(share, 0)} of the groups' time"
    return f"{format_seconds(before)} → {format_seconds(after)} ({change_text(before, after)}){part}"


def figure(result: TuneResult) -> go.Figure:
    """The verdict's ratios; without a verdict, or where nothing was run, the search of the group that takes longest.

    Raises:
        ValueError: if nothing was measured.
    """
    if result.verdict is not None and not result.is_prediction:
        drawn = ratio_figure(result, result.verdict)
        if drawn is not None:
            return drawn
    longest = max(histories(result), key=_time_s)
    drawn = trajectory_figure(result, longest)
    if drawn is None:
        raise ValueError("nothing to draw: nothing was measured")
    return drawn


def _time_s(history: GroupHistory) -> float:
    return history.problem.group.count * history.default.makespan_s if history.default else 0.0
