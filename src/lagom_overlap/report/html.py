"""The page of one tuning run: one HTML file that needs no network.

plotly.js is inlined once; the page's own policy forbids it to load anything. Names of jobs and operators are data:
jinja2 escapes them in the text, `style.label` in the figures, and the figures' JSON escapes what could end a script.
"""

from dataclasses import dataclass

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lagom_overlap.report.gantt import gantt_figure
from lagom_overlap.report.model import TuneReport
from lagom_overlap.report.page import (
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
from lagom_overlap.report.plane import MAX_ARROWS, plane_figure
from lagom_overlap.report.probes import GroupHistory, histories
from lagom_overlap.report.rounds import ratio_figure, rounds_figure
from lagom_overlap.report.sentences import (
    KNOB_WORDS,
    busy_sentence,
    change_text,
    failure_sentences,
    headline,
    launch_text,
    num_search_steps,
    share_sentence,
)
from lagom_overlap.report.trajectory import trajectory_figure
from lagom_overlap.tune.journal import StepKind
from lagom_overlap.tune.verdict import DEFAULT_ARM, TUNED_ARM
from lagom_overlap.units import format_seconds


@dataclass(frozen=True, slots=True)
class _Figure:
    json: Markup
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupPart:
    title: str
    size: str
    summary: str
    comms: tuple[CommRow, ...]
    sums: tuple[TimeRow, ...]
    plane: _Figure | None
    plane_caption: str
    trajectory: _Figure | None
    trajectory_caption: str
    gantt: _Figure | None
    probes: tuple[ProbeRow, ...]
    num_probes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    title: str
    job: str
    backend_description: str
    meta: str
    verdict_class: str
    verdict_word: str
    headline: str
    tiles: tuple[Tile, ...]
    sentences: tuple[str, ...]
    changes_note: str
    knobs: tuple[str, ...]
    groups: tuple[_GroupPart, ...]
    opened: int
    rounds_note: str
    ratios: _Figure | None
    rounds: _Figure | None
    search_note: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def render_html(report: TuneReport) -> str:
    """The report as one HTML page; the same report gives the same page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lagom_overlap.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def inline(name: str) -> Markup:
        source, _, _ = jinja2.PackageLoader("lagom_overlap.report").get_source(environment, name)
        return Markup(source)

    return environment.get_template("report.html.j2").render(
        page=_page(report), css=inline("report.css"), js=inline("report.js"), plotly_js=Markup(get_plotlyjs())
    )


def _figure(figure: go.Figure | None) -> _Figure | None:
    if figure is None:
        return None
    text = figure.to_json().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return _Figure(Markup(text), int(figure.layout.height))


def _page(report: TuneReport) -> _Page:
    verdict = report.verdict
    held = histories(report)
    shares = _shares(held)
    guard = "guarded" if report.guarded else "unguarded"
    verdict_class, verdict_word = _verdict_words(report)
    paired = None if report.is_prediction else verdict
    return _Page(
        title=f"{report.job}: tuning report",
        job=report.job,
        backend_description=report.backend_description,
        meta=f"tuner {report.tuner} ({guard}), seed {report.seed}, {report.date}",
        verdict_class=verdict_class,
        verdict_word=verdict_word,
        headline=headline(report),
        tiles=tiles(report),
        sentences=_sentences(report),
        changes_note=_changes_note(report),
        knobs=tuple(KNOB_WORDS[knob] for knob in shown_knobs(report)),
        groups=tuple(_group_part(report, history, share) for history, share in zip(held, shares, strict=True)),
        opened=max(range(len(shares)), key=lambda index: shares[index] or 0.0) + 1,
        rounds_note=_rounds_note(report),
        ratios=_figure(ratio_figure(report, paired)) if paired is not None else None,
        rounds=_figure(rounds_figure(report, paired)) if paired is not None else None,
        search_note=_search_note(report),
        facts=facts(report),
        notes=report.notes,
    )


def _verdict_words(report: TuneReport) -> tuple[str, str]:
    """(colour, word) of the verdict."""
    if report.verdict is None:
        return "none", "No verdict"
    if report.is_prediction:
        return "none", "Predicted"
    return ("adopted", "Adopted") if report.verdict.adopted else ("refused", "Not adopted")


def _sentences(report: TuneReport) -> tuple[str, ...]:
    """The words that the tiles do not say already."""
    share, busy = report.engine_share, busy_sentence(report)
    tail = (*failure_sentences(report), busy) if busy else failure_sentences(report)
    return (
        tail if share is None or share.engine is not None or report.changes_nothing else (share_sentence(report), *tail)
    )


def _changes_note(report: TuneReport) -> str:
    if report.is_prediction:
        times = "Times are the fitted model's."
    elif report.verdict is not None:
        times = (
            "Times are medians of the A/B's rounds; the ratios above are of pairs, so the two differ where rounds do."
        )
    elif any(entry.step.kind is StepKind.VERDICT for entry in report.entries):
        times = "The A/B was not finished: times are medians of the rounds that ran, and prove nothing."
    else:
        times = "No A/B ran: times are the search's own, one after the other, and prove nothing."
    before = report.words_for(DEFAULT_ARM)
    kept = "" if report.verdict is None or report.verdict.adopted or report.is_prediction else " It was not adopted."
    return f"Before: {before}. After: what the tuner recommends.{kept} “auto” leaves a knob to the engine. {times}"


def _rounds_note(report: TuneReport) -> str:
    if report.verdict is None:
        return ""
    if report.is_prediction:
        return "Nothing was run: every time on this page is the fitted model's, so there are no rounds to compare."
    if TUNED_ARM in report.verdict.failures:
        return "Tuned failed in the rounds, so there is nothing to compare; the makespans are those that ran."
    num = report.verdict.over_default.num_pairs
    words = report.words_for(TUNED_ARM)
    return (
        f"In each of {num} rounds every contender ran once, in shuffled order; {words} is compared with the others of "
        "the same round. A makespan is the sum over the groups of occurrences in an iteration times makespan. "
        f"It is adopted only if the lower quartile over {report.words_for(DEFAULT_ARM)} is above 1."
    )


def _search_note(report: TuneReport) -> str:
    num = num_search_steps(report)
    if report.is_prediction:
        return f"{_number(num, 'prediction')}, asked for by {report.tuner}."
    return f"{_number(num, 'measurement')}, chosen by {report.tuner}; the A/B's rounds are not among them."


def _shares(held: tuple[GroupHistory, ...]) -> tuple[float | None, ...]:
    """Each group's part of the iteration's makespan under the default, None where a group was not measured."""
    times = [h.problem.group.count * h.default.makespan_s if h.default else None for h in held]
    total = sum(time or 0.0 for time in times)
    return tuple(None if time is None or not total else time / total for time in times)


def _group_part(report: TuneReport, history: GroupHistory, share: float | None) -> _GroupPart:
    group = history.problem.group
    launch = launch_text(history.problem, report.tuned_of(history.problem))
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
            f"{_number(len(group.computations), 'computation')} beside {_number(len(group.comms), 'collective')}, "
            f"{group.count} × per iteration{f'; computation: {launch}' if launch else ''}"
        ),
        summary=_summary(history, share),
        comms=tuple(comm_rows(report, history)),
        sums=sum_rows(history, changed=report.tuned_of(history.problem) != history.problem.default),
        plane=_figure(plane_figure(report, history)),
        plane_caption=(
            f"Each dot is one measurement, coloured by its makespan. {arrows}Thin lines join points of equal "
            f"max(X, Y), the dashed one is X = Y.{failures}"
        ),
        trajectory=_figure(trajectory_figure(report, history)),
        trajectory_caption=_trajectory_caption(history),
        gantt=_figure(gantt_figure(report, history)),
        probes=probe_rows(history),
        num_probes=len(history.probes),
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
    part = "" if share is None else f", {share:.0%} of the groups' time"
    return f"{format_seconds(before)} → {format_seconds(after)} ({change_text(before, after)}){part}"
