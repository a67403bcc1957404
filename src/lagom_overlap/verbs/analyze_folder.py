"""The run folder of `lagom analyze`: run.json, report.html, timeline.json."""

from collections.abc import Mapping
from pathlib import Path

from lagom_overlap.analysis.findings import Findings
from lagom_overlap.analysis.groups import TraceGroup
from lagom_overlap.analysis.tracks import MAX_SPANS, GroupSpan, rank_timeline
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.report.analyze.page import render_analysis
from lagom_overlap.results.analyze import AnalyzeResult
from lagom_overlap.timeline import Timeline
from lagom_overlap.trace.chrome_writer import chrome_trace


def _group_spans(groups: tuple[TraceGroup, ...]) -> tuple[GroupSpan, ...]:
    """Every occurrence of every group, as the timeline's track takes them."""
    return tuple(
        (f"{group.name} ({group.bound}-bound)", start, end, index)
        for group in groups
        for index, start, end in group.occurrences
    )


def timelines_of(findings: Findings, groups: tuple[GroupSpan, ...] = ()) -> dict[str, Timeline]:
    """One timeline for every rank that has one, by a name that no two share."""
    timed = [index for index, rank in enumerate(findings.ranks) if len(rank.trace.events)]
    room = MAX_SPANS // max(1, len(timed))
    timelines: dict[str, Timeline] = {}
    for index in timed:
        trace = findings.ranks[index].trace
        name = f"rank {trace.rank}" if trace.rank is not None else trace.file
        timelines[name if name not in timelines else f"{name} ({index})"] = rank_timeline(
            findings, index, room=room, groups=groups
        )
    return timelines


def write_analysis(
    folder: Path,
    request: Mapping[str, object],
    result: AnalyzeResult,
    *,
    seed: int,
) -> None:
    """Writes the folder; of an anonymous request nothing of the machine.

    Raises:
        OutputError: if the folder cannot be made or written.
    """
    is_anonymous = bool(request["anonymise"])
    spans = _group_spans(result.analysis.groups)
    RunFolder.create(folder, RunKind.ANALYZE).write(
        RunRecord.now(RunKind.ANALYZE, seed=seed, request=request, date=result.date, is_anonymous=is_anonymous),
        result,
        {
            "report.html": lambda: render_analysis(result).encode(),
            "timeline.json": lambda: chrome_trace(timelines_of(result.analysis.findings, spans)),
        },
    )
