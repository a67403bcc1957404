"""`lagom tune --from-trace`: traces become groups and a fitted model, which are tuned like any job; nothing is run.

Reads the traces, finds the overlap groups, fits the contention model to them (`analysis/trace_fit.py`), and gives
`verbs/tune.py` a job whose backend is the fitted model. Every figure is labelled a prediction; what the
trace does not determine is named in the notes.

How far the model is off is measured on what it did not see: it is fitted to each half of the windows (kernels,
collectives, makespans), and predicts the makespans of the other half.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Final

import msgspec

from lagom_overlap.analysis.findings import Findings, analyse
from lagom_overlap.analysis.groups import GroupedTrace, grouped
from lagom_overlap.analysis.trace_fit import TraceFit, default_of, fit_trace
from lagom_overlap.analysis.trace_gpu import cluster_of_trace, nearest_cluster
from lagom_overlap.analysis.traced_job import TracedGroup, traced_job
from lagom_overlap.backends.traced import TracedBackend, TracedDefault
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost import ContentionModel
from lagom_overlap.cost.fit import FittedConstant
from lagom_overlap.errors import JobError, TraceError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.job import Job, PredictedJob
from lagom_overlap.jobfile.run_folder import job_command
from lagom_overlap.jobfile.spec import JobSpec, JobTable, TuneTable
from lagom_overlap.nccl_plugin.support import NcclVersion
from lagom_overlap.results.tune import FitErrors
from lagom_overlap.trace.gpu_trace import NS_PER_S, KnobReach
from lagom_overlap.trace.reader import read_traces
from lagom_overlap.tuners.tied import Tie
from lagom_overlap.units import format_bytes, format_percent, format_seconds

ASSUMED_NCCL: Final[NcclVersion] = (2, 28, 9)
"""Where no trace names the release: one under which a tuner sets no chunk."""
MAX_STEP_ERROR: Final = 0.05
"""Of the step: where the model is off by more, nothing is predicted from it. Chosen, not measured."""
_NCCL: Final = re.compile(r"(\d{1,2})\.(\d{1,3})(?:\.(\d{1,3}))?")


class TracedGroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group: its makespan in the trace and by the fitted model, and kernels whose time alone is estimated."""

    name: str
    bound: str
    per_step: float
    measured_s: float
    simulated_s: float
    num_kernels: int
    num_estimated: int


class TracedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of the trace, named as the plug-in can tell it at run time: by ranks, kind and bytes.

    `communicator` is the trace's name for it; of equal ranks the plug-in goes by the order of creation, which no trace
    has. So communicators of equal ranks share their settings.
    """

    communicator: str
    num_ranks: int
    kind: CollectiveKind
    num_bytes: int


class TracedSite(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the trace's collectives one of a group is, and its places in the step; empty: all calls of its kind."""

    group: str
    comm: str
    call: TracedCall
    places: tuple[int, ...] = ()


class TracedCycle(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of 1 MiB and more of a step on a communicator: kind and bytes, in the order of issue."""

    communicator: str
    num_ranks: int
    calls: tuple[tuple[CollectiveKind, int], ...]


class FromTraceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run folder keeps of the trace it was predicted from."""

    traces: list[str]
    fit: tuple[FittedConstant, ...]
    unidentified: tuple[str, ...]
    fit_mean_abs_error: float
    step_s: float
    step_error: float
    """How far the model's step is off the measured one, as a share; on windows that it was not fitted to, if any."""
    groups: list[TracedGroupRow]
    calls: list[TracedCall]
    sites: list[TracedSite]
    cycles: list[TracedCycle]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromTraceRequest:
    """Traces, and a job whose [tune], [cluster] and [cost] count; None: defaults, and the preset of the trace's GPU."""

    traces: tuple[Path, ...]
    spec: JobSpec | None = None
    seed: int | None = None


def _spec_of(request: FromTraceRequest) -> JobSpec:
    """The job's own tables; of a job file its groups or its model are replaced by the trace's."""
    if request.spec is None:
        name = request.traces[0].name.partition(".")[0] or "trace"
        return JobSpec(job=JobTable(name=name), tune=TuneTable())
    return msgspec.structs.replace(request.spec, model=None, parallel=None, group=[])


def _cluster(job: Job, findings: Findings) -> tuple[Cluster, tuple[str, ...]]:
    """The job's cluster, the preset of the trace's GPU, or the nearest with a sentence that says so.

    With as many nodes as the collectives' ranks need.
    """
    named = job.cluster
    cluster = named or next((c for rank in findings.ranks if (c := cluster_of_trace(rank.trace)) is not None), None)
    most = max((row.key.num_ranks for row in findings.rows), default=1)
    notes: tuple[str, ...] = ()
    if cluster is None:
        gpu = next((rank.trace.gpu_name for rank in findings.ranks if rank.trace.gpu_name), "not named")
        cluster = next((c for rank in findings.ranks if (c := nearest_cluster(rank.trace, most)) is not None), None)
        if cluster is None:
            raise JobError(
                f"no preset has the trace's GPU ({gpu}) or one like it: give a job file with [cluster] preset = ... "
                "with --from-trace, or gpu = a file that states num_sms and hbm_bytes_per_s"
            )
        notes = (
            f"No preset has the trace's GPU ({gpu}): the nearest by its SMs, {cluster.name}, stands in with "
            f"{cluster.gpu.num_sms} SMs. The wire is fitted to the trace; memory bandwidth "
            f"({cluster.gpu.hbm_bytes_per_s / 1e12:.2f} TB/s) and cache are the preset's. To state your own: [cluster] "
            "gpu = a file with num_sms and hbm_bytes_per_s.",
        )
    needed = max(1, -(-most // cluster.gpus_per_node))
    return cluster if named is not None else replace(cluster, num_nodes=max(needed, cluster.num_nodes)), notes


def _defaults(traced: Sequence[TracedGroup], model: ContentionModel) -> dict[str, TracedDefault]:
    defaults = {traced_group.group.name: default_of(traced_group, model) for traced_group in traced}
    most: dict[str, int] = {}
    for traced_group in traced:
        for op, config in zip(traced_group.group.comms, defaults[traced_group.group.name], strict=True):
            most[op.communicator] = max(most.get(op.communicator, 1), config.num_channels or 1)
    return {
        traced_group.group.name: TracedDefault(
            configs=defaults[traced_group.group.name],
            reaches=traced_group.reaches,
            most_channels=tuple(most[op.communicator] for op in traced_group.group.comms),
        )
        for traced_group in traced
    }


def _nccl_of(findings: Findings) -> NcclVersion | None:
    """The release of NCCL that the job ran; None where no trace says it."""
    matches = (_NCCL.match(rank.trace.nccl_version) for rank in findings.ranks)
    named = next((match for match in matches if match is not None), None)
    return None if named is None else (int(named[1]), int(named[2]), int(named[3] or 0))


def _route_note(nccl: NcclVersion | None) -> str:
    release = ".".join(map(str, nccl or ASSUMED_NCCL))
    why = "" if nccl is not None else ", which is assumed: the trace does not name it"
    return (
        f"Only what lagom can set in a running job is tried: under NCCL {release}{why}, no more channels than the "
        "trace shows on a communicator, and of all-to-alls the channels alone."
    )


def _held_out_words(errors: FitErrors) -> str:
    """On what the error of a step was measured."""
    num = len(errors.num_held_out)
    if errors.num_seen == num:
        return "on what it was fitted to: no group ran twice here, so no gain has an interval; record more steps"
    some = f" ({errors.num_seen} of {num} groups ran once, and count with what they were fitted to)"
    return f"where each half of the windows is predicted by a fit to the other{some if errors.num_seen else ''}"


def _notes(fit: TraceFit, findings: Findings, errors: FitErrors) -> tuple[str, ...]:
    job = fit.job
    held_s = sum(traced_group.makespan_s * traced_group.source.per_step for traced_group in job.groups)
    step_s = errors.step_s
    estimated = sum(traced_group.num_estimated for traced_group in job.groups)
    notes = [
        "Predicted from a trace: nothing was run. The times come from the contention model, fitted to the trace.",
        f"The fitted model gives the groups' makespans with a mean error of {format_percent(fit.mean_abs_error)}; of a "
        f"step it is {format_percent(errors.share)} off, {_held_out_words(errors)}.",
        f"The groups take {format_seconds(held_s)} of a step of {format_seconds(step_s)}; the rest stays as it is.",
        _route_note(_nccl_of(findings)),
        "A join that the computation reached after its collective had ended leaves no trace: how much slower a hidden "
        "collective may become is not known.",
    ]
    if _is_emulated(findings):
        notes[0] += " The trace is of emulated GPUs, whose times are a cost model's, too."
    if fit.unidentified:
        notes.append(
            f"The trace does not determine {', '.join(fit.unidentified)} each by itself: what they do together is "
            "fitted, to the settings that ran."
        )
    if estimated:
        notes.append(f"{estimated} kernels never ran alone: the model estimates their time without collectives.")
    return (*notes, *job.left_out)


def _errors(fit: TraceFit, halves: Sequence[TraceFit], trace: GroupedTrace, findings: Findings) -> FitErrors:
    """How far each group is off: the two halves predict each other, or the fit what it saw where there are none.

    A fit to every second window cannot tell that later steps differ from earlier ones: that difference counts, too.
    """
    traced = fit.job.groups
    measured = [
        {traced_group.group.name: traced_group.makespan_s for traced_group in half.job.groups} for half in halves
    ]
    simulated = [half.makespans_s() for half in halves]
    in_sample = fit.makespans_s()
    error_s, num_held_out = {}, {}
    for traced_group in traced:
        name = traced_group.group.name
        crossed = [
            abs(ours[name] - theirs[name])
            for ours, theirs in zip(simulated, reversed(measured), strict=True)
            if name in ours and name in theirs
        ]
        seen = abs(in_sample[name] - traced_group.makespan_s)
        error_s[name] = max(trace.drifts_s[name], *(crossed or [seen]))
        num_held_out[name] = traced_group.source.num_occurrences if crossed else 0
    return FitErrors(
        step_s=_step_s(findings),
        is_emulated=_is_emulated(findings),
        per_step={traced_group.group.name: traced_group.source.per_step for traced_group in traced},
        error_s=error_s,
        num_held_out=num_held_out,
    )


def _check_modelled(
    errors: FitErrors, traced: Sequence[TracedGroup], drifts_s: Mapping[str, float], command: str
) -> None:
    """Refuses a model whose step is not the measured one.

    Raises:
        TraceError: if it is off by more than `MAX_STEP_ERROR`.
    """
    if errors.share <= MAX_STEP_ERROR:
        return
    worst = max(traced, key=lambda held: errors.per_step[held.group.name] * errors.error_s[held.group.name])
    name = worst.group.name
    calls = ", ".join(f"{op.collective.kind} {format_bytes(op.collective.num_bytes)}" for op in worst.group.comms[:3])
    drifts = errors.error_s[name] <= drifts_s[name]
    drift = ", as its later steps differ from its earlier ones" if drifts else ""
    on = "what it was fitted to" if errors.num_seen == len(traced) else "windows that it was not fitted to"
    raise TraceError(
        f"this trace cannot be modelled, because on {on} the fitted model is "
        f"{format_percent(errors.share)} of the step off what was measured ({format_percent(MAX_STEP_ERROR, 0)} are "
        f"allowed), most of it in {name} ({calls}: {format_seconds(worst.makespan_s)} measured, off by "
        f"{format_seconds(errors.error_s[name])}{drift}); "
        f"measure instead: lagom run --online -- {command}"
    )


def _is_emulated(findings: Findings) -> bool:
    return any(rank.trace.is_emulated for rank in findings.ranks)


def _step_s(findings: Findings) -> float:
    """The length of a step of the average rank."""
    spans = sum(step.measures.span_ns for rank in findings.ranks for step in rank.steps)
    return spans / (findings.num_windows * NS_PER_S)


def _calls(findings: Findings) -> list[TracedCall]:
    """All collectives of the trace that say what they are, each once."""
    calls = {
        TracedCall(
            communicator=row.key.communicator, num_ranks=row.key.num_ranks, kind=row.kind, num_bytes=row.key.num_bytes
        )
        for row in findings.rows
        if row.kind is not None
    }
    return sorted(calls, key=lambda call: (call.communicator, call.num_ranks, call.kind, call.num_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sites:
    """Where the collectives of the groups are in a running job.

    `places` has those of each collective that a running job tells from all others of its kind; `ties` the collectives
    that it cannot tell apart. `notes` are for people.
    """

    cycles: tuple[TracedCycle, ...]
    places: Mapping[tuple[str, int], tuple[int, ...]]
    ties: tuple[Tie, ...]
    notes: tuple[str, ...]


def _sites(traced: Sequence[TracedGroup], findings: Findings) -> _Sites:
    """Tells the collectives of groups apart by communicator, kind, bytes and place in the step, as far as it goes.

    A trace does not say in which order communicators were created, so those of equal ranks are one to a running job.
    """
    named = {(row.key.communicator, row.key.num_ranks) for row in findings.rows if row.kind is not None}
    alike = Counter(num_ranks for _, num_ranks in named)
    asked_by: dict[tuple[int, CollectiveKind, int], list[tuple[str, int, tuple[int, ...], str]]] = defaultdict(list)
    for traced_group in traced:
        for at, (op, comm) in enumerate(zip(traced_group.group.comms, traced_group.source.comms, strict=True)):
            if traced_group.reaches[at] is not KnobReach.NONE:
                asked = op.collective.num_ranks, op.collective.kind, op.collective.num_bytes
                asked_by[asked].append((traced_group.group.name, at, comm.places, op.communicator))
    places: dict[tuple[str, int], tuple[int, ...]] = {}
    ties: list[Tie] = []
    notes: list[str] = []
    for (num_ranks, kind, num_bytes), calls in asked_by.items():
        every = [place for _, _, own, _ in calls for place in own]
        if alike[num_ranks] == 1 and all(own for _, _, own, _ in calls) and len(set(every)) == len(every):
            places |= {(group, at): own for group, at, own, _ in calls}
            continue
        if len(calls) == 1:
            continue
        ties.append(tuple((group, at) for group, at, _, _ in calls))
        which = ", ".join(dict.fromkeys(name for _, _, _, name in calls))
        why = (
            f"the trace has {alike[num_ranks]} communicators of {num_ranks} ranks and not their order of creation"
            if alike[num_ranks] > 1
            else "their places in the step cannot be told from the trace"
        )
        notes.append(
            f"{kind} of {format_bytes(num_bytes)} on {which}: {len(calls)} collectives of the groups share one "
            f"setting, as {why}."
        )
    cycles = tuple(
        TracedCycle(communicator=name, num_ranks=num_ranks, calls=calls)
        for (name, num_ranks), calls in findings.places.cycles.items()
        if alike[num_ranks] == 1
    )
    return _Sites(cycles=cycles, places=places, ties=tuple(ties), notes=tuple(notes))


def _record(
    request: FromTraceRequest, fit: TraceFit, *, errors: FitErrors, findings: Findings, sites: _Sites
) -> FromTraceRecord:
    job = fit.job
    ratios = [exp(left) for left in fit.log_residuals]
    return FromTraceRecord(
        traces=[path.name for path in request.traces],
        fit=fit.table,
        unidentified=fit.unidentified,
        fit_mean_abs_error=fit.mean_abs_error,
        step_s=errors.step_s,
        step_error=errors.share,
        calls=_calls(findings),
        sites=[
            TracedSite(
                group=traced_group.group.name,
                comm=op.name,
                call=TracedCall(
                    communicator=op.communicator,
                    num_ranks=op.collective.num_ranks,
                    kind=op.collective.kind,
                    num_bytes=op.collective.num_bytes,
                ),
                places=sites.places.get((traced_group.group.name, at), ()),
            )
            for traced_group in job.groups
            for at, op in enumerate(traced_group.group.comms)
            if traced_group.reaches[at] is not KnobReach.NONE
        ],
        cycles=list(sites.cycles),
        groups=[
            TracedGroupRow(
                name=traced_group.group.name,
                bound=traced_group.source.bound.value,
                per_step=traced_group.source.per_step,
                measured_s=traced_group.makespan_s,
                simulated_s=ratio * traced_group.makespan_s,
                num_kernels=len(traced_group.source.kernel_keys),
                num_estimated=traced_group.num_estimated,
            )
            for traced_group, ratio in zip(job.groups, ratios, strict=True)
        ],
    )


def predicted_job(request: FromTraceRequest) -> PredictedJob:
    """The job that the traces show, on the model fitted to them.

    Raises:
        TraceError: if a trace cannot be read, no collective in it overlaps a kernel, or the fitted model does not
            reproduce the measured step.
        JobError: if no cluster is known, or it has fewer GPUs than the collectives have ranks.
    """
    job = Job(_spec_of(request))
    command = job_command(request.traces[0])
    unread: list[str] = []
    traces = read_traces(request.traces, unread=unread)
    if not any(len(trace.events) and not trace.is_cpu for trace in traces):
        what = "operators on the CPU" if any(trace.is_cpu for trace in traces) else "no timeline"
        raise TraceError(
            f"{traces[0].file}: {what}: the contention model is of GPUs, so nothing can be predicted from it; search "
            f"in the job itself: lagom run --online -- {command}"
        )
    findings = analyse(traces)
    cluster, stands_in = _cluster(job, findings)
    model = job.price_on(cluster)
    trace = grouped(findings)
    fit = fit_trace(findings, trace.groups, model)
    if fit is None:
        left_out = traced_job(findings, trace.groups, model).left_out
        why = f" ({left_out[0]})" if left_out else ""
        raise TraceError(
            f"no overlap group of the trace can be simulated{why}: there is nothing to tune by a model; measure "
            f"instead: lagom run --online -- {command}"
        )
    traced = fit.job
    _check_modelled(
        _errors(fit, [], trace, findings), traced.groups, trace.drifts_s, command
    )  # else two fits more to refuse it
    halves = [fit_trace(findings, list(half.values()), model, half=at) for at, half in enumerate(trace.halves)]
    errors = _errors(fit, [half for half in halves if half is not None], trace, findings)
    _check_modelled(errors, traced.groups, trace.drifts_s, command)
    groups = tuple(traced_group.group for traced_group in traced.groups)
    sites = _sites(traced.groups, findings)
    backend_request = replace(job.request_for(groups, seed=request.seed), cluster=fit.model.cluster)
    return PredictedJob(
        spec=job.spec,
        traced=groups,
        backend=TracedBackend(
            fit.model, backend_request, _defaults(traced.groups, fit.model), _nccl_of(findings) or ASSUMED_NCCL
        ),
        caveats=(*_notes(fit, findings, errors), *stands_in, *sites.notes, *unread),
        ties=sites.ties,
        fit_errors=errors,
        default_words="what the trace ran (simulated)",
        trace_record=_record(
            request,
            fit,
            errors=errors,
            findings=findings,
            sites=sites,
        ),
    )
