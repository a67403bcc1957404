"""`lagom analyze`: traces become findings and advice, written down next to the trace with what was found drawn in."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import repeat
from pathlib import Path
from typing import Final

from lagom_overlap.analysis.advice import Advice
from lagom_overlap.analysis.advice_rules import WORTH, advice_of, looked_for, without_losses
from lagom_overlap.analysis.against import against
from lagom_overlap.analysis.collectives import unreachable_ns
from lagom_overlap.analysis.estimate import FillIn
from lagom_overlap.analysis.findings import Findings, analyse
from lagom_overlap.analysis.groups import TraceGroup, overlap_groups
from lagom_overlap.analysis.hta import hta_figures
from lagom_overlap.analysis.tracks import MAX_SPANS, GroupSpan, rank_timeline
from lagom_overlap.errors import LagomError, TraceError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord, job_command
from lagom_overlap.record import check_new_folder, utc_now
from lagom_overlap.results.analyze import Analysis, AnalyzeResult
from lagom_overlap.results.analyze_rows import collective_times, contention_times, group_times, part_times, rank_times
from lagom_overlap.results.conclusion import ELSEWHERE, UNKNOWN, line_under, online_line
from lagom_overlap.sim.what_if import WhatIf
from lagom_overlap.timeline import Timeline
from lagom_overlap.trace.chrome_writer import chrome_trace
from lagom_overlap.trace.files import DEFAULT_LIMITS, EXAMPLE, Limits, distinct_files
from lagom_overlap.trace.gpu_trace import GpuTrace, seconds
from lagom_overlap.trace.reader import ReadOptions, ReadProgress, compile_pattern, read_traces

FILES: Final = ("run.json", "report.html", "timeline.json")


class Compat(StrEnum):
    """Whose figures are printed in place of the exact ones."""

    HTA = "hta"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeRequest:
    """Traces and what the command line adds.

    `against` is another run to compare with; `is_anonymous` takes names out of everything that is written
    (`analysis/anonymous.py` says which); `num_jobs` processes read (see `read_traces`). `cluster` is the machine of the
    traces, a preset's name or file; None: a preset that has the GPU that they name.
    """

    traces: tuple[Path, ...]
    against: tuple[Path, ...] = ()
    is_anonymous: bool = False
    num_jobs: int = 1
    compat: Compat | None = None
    pattern: str | None = None
    cluster: str | None = None
    seed: int = 0
    out: Path | None = None
    limits: Limits = DEFAULT_LIMITS


def _ignore(_: ReadProgress) -> None:
    """Tells nobody."""


def run_analyze(request: AnalyzeRequest, observe: Callable[[ReadProgress], None] = _ignore) -> AnalyzeResult:
    """Reads, analyses, and writes the run folder if one was asked for; `observe` hears how far reading is.

    Raises:
        LagomError: if a trace cannot be read, the pattern is no pattern, or the folder cannot be made.
    """
    if request.out is not None:
        check_new_folder(request.out)
    machine = _machine(request)
    options = ReadOptions(
        pattern=compile_pattern(request.pattern),
        limits=request.limits,
        as_recorded=request.compat is Compat.HTA,  # HTA mends nothing
    )
    rename = _renaming(request)

    unread: list[str] = []

    def read(paths: tuple[Path, ...]) -> tuple[GpuTrace, ...]:
        held = read_traces(paths, options, observe, num_jobs=request.num_jobs, unread=unread)
        return tuple(rename(trace) for trace in held)

    files, repeated = distinct_files(request.traces)
    traces = read(files)
    if request.compat is Compat.HTA and not any(len(trace.events) for trace in traces):
        raise TraceError("--compat hta needs a trace with a timeline; HTA reads Kineto traces only")
    findings = analyse(traces, seed=request.seed, gpus_per_node=None if machine is None else machine.gpus_per_node)
    filled = _filled(findings, machine)
    warnings = _unread(unread, request) + findings.warnings + filled.sentences + _shown(repeated, request)
    findings = replace(findings, warnings=warnings)
    other = analyse(read(request.against), seed=request.seed) if request.against else None
    compared = None if other is None else against(findings, other, files=_names(other), seed=request.seed)
    groups = overlap_groups(findings)
    what_ifs = _what_ifs(findings, groups, machine)
    found = advice_of(findings)
    advice = without_losses(found, what_ifs)
    hta = tuple(hta_figures(trace) for trace in traces) if request.compat else ()
    result = AnalyzeResult(
        date=utc_now(),
        compat=request.compat.value if request.compat else None,
        ranks=tuple(map(rank_times, findings.ranks, hta or repeat(None))),
        collectives=collective_times(findings),
        contention=contention_times(findings.contention, filled),
        groups=group_times(groups),
        advice=advice,
        looked_for="" if advice else looked_for(findings, found),
        next_line=_next_line(request, findings, advice, has_groups=bool(groups)),
        what_ifs=what_ifs,
        unreachable_comm_s=seconds(unreachable_ns(findings.rows)),
        rank_skew_s=None if findings.rank_skew_ns is None else seconds(findings.rank_skew_ns),
        parts=part_times(findings),
        hangs=tuple(map(str, findings.hangs)),
        warnings=findings.warnings,
        files=_files(request),
        against=compared,
        measured=Analysis(findings=findings, groups=groups, hta=hta),
    )
    result = replace(result, said=result.summary(), measured=result.analysis)
    if request.out is not None:
        _write(request.out, request, result)
    return result


def _next_line(request: AnalyzeRequest, findings: Findings, advice: Sequence[Advice], *, has_groups: bool) -> str:
    """What to type next, by what was found: where no setting can gain anything, none is searched."""
    first = request.traces[0]
    if first == EXAMPLE:
        return "lagom tune --example  # what other settings would gain"
    if findings.hangs:
        return "py-spy dump --pid PID  # on a rank that did not come: where it stands instead"
    command = UNKNOWN if request.is_anonymous else job_command(first)
    timed = [rank for rank in findings.ranks if len(rank.trace.events)]
    launcher = ELSEWHERE if any(rank.trace.is_emulated for rank in timed) else ""
    observe = line_under(launcher, f"lagom run --observe -- {command}")
    online = line_under(launcher, f"lagom run --online -- {command}")
    if not timed:
        return f"{observe}  # records what overlaps"
    span_ns = sum(rank.measures.span_ns for rank in timed)
    comm_ns = sum(rank.measures.comm_ns for rank in timed)
    host_ns = sum(rank.measures.host_bound_ns for rank in timed)
    felt_ns = sum(rank.measures.exposed_comm_ns for rank in timed) + findings.contention.total.stretched_ns
    if not comm_ns:
        return f"{observe}  # on several ranks: no collective runs here"
    if advice and advice[0].rule in ("host_bound", "blocking_launches") and host_ns > felt_ns:
        return "lagom docs howto/launches  # the GPU waits for the CPU"
    if felt_ns < WORTH * span_ns:
        return "lagom docs howto/no_gain  # communication costs this step next to nothing"
    if any(rank.trace.is_cpu for rank in timed):  # the model is of GPUs; who is late changes with what else runs here
        own_calls = None if findings.frameworks else "calls"  # then the job itself calls them
        return f"{online_line(command, {'--adapters': own_calls})}  # searches in the job itself"
    if advice and advice[0].rule == "late_peers":
        return "lagom docs howto/no_gain  # ranks wait for a late one: even out the work"
    if unreachable_ns(findings.rows) >= comm_ns:
        return "lagom docs support  # no setting reaches the collectives that run here"
    if not has_groups:
        return f"{online}  # no model fits this trace: searches in the job itself"
    traces = "TRACE" if request.is_anonymous else shlex.quote(str(_whole(request)))
    return f"lagom tune --from-trace {traces}  # what other settings would gain"


def _whole(request: AnalyzeRequest) -> Path:
    """The traces as one path, as seen from the working folder: their folder, where all are of one."""
    first = request.traces[0]
    folders = {trace.parent for trace in request.traces}
    whole = first.parent if len(request.traces) > 1 and len(folders) == 1 else first
    return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole


def _unread(lines: list[str], request: AnalyzeRequest) -> tuple[str, ...]:
    """The files that could not be read, by name unless names are to be left out; of the example, what it is."""
    if EXAMPLE in request.traces:
        return (f"{EXAMPLE.name}: a made-up rank of an FSDP2 job on eight H100; nothing in it is measured",)
    if request.is_anonymous and lines:
        return (f"files that cannot be read are left out: {len(lines)}",)
    return tuple(lines)


def _shown(repeated: tuple[str, ...], request: AnalyzeRequest) -> tuple[str, ...]:
    """What is said of files that were named twice: an anonymous request names none."""
    if not (repeated and request.is_anonymous):
        return repeated
    return (f"{len(repeated)} traces were named twice and count once.",)


def _renaming(request: AnalyzeRequest) -> Callable[[GpuTrace], GpuTrace]:
    """What becomes of a trace before anything is computed of it."""
    if not request.is_anonymous:
        return lambda trace: trace
    from lagom_overlap.analysis.anonymous import Anonymiser  # noqa: PLC0415 - seldom asked for

    return Anonymiser().trace


def _machine(request: AnalyzeRequest) -> Cluster | None:
    """The machine that the user names, its own tables checked before a trace is read."""
    if request.cluster is None:
        return None
    from lagom_overlap.jobfile.spec import ClusterTable  # noqa: PLC0415 - seldom asked for, with the cost model behind it
    from lagom_overlap.jobfile.step import stated_cluster  # noqa: PLC0415

    return stated_cluster(ClusterTable(preset=request.cluster))


def _filled(findings: Findings, machine: Cluster | None) -> FillIn:
    """What the cost model estimates of kernels without a twin."""
    if not findings.contention.uncovered_ns:
        return FillIn.nothing()
    from lagom_overlap.analysis.fill_in import fill_in  # noqa: PLC0415 - the cost model takes its time to import

    try:
        return fill_in(findings, machine)
    except (LagomError, ValueError):  # a machine that the model does not hold: what is measured stands without it
        return FillIn.nothing()


def _what_ifs(findings: Findings, groups: tuple[TraceGroup, ...], machine: Cluster | None) -> tuple[WhatIf, ...]:
    """Whether a change is worth it; nothing of a trace in which nothing overlaps."""
    if not groups:
        return ()
    from lagom_overlap.analysis.what_if import traced_what_ifs  # noqa: PLC0415 - the cost model takes its time to import

    try:
        return traced_what_ifs(findings, groups, machine)
    except (LagomError, ValueError):  # as above
        return ()


def _record(request: AnalyzeRequest) -> dict[str, object]:
    """The request as the run folder keeps it."""
    bare = request.is_anonymous
    return {
        "traces": [f"trace {n}" if bare else path.name for n, path in enumerate(request.traces, start=1)],
        "against": [f"trace {n}" if bare else path.name for n, path in enumerate(request.against, start=1)],
        "compat": request.compat.value if request.compat else None,
        "pattern": None if bare else request.pattern,
        "cluster": None if bare else request.cluster,
        "seed": request.seed,
        "anonymise": bare,
    }


def _names(findings: Findings) -> tuple[str, ...]:
    """The files of a run."""
    return tuple(dict.fromkeys(rank.trace.file for rank in findings.ranks))


def _files(request: AnalyzeRequest) -> tuple[Path, ...]:
    if request.out is None:
        return ()
    return tuple(Path(name) if request.is_anonymous else request.out / name for name in FILES)


def _group_spans(groups: tuple[TraceGroup, ...]) -> tuple[GroupSpan, ...]:
    """Every occurrence of every group, as the timeline's track takes them."""
    return tuple(
        (f"{group.name} ({group.bound}-bound)", start, end, index)
        for group in groups
        for index, start, end in group.occurrences
    )


def _timelines_of(findings: Findings, groups: tuple[GroupSpan, ...] = ()) -> dict[str, Timeline]:
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


def _write(folder: Path, request: AnalyzeRequest, result: AnalyzeResult) -> None:
    """Writes the run folder: run.json, report.html, timeline.json; of an anonymous request nothing of the machine.

    What is written goes to others, whom the folders of this machine do not concern.

    Raises:
        OutputError: if the folder cannot be made or written.
    """
    from lagom_overlap.report.analyze.page import render_analysis  # noqa: PLC0415 - plotly takes longer than reading

    seed, whole = request.seed, _whole(request)
    kept = (
        replace(result, next_line=result.next_line.replace(str(whole), whole.name), measured=result.analysis)
        if whole.is_absolute()
        else result
    )
    spans = _group_spans(result.analysis.groups)
    RunFolder.create(folder, RunKind.ANALYZE).write(
        RunRecord.now(
            RunKind.ANALYZE, seed=seed, request=_record(request), date=result.date, is_anonymous=request.is_anonymous
        ),
        kept,
        {
            "report.html": lambda: render_analysis(kept).encode(),
            "timeline.json": lambda: chrome_trace(_timelines_of(result.analysis.findings, spans)),
        },
    )
