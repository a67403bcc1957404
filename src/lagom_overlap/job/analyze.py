"""`lagom analyze`: traces become findings and advice, written down beside the trace with what was found drawn in."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap import __version__
from lagom_overlap.analysis.advice import Advice, advice_of
from lagom_overlap.analysis.against import against
from lagom_overlap.analysis.anonymous import Anonymiser
from lagom_overlap.analysis.collectives import unreachable_ns
from lagom_overlap.analysis.fill_in import FillIn, fill_in
from lagom_overlap.analysis.findings import Findings, analyse
from lagom_overlap.analysis.groups import TraceGroup, overlap_groups
from lagom_overlap.analysis.hta import hta_figures
from lagom_overlap.analysis.tracks import MAX_SPANS, GroupSpan, rank_timeline
from lagom_overlap.errors import TraceError
from lagom_overlap.job.analyze_against import against_json
from lagom_overlap.job.analyze_groups import groups_json
from lagom_overlap.job.analyze_result import AnalyzeJson, advice_json, collectives_json, contention_json, rank_json
from lagom_overlap.job.analyze_tables import Record, tables_of
from lagom_overlap.record import create_folder, describe_machine, package_versions, utc_now, write_private
from lagom_overlap.report.analyze_report import AnalyzeReport
from lagom_overlap.timeline import Timeline
from lagom_overlap.trace.chrome import chrome_trace
from lagom_overlap.trace.files import DEFAULT_LIMITS, Limits
from lagom_overlap.trace.gpu_trace import NS_PER_S, GpuTrace
from lagom_overlap.trace.reading import ReadOptions, ReadProgress, compile_pattern, read_traces

_FILES: Final = ("run.json", "report.html", "timeline.json")


class Compat(StrEnum):
    """Whose figures are printed in place of the exact ones."""

    HTA = "hta"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeRequest:
    """Traces and what the command line says beside them.

    `against` is another run to compare with; `is_anonymous` takes names out of everything that is written
    (`analysis/anonymous.py` says which); `num_jobs` processes read (see `read_traces`).
    """

    traces: tuple[Path, ...]
    against: tuple[Path, ...] = ()
    is_anonymous: bool = False
    num_jobs: int = 1
    compat: Compat | None = None
    pattern: str | None = None
    seed: int = 0
    out: Path | None = None
    limits: Limits = DEFAULT_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeResult:
    """What was found: the object that is printed, the findings behind it, the folder (None where none was asked)."""

    json: AnalyzeJson
    report: AnalyzeReport
    folder: Path | None

    def tables(self) -> dict[str, list[Record]]:
        """Rows of plain types for data frames, by the table's name: see `tables_of`."""
        return tables_of(self.json, self.report.findings)


def _ignore(_: ReadProgress) -> None:
    """Tells nobody."""


def run_analyze(request: AnalyzeRequest, observe: Callable[[ReadProgress], None] = _ignore) -> AnalyzeResult:
    """Reads, analyses, and writes the run folder if one was asked for; `observe` hears how far reading is.

    Raises:
        LagomError: if a trace cannot be read, the pattern is no pattern, or the folder cannot be made.
    """
    options = ReadOptions(pattern=compile_pattern(request.pattern), limits=request.limits)
    anonymiser = Anonymiser() if request.is_anonymous else None

    def read(paths: tuple[Path, ...]) -> tuple[GpuTrace, ...]:
        found = read_traces(paths, options, observe, num_jobs=request.num_jobs)
        return found if anonymiser is None else tuple(anonymiser.trace(trace) for trace in found)

    traces = read(request.traces)
    if request.compat is Compat.HTA and not any(len(trace.events) for trace in traces):
        raise TraceError("--compat hta needs a trace with a timeline; HTA reads Kineto traces only")
    findings = analyse(traces, seed=request.seed)
    filled = fill_in(findings)
    findings = replace(findings, warnings=findings.warnings + filled.sentences)
    other = analyse(read(request.against), seed=request.seed) if request.against else None
    compared = None if other is None else against(findings, other, seed=request.seed)
    advice = advice_of(findings)
    groups = overlap_groups(findings)
    result = _json(request, findings, filled, groups, advice)
    if compared is not None and other is not None:
        files = tuple(dict.fromkeys(rank.trace.file for rank in other.ranks))
        result = msgspec.structs.replace(result, against=against_json(compared, files))
    report = AnalyzeReport(
        findings=findings,
        advice=advice,
        date=utc_now(),
        compat=request.compat.value if request.compat else None,
        hta=tuple(hta_figures(trace) for trace in traces) if request.compat else (),
        unreachable_s=result.unreachable_comm_s,
        against=compared,
    )
    if request.out is not None:
        _write(request, request.out, result, report, _group_spans(groups))
    return AnalyzeResult(json=result, report=report, folder=request.out)


def _json(
    request: AnalyzeRequest,
    findings: Findings,
    filled: FillIn,
    groups: tuple[TraceGroup, ...],
    advice: tuple[Advice, ...],
) -> AnalyzeJson:
    hta = request.compat is Compat.HTA
    return AnalyzeJson(
        tool="lagom analyze",
        version=__version__,
        compat=request.compat.value if request.compat else None,
        ranks=[rank_json(rank, hta_figures(rank.trace) if hta else None) for rank in findings.ranks],
        collectives=collectives_json(findings),
        contention=contention_json(findings.contention, filled),
        groups=groups_json(groups),
        advice=advice_json(advice),
        unreachable_comm_s=unreachable_ns(findings.rows) / NS_PER_S,
        warnings=list(findings.warnings),
        files=_files(request),
    )


def _group_spans(groups: tuple[TraceGroup, ...]) -> tuple[GroupSpan, ...]:
    """Every occurrence of every group, as the timeline's track takes them."""
    return tuple(
        (f"{group.name} ({group.bound}-bound)", start, end, index)
        for group in groups
        for index, start, end in group.occurrences
    )


def _files(request: AnalyzeRequest) -> list[str]:
    if request.out is None:
        return []
    return [name if request.is_anonymous else str(request.out / name) for name in _FILES]


def timelines_of(findings: Findings, groups: tuple[GroupSpan, ...] = ()) -> dict[str, Timeline]:
    """One timeline for every rank that has one, by a name that no two share."""
    timed = [index for index, rank in enumerate(findings.ranks) if len(rank.trace.events)]
    room = MAX_SPANS // max(1, len(timed))
    found: dict[str, Timeline] = {}
    for index in timed:
        trace = findings.ranks[index].trace
        name = f"rank {trace.rank}" if trace.rank is not None else trace.file
        found[name if name not in found else f"{name} ({index})"] = rank_timeline(
            findings, index, room=room, groups=groups
        )
    return found


def _write(
    request: AnalyzeRequest, folder: Path, result: AnalyzeJson, report: AnalyzeReport, groups: tuple[GroupSpan, ...]
) -> None:
    from lagom_overlap.report.analyze_page import render_analysis  # noqa: PLC0415 - plotly takes longer than reading

    create_folder(folder)
    bare = request.is_anonymous
    record = {
        "request": {
            "traces": [f"trace {n}" if bare else path.name for n, path in enumerate(request.traces, start=1)],
            "against": [f"trace {n}" if bare else path.name for n, path in enumerate(request.against, start=1)],
            "compat": result.compat,
            "pattern": None if bare else request.pattern,
            "seed": request.seed,
            "anonymise": bare,
        },
        "result": result,
        "machine": {} if bare else describe_machine(),
        "versions": package_versions(),
        "date": report.date,
    }
    write_private(folder / "run.json", msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    write_private(folder / "report.html", render_analysis(report).encode())
    write_private(folder / "timeline.json", chrome_trace(timelines_of(report.findings, groups)))
