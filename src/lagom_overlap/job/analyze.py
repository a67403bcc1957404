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
from lagom_overlap.analysis.collectives import unreachable_ns
from lagom_overlap.analysis.estimate import FillIn
from lagom_overlap.analysis.findings import Findings, analyse
from lagom_overlap.analysis.groups import TraceGroup, overlap_groups
from lagom_overlap.analysis.hta import hta_figures
from lagom_overlap.errors import TraceError
from lagom_overlap.job.analyze_against import against_json
from lagom_overlap.job.analyze_groups import groups_json
from lagom_overlap.job.analyze_result import AnalyzeJson, advice_json, collectives_json, contention_json, rank_json
from lagom_overlap.job.analyze_tables import Record, tables_of
from lagom_overlap.record import check_new_folder, utc_now
from lagom_overlap.report.analyze_report import AnalyzeReport
from lagom_overlap.trace.files import DEFAULT_LIMITS, Limits
from lagom_overlap.trace.gpu_trace import NS_PER_S, GpuTrace
from lagom_overlap.trace.reading import ReadOptions, ReadProgress, compile_pattern, read_traces

FILES: Final = ("run.json", "report.html", "timeline.json")


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
    if request.out is not None:
        check_new_folder(request.out)
    options = ReadOptions(pattern=compile_pattern(request.pattern), limits=request.limits)
    rename = _renaming(request)

    def read(paths: tuple[Path, ...]) -> tuple[GpuTrace, ...]:
        return tuple(rename(trace) for trace in read_traces(paths, options, observe, num_jobs=request.num_jobs))

    traces = read(request.traces)
    if request.compat is Compat.HTA and not any(len(trace.events) for trace in traces):
        raise TraceError("--compat hta needs a trace with a timeline; HTA reads Kineto traces only")
    findings = analyse(traces, seed=request.seed)
    filled = _filled(findings)
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
        groups=groups,
    )
    if request.out is not None:
        from lagom_overlap.job.analyze_folder import write_analysis  # noqa: PLC0415 - plotly takes longer than reading

        write_analysis(request.out, _record(request), result, report)
    return AnalyzeResult(json=result, report=report, folder=request.out)


def _renaming(request: AnalyzeRequest) -> Callable[[GpuTrace], GpuTrace]:
    """What becomes of a trace before anything is computed of it."""
    if not request.is_anonymous:
        return lambda trace: trace
    from lagom_overlap.analysis.anonymous import Anonymiser  # noqa: PLC0415 - seldom asked for

    return Anonymiser().trace


def _filled(findings: Findings) -> FillIn:
    """What the cost model estimates of kernels without a twin."""
    if not findings.contention.uncovered_ns:
        return FillIn.nothing()
    from lagom_overlap.analysis.fill_in import fill_in  # noqa: PLC0415 - the cost model takes its time to import

    return fill_in(findings)


def _record(request: AnalyzeRequest) -> dict[str, object]:
    """The request as the run folder keeps it."""
    bare = request.is_anonymous
    return {
        "traces": [f"trace {n}" if bare else path.name for n, path in enumerate(request.traces, start=1)],
        "against": [f"trace {n}" if bare else path.name for n, path in enumerate(request.against, start=1)],
        "compat": request.compat.value if request.compat else None,
        "pattern": None if bare else request.pattern,
        "seed": request.seed,
        "anonymise": bare,
    }


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


def _files(request: AnalyzeRequest) -> list[str]:
    if request.out is None:
        return []
    return [name if request.is_anonymous else str(request.out / name) for name in FILES]
