"""`lagom analyze`: traces become findings and advice, written down beside the trace with what was found drawn in."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap import __version__
from lagom_overlap.analysis.advice import Advice, advice_of
from lagom_overlap.analysis.collectives import unreachable_ns
from lagom_overlap.analysis.findings import Findings, analyse
from lagom_overlap.analysis.groups import overlap_groups
from lagom_overlap.analysis.hta import hta_figures
from lagom_overlap.analysis.tracks import MAX_SPANS, rank_timeline
from lagom_overlap.errors import TraceError
from lagom_overlap.job.analyze_groups import groups_json
from lagom_overlap.job.analyze_result import AnalyzeJson, advice_json, collectives_json, contention_json, rank_json
from lagom_overlap.record import create_folder, describe_machine, package_versions, utc_now, write_private
from lagom_overlap.report.analyze_page import render_analysis
from lagom_overlap.report.analyze_report import AnalyzeReport
from lagom_overlap.timeline import Timeline
from lagom_overlap.trace.chrome import chrome_trace
from lagom_overlap.trace.files import DEFAULT_LIMITS, Limits
from lagom_overlap.trace.gpu_trace import NS_PER_S
from lagom_overlap.trace.reading import ReadOptions, compile_pattern, read_traces

_FILES: Final = ("run.json", "report.html", "timeline.json")


class Compat(StrEnum):
    """Whose figures are printed in place of the exact ones."""

    HTA = "hta"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeRequest:
    """Traces and what the command line says beside them."""

    traces: tuple[Path, ...]
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


def _ignore(_: str) -> None:
    """Tells nobody."""


def run_analyze(request: AnalyzeRequest, observe: Callable[[str], None] = _ignore) -> AnalyzeResult:
    """Reads, analyses, and writes the run folder if one was asked for; `observe` hears of every trace that was read.

    Raises:
        LagomError: if a trace cannot be read, the pattern is no pattern, or the folder cannot be made.
    """
    pattern = compile_pattern(request.pattern)
    traces = read_traces(request.traces, ReadOptions(pattern=pattern, limits=request.limits), observe)
    if request.compat is Compat.HTA and not any(len(trace.events) for trace in traces):
        raise TraceError("--compat hta needs a trace with a timeline; HTA reads Kineto traces only")
    findings = analyse(traces, seed=request.seed)
    advice = advice_of(findings)
    result = _json(request, findings, advice)
    report = AnalyzeReport(
        findings=findings,
        advice=advice,
        date=utc_now(),
        compat=request.compat.value if request.compat else None,
        hta=tuple(hta_figures(trace) for trace in traces) if request.compat else (),
        unreachable_s=result.unreachable_comm_s,
    )
    if request.out is not None:
        _write(request, request.out, result, report)
    return AnalyzeResult(json=result, report=report, folder=request.out)


def _json(request: AnalyzeRequest, findings: Findings, advice: tuple[Advice, ...]) -> AnalyzeJson:
    hta = request.compat is Compat.HTA
    return AnalyzeJson(
        tool="lagom analyze",
        version=__version__,
        compat=request.compat.value if request.compat else None,
        ranks=[rank_json(rank, hta_figures(rank.trace) if hta else None) for rank in findings.ranks],
        collectives=collectives_json(findings),
        contention=contention_json(findings.contention),
        groups=groups_json(overlap_groups(findings)),
        advice=advice_json(advice),
        unreachable_comm_s=unreachable_ns(findings.rows) / NS_PER_S,
        warnings=list(findings.warnings),
        files=[] if request.out is None else [str(request.out / name) for name in _FILES],
    )


def timelines_of(findings: Findings) -> dict[str, Timeline]:
    """One timeline for every rank that has one, by a name that no two share."""
    timed = [index for index, rank in enumerate(findings.ranks) if len(rank.trace.events)]
    room = MAX_SPANS // max(1, len(timed))
    found: dict[str, Timeline] = {}
    for index in timed:
        trace = findings.ranks[index].trace
        name = f"rank {trace.rank}" if trace.rank is not None else trace.file
        found[name if name not in found else f"{name} ({index})"] = rank_timeline(findings, index, room=room)
    return found


def _write(request: AnalyzeRequest, folder: Path, result: AnalyzeJson, report: AnalyzeReport) -> None:
    create_folder(folder)
    record = {
        "request": {
            "traces": [path.name for path in request.traces],
            "compat": result.compat,
            "pattern": request.pattern,
            "seed": request.seed,
        },
        "result": result,
        "machine": describe_machine(),
        "versions": package_versions(),
        "date": report.date,
    }
    write_private(folder / "run.json", msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    write_private(folder / "report.html", render_analysis(report).encode())
    write_private(folder / "timeline.json", chrome_trace(timelines_of(report.findings)))
