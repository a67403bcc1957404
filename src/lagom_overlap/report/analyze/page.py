"""The page of one analysis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.analysis.against import AgainstRun
from lagom_overlap.analysis.collectives import CollectiveRow
from lagom_overlap.analysis.findings import RankFindings
from lagom_overlap.analysis.groups import TraceGroup
from lagom_overlap.report.analyze.against import HEADS, against_headline, change_cells, step_cells
from lagom_overlap.report.analyze.charts import (
    ranks_figure,
    slowdown_figure,
    steps_figure,
    streams_figure,
    typical_step,
    waterfall_figure,
)
from lagom_overlap.report.analyze.words import (
    advice_texts,
    collective_cells,
    collective_text,
    collectives_head,
    contention_cells,
    contention_sentence,
    headline,
    part_cells,
    rank_cells,
    ranks_head,
    time_text,
    unreachable_sentence,
)
from lagom_overlap.report.render import EmbeddedFigure, embedded_if_any, render
from lagom_overlap.report.what_if import WhatIfPart, what_if_section
from lagom_overlap.results.analyze import AnalyzeResult

MAX_RANK_PARTS: Final = 8
"""Ranks whose own figures are on the page; all are in the tables and in --json."""
MAX_DETAILS: Final = 20
"""Rows with details on the page."""
MAX_CHANGES: Final = 40
"""Changes against another trace on the page."""
_REACH_WORDS: Final = {
    "tuner": "NCCL's tuner reaches it: algorithm, protocol, channels, chunk",
    "p2p_channels": "only NCCL_MAX_P2P_NCHANNELS reaches it",
    "none": "no knob of NCCL reaches it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankPart:
    title: str
    note: str
    streams_caption: str
    steps: EmbeddedFigure | None
    streams: EmbeddedFigure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Detail:
    title: str
    facts: tuple[tuple[str, str], ...]
    overlapped: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    title: str
    meta: str
    headline: str
    ranks_title: str
    rank_head: str
    rank_rows: tuple[tuple[str, ...], ...]
    part_rows: tuple[tuple[str, ...], ...]
    collective_head: str
    collective_rows: tuple[tuple[str, ...], ...]
    contention: str
    contention_rows: tuple[tuple[str, ...], ...]
    kernel_rows: tuple[tuple[str, ...], ...]
    what_if_part: WhatIfPart | None
    advice: tuple[tuple[str, ...], ...]
    looked_for: str
    next_line: str
    unreachable: str
    waterfall: EmbeddedFigure | None
    ranks: EmbeddedFigure | None
    group_rows: tuple[tuple[str, ...], ...]
    slowdowns: EmbeddedFigure | None
    rank_parts: tuple[_RankPart, ...]
    details: tuple[_Detail, ...]
    warnings: tuple[str, ...]
    against: "_AgainstPart | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class _AgainstPart:
    headline: str
    heads: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]
    kinds: tuple[tuple[str, ...], ...]
    communicators: tuple[tuple[str, ...], ...]
    collectives: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...]


def render_analysis(result: AnalyzeResult) -> str:
    """The analysis as one HTML page; the same report gives the same page."""
    return render("analyze.html.j2", page=_page(result))


def _page(result: AnalyzeResult) -> _Page:
    findings = result.analysis.findings
    timed = [rank for rank in findings.ranks if len(rank.trace.events)]
    gpus = sorted({rank.trace.gpu_name for rank in findings.ranks if rank.trace.gpu_name})
    return _Page(
        title=_title(result),
        meta=f"{len(findings.ranks)} trace{'s' if len(findings.ranks) > 1 else ''}, "
        f"{', '.join(gpus) or 'GPU not named'}, {result.date}",
        headline=headline(result),
        ranks_title="Where the time went" + (" (table: HTA's conventions)" if result.analysis.hta else ""),
        rank_head=ranks_head(result),
        rank_rows=_in_one_line(rank_cells(result)),
        part_rows=_in_one_line(part_cells(result)),
        collective_head=collectives_head(result),
        collective_rows=_in_one_line(collective_cells(result)),
        contention=contention_sentence(result),
        contention_rows=_in_one_line(contention_cells(result)),
        kernel_rows=_kernel_rows(result),
        what_if_part=what_if_section(result.what_ifs),
        advice=tuple(advice_texts(result)),
        looked_for=result.looked_for,
        next_line=result.next_line,
        unreachable=unreachable_sentence(result),
        waterfall=embedded_if_any(waterfall_figure(findings)),
        ranks=embedded_if_any(ranks_figure(findings.ranks)),
        group_rows=_group_rows(result),
        slowdowns=embedded_if_any(slowdown_figure(findings.contention.classes)),
        rank_parts=tuple(_rank_part(rank) for rank in timed[:MAX_RANK_PARTS]),
        details=tuple(_detail(result, row) for row in findings.rows[:MAX_DETAILS]),
        warnings=findings.warnings,
        against=None if result.against is None else _against_part(result.against),
    )


def _in_one_line(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Cells whose share stands on a line below the time, as a page has room for them: `"12 ms, 3.4 %"`."""
    return tuple(tuple(cell.replace("\n", ", ") for cell in row) for row in rows)


def _against_part(compared: AgainstRun) -> _AgainstPart:
    return _AgainstPart(
        headline=against_headline(compared),
        heads=HEADS,
        steps=tuple(step_cells(compared)),
        kinds=tuple(change_cells(compared.kinds)),
        communicators=tuple(change_cells(compared.communicators)),
        collectives=tuple(change_cells(compared.collectives[:MAX_CHANGES])),
        warnings=compared.warnings,
    )


def _title(result: AnalyzeResult) -> str:
    """The file, or of several the first and how many more."""
    files = list(dict.fromkeys(rank.trace.file.partition(":")[0] for rank in result.analysis.findings.ranks))
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _group_rows(result: AnalyzeResult) -> tuple[tuple[str, ...], ...]:
    """The groups that take longest in a step."""
    ordered = sorted(result.analysis.groups, key=lambda group: -group.makespan_ns * group.per_step)
    return tuple(
        (
            f"{group.name}: {len(group.kernel_keys)} kernels during {_comms_text(group)}",
            group.bound.value,
            f"{group.per_step:.2g}",
            time_text(group.makespan_ns),
            time_text(group.comp_ns),
            time_text(group.comm_ns),
            time_text(group.exposed_ns),
        )
        for group in ordered[:MAX_DETAILS]
    )


def _comms_text(group: TraceGroup) -> str:
    names = list(dict.fromkeys(collective_text(comm.key) for comm in group.comms))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _kernel_rows(result: AnalyzeResult) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            row.name,
            "×".join(str(size) for size in row.grid),
            f"{row.found.num_overlapped} / {row.found.num_alone}",
            f"{row.found.slowdown:.2f}×",
            "–" if row.found.low is None or row.found.high is None else f"{row.found.low:.2f}–{row.found.high:.2f}",
            time_text(row.found.stretched_ns),
        )
        for row in result.analysis.findings.contention.kernels[:MAX_DETAILS]
    )


def _rank_part(rank: RankFindings) -> _RankPart:
    step = typical_step(rank)
    trace = rank.trace
    name = f"Rank {trace.rank}" if trace.rank is not None else trace.file
    return _RankPart(
        title=name,
        note=f"{trace.file}: {trace.format}, {len(trace.events)} GPU events, {len(trace.calls)} collectives",
        streams_caption=""
        if step is None
        else f"The streams of step {step.number}, the one of median length."
        if trace.steps
        else "The streams.",
        steps=embedded_if_any(steps_figure(rank)),
        streams=None if step is None else embedded_if_any(streams_figure(rank, step)),
    )


def _detail(result: AnalyzeResult, row: CollectiveRow) -> _Detail:
    key, contention = row.key, result.analysis.findings.contention
    facts = [
        ("communicator", f"{key.communicator}, {key.num_ranks or 'unknown number of'} ranks"),
        ("calls", f"{row.count}, median {time_text(row.median_ns)}, shortest {time_text(row.min_ns)}"),
        ("launch", f"{key.num_channels or 'unknown'} channels, {key.num_threads or 'unknown'} threads"),
        ("knobs", _REACH_WORDS[key.reach.value]),
        ("exposed", f"{time_text(row.exposed_ns)} of {time_text(row.total_ns)}"),
        ("stretches computation by", time_text(contention.blame.get(key, 0.0))),
    ]
    if row.waiting_ns is not None:
        facts.append(("waiting for peers", time_text(row.waiting_ns)))
    return _Detail(
        title=collective_text(key),
        facts=tuple(facts),
        overlapped=tuple(
            cells
            for cells, kernel_class in zip(_in_one_line(contention_cells(result)), contention.classes, strict=True)
            if kernel_class.collective == key
        ),
    )
