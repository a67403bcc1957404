"""`lagom simulate`: a job file becomes a layout, one iteration is simulated, what it is made of is written down.

Of a captured step, the operators are simulated as the framework issues them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.memory import accuracy_note, beyond_note, check_memory, frees_nothing
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.jobfile.step import JobStep, nodes_notes, release_notes
from lagom_overlap.planners.memory import peak_of_spans
from lagom_overlap.planners.simulated import stands_still_s
from lagom_overlap.results.simulate import SimulateCaptureResult, SimulatedCarveOut, SimulatedStage, SimulateResult
from lagom_overlap.sim.iteration import simulate_iteration
from lagom_overlap.sim.training import TrainingTimes, training_timeline
from lagom_overlap.sim.what_if import WhatIf
from lagom_overlap.timeline.metrics import overlap_metrics
from lagom_overlap.trace.chrome_writer import chrome_trace
from lagom_overlap.units import format_percent, format_seconds
from lagom_overlap.verbs.simulate_what_if import captured_what_ifs, planned_keys, simulated_what_ifs
from lagom_overlap.workload.parallel import StageMemory
from lagom_overlap.workload.step.framework_file import has_switch
from lagom_overlap.workload.step.rules import IssueRules, Sharding

_FILES = ("run.json", "report.html", "timeline.json")
_NOTE = "Simulated: no hardware was measured. How far off the model is: lagom docs accuracy."


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """A job and where to write; None writes nothing."""

    job: Job
    out: Path | None = None


def _unused(spec: JobSpec, rules: IssueRules) -> list[str]:
    """What the job file says that this verb does not read, one note each."""
    notes = []
    if spec.tune != type(spec.tune)():
        but = ", but for space.sm_carveout" if carve_outs_to_try(spec) else ""
        notes.append(f"[tune] is not read by simulate{but}: collectives run as the links' constants say.")
    if spec.cost.noise:
        notes.append(f"cost.noise = {spec.cost.noise} is not read by simulate: it has no noise.")
    if spec.parallel is not None and spec.parallel.bucket_bytes is not None and rules.sharding is not Sharding.BUCKETS:
        notes.append(f"parallel.bucket_bytes is not read: framework {rules.name} reduces by unit, in no buckets.")
    table = type(spec.job)(name=spec.job.name)
    notes += [
        f"job.{name} is not read by simulate."
        for name in table.__struct_fields__
        if name != "backend" and getattr(spec.job, name) != getattr(table, name)
    ]
    return notes


def _freed_nothing(job: JobStep) -> str:
    """Why selective recomputation costs no memory less, and what would."""
    named = ", ".join(job.layout.recompute_modules)
    what = f"of {named}" if named else "with flash attention, which keeps no scores,"
    more = "other recompute_modules or " if has_switch(job.rules.name, "recompute_modules") else ""
    return f'parallel.recompute = "selective" {what} frees no memory here; {more}recompute = "full" would.'


def run_simulate(request: SimulateRequest) -> SimulateResult:
    """Simulates one iteration, and writes the run folder if one was asked for.

    Raises:
        LagomError: if the job cannot be read as a layout, does not fit the model, the cluster or the memory.
    """
    spec = request.job.spec
    if spec.model is None or spec.parallel is None or spec.cluster is None:
        raise JobError(
            "the job has no [model]: simulate needs [model], [parallel], [cluster]; groups given by shapes are for tune"
        )
    if spec.job.backend != "simulated":
        raise JobError(f"job.backend is {spec.job.backend!r}; lagom simulate runs the simulated one only")
    job = request.job.step
    assert job is not None, spec.job.name
    check_memory(job)
    memories, cluster, simulator, times = job.memories, job.cluster, job.simulator, job.times
    if not isfinite(times.iteration_s):
        raise JobError(f"the iteration takes {times.iteration_s} s: a rate of cluster {cluster.name!r} is too small")
    notes = [_NOTE, _fitted("GPU operators: fitted on", job.operators.fitted_on)]
    notes.append(_fitted(f"Framework {job.framework.name}: fitted", job.framework.fitted_on))
    notes += [
        accuracy_note(job),
        f"Profile {job.profile.label}",
        *_unused(spec, job.rules),
        *nodes_notes(spec, cluster),
    ]
    notes += release_notes(spec.parallel, job.layout)
    carve_outs = [
        SimulatedCarveOut(sm_carveout=carved, iteration_s=replace(job, sm_carveout=carved).times.iteration_s)
        for carved in carve_outs_to_try(spec)
    ]
    if frees_nothing(job):
        notes.append(_freed_nothing(job))
    notes += _carve_out_notes(spec, times.iteration_s, carve_outs)
    if keys := planned_keys(job):
        names = ", ".join(f"parallel.{key}" for key in keys)
        notes.append(f"lagom plan also tries other values of {names}, which are not tried here.")
    what_ifs = simulated_what_ifs(job)
    ran = _Ran(job, times, simulator.steps_s(times), memories, carve_outs, what_ifs)
    result = _result(request, ran, notes)
    if request.out is not None:
        _write(request, request.out, result)
    return result


def _fitted(what: str, rows: str) -> str:
    return f"{what.partition(':')[0]}: no constant was fitted." if rows == "nothing" else f"{what} {rows}."


@dataclass(frozen=True, slots=True)
class _Ran:
    """What was simulated and what came of it."""

    job: JobStep
    times: TrainingTimes
    steps_s: Sequence[float]
    memories: Sequence[StageMemory]
    carve_outs: list[SimulatedCarveOut]
    what_ifs: tuple[WhatIf, ...]


def carve_outs_to_try(spec: JobSpec) -> tuple[int, ...]:
    """What `tune.space.sm_carveout` names, where products are persistent kernels and so heed it; increasing."""
    if spec.cost.sm_carveout is None:
        return ()
    return tuple(sorted(set(spec.tune.space.sm_carveout or ())))


def _carve_out_notes(spec: JobSpec, iteration_s: float, carve_outs: Sequence[SimulatedCarveOut]) -> list[str]:
    if spec.tune.space.sm_carveout and spec.cost.sm_carveout is None:
        return ["tune.space.sm_carveout has no effect without cost.sm_carveout = 0: products are plain kernels."]
    if not carve_outs:
        return []
    tried = ", ".join(
        f"{other.sm_carveout} SMs {format_seconds(other.iteration_s)} "
        f"({format_percent(other.iteration_s / iteration_s - 1, signed=True)})"
        for other in carve_outs
    )
    return [f"The same with another carve-out and the same channels: {tried}."]


def _result(request: SimulateRequest, ran: _Ran, notes: list[str]) -> SimulateResult:
    job, times, memories = ran.job, ran.times, ran.memories
    layout, peak_flops = job.layout, job.operators.peak_flops
    critical = times.last_stage
    tokens = layout.global_batch * job.seq_len
    return SimulateResult(
        job=request.job.name,
        model=job.model.name,
        cluster=job.cluster.name,
        num_gpus=layout.num_gpus,
        num_micro_batches=layout.num_micro_batches,
        iteration_s=times.iteration_s,
        tokens_per_s=tokens / times.iteration_s,
        model_flops=times.model_flops,
        mfu=times.mfu(layout.num_gpus, peak_flops),
        peak_flops_per_gpu=peak_flops,
        memory_bytes=max(memory.total_bytes for memory in memories),
        memory_limit_bytes=job.cluster.gpu.memory_bytes,
        bubble_s=critical.bubble_s,
        communicators=dict(sorted(critical.comms.items())),
        stages=tuple(
            SimulatedStage(
                stage=stage.rank,
                step_s=step_s,
                busy_s=stage.busy_s,
                bubble_s=stage.bubble_s,
                compute_s=stage.compute_s,
                launch_s=stage.host_s,
                gradients_s=stage.gradients_s,
                optimizer_s=stage.optimizer_s,
                communicators=dict(sorted(stage.comms.items())),
                memory=memory,
            )
            for stage, step_s, memory in zip(times.stages, ran.steps_s, memories, strict=True)
        ),
        carve_outs=tuple(ran.carve_outs),
        what_ifs=ran.what_ifs,
        notes=tuple(notes),
        files=() if request.out is None else tuple(request.out / name for name in _FILES),
        simulated=training_timeline(times),
    )


def _write(request: SimulateRequest, folder: Path, result: SimulateResult) -> None:
    from lagom_overlap.report.simulate import render_simulation  # noqa: PLC0415 - for a run folder alone

    RunFolder.create(folder, result.job).write(
        RunRecord.now(RunKind.SIMULATE, seed=None, job=request.job.spec),
        result,
        {
            "report.html": lambda: render_simulation(result).encode(),
            "timeline.json": lambda: chrome_trace({result.job: result.timeline}),
        },
    )


def simulate_capture(job: Job, out: Path | None) -> SimulateCaptureResult:
    """Simulates one step of the rank that the job's capture holds, and writes the folder if asked to.

    Raises:
        JobError: if the job asks for what is not simulated, or its capture cannot be read.
        OutputError: if the folder cannot be written.
    """
    spec, capture, cluster = job.spec, job.captured, job.cluster
    if spec.job.backend != "simulated":
        raise JobError(f"job.backend is {spec.job.backend!r}; lagom simulate runs the simulated one only")
    if capture is None:
        raise JobError("the job names no capture")
    assert cluster is not None
    issued, model = capture.issued, job.price
    timeline = simulate_iteration(issued, {}, model)
    metrics = overlap_metrics(timeline)
    spans = {span.name: (span.start_s, span.end_s) for span in timeline.spans}
    peak, limit = peak_of_spans(issued, spans), cluster.gpu.memory_bytes
    notes = [_NOTE, f"Profile {model.profile.label}", *capture.notes, *beyond_note(peak, cluster.gpu)]
    notes += nodes_notes(spec, cluster)
    result = SimulateCaptureResult(
        job=spec.job.name,
        capture=issued.name,
        cluster=cluster.name,
        num_ranks=capture.num_ranks,
        num_ops=len(issued.ops),
        num_comms=len(issued.comms),
        iteration_s=metrics.makespan_s,
        compute_s=metrics.comp_s,
        comm_s=metrics.comm_s,
        exposed_comm_s=stands_still_s(timeline),
        peak_memory_bytes=peak,
        memory_limit_bytes=limit,
        what_ifs=captured_what_ifs(capture.iteration, issued, model, timeline),
        notes=tuple(notes),
        files=() if out is None else tuple(out / name for name in _FILES),
        simulated=timeline,
    )
    if out is not None:
        _write_captured(out, job, result)
    return result


def _write_captured(folder: Path, job: Job, result: SimulateCaptureResult) -> None:
    from lagom_overlap.report.simulate_capture import render_captured  # noqa: PLC0415 - for a run folder alone

    RunFolder.create(folder, result.job).write(
        RunRecord.now(RunKind.SIMULATE_CAPTURE, seed=None, job=job.spec),
        result,
        {
            "report.html": lambda: render_captured(result).encode(),
            "timeline.json": lambda: chrome_trace({result.job: result.timeline}),
        },
    )
