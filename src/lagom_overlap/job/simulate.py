"""`lagom simulate`: a job file becomes a layout, one iteration is simulated, what it is made of is written down."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path

import msgspec

from lagom_overlap import __version__
from lagom_overlap.cost.operators import load_framework, load_operators, operators_of_preset
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.job.simulate_result import CarveOutJson, SimulateJson, StageJson, communicators_json, memory_json
from lagom_overlap.job.spec import JobSpec, ParallelTable, size_bytes
from lagom_overlap.record import create_folder, describe_machine, package_versions, utc_now, write_private
from lagom_overlap.report.simulate_page import render_simulation
from lagom_overlap.sim.training import TrainingSimulator, TrainingTimes
from lagom_overlap.sim.training_timeline import training_timeline
from lagom_overlap.trace.chrome import chrome_trace
from lagom_overlap.units import format_seconds
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import ParallelLayout, StageMemory, plan_stages, stage_memory
from lagom_overlap.workload.parallel.layout import check_layout

_FILES = ("run.json", "report.html", "timeline.json")
_NOTE = "Simulated: no hardware was measured. How far the model is off: docs/accuracy_iteration.md."


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """A job and where to write; None writes nothing."""

    spec: JobSpec
    out: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateResult:
    """What was found: the object that is printed, and the folder it was written to."""

    json: SimulateJson
    folder: Path | None


def layout_of(parallel: ParallelTable) -> ParallelLayout:
    """The layout that a job's `[parallel]` describes.

    Raises:
        JobError: if its degrees contradict each other.
    """
    if parallel.auto is not None:
        raise JobError(
            "parallel.auto: a sharding is searched for by `lagom capture` and `lagom plan` only; give degrees"
        )
    data = parallel.fsdp or parallel.data or 1
    zero_stage = 3 if parallel.fsdp is not None else parallel.zero_stage or 0
    return ParallelLayout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        data=data,
        expert=parallel.expert,
        micro_batch=parallel.micro_batch,
        global_batch=parallel.global_batch or parallel.micro_batch * data,
        schedule=parallel.schedule,
        chunks=parallel.chunks,
        recompute=parallel.recompute,
        sequence_parallel=parallel.sequence_parallel,
        async_tensor=parallel.async_tensor,
        zero_stage=zero_stage,
        gradient_bytes=parallel.gradient_bytes,
        overlap_gradients=parallel.overlap_gradients,
        bucket_bytes=size_bytes(parallel.bucket_bytes, "parallel.bucket_bytes"),
        prefetch=parallel.prefetch,
        flash_attention=parallel.flash_attention,
        scatter_gather=parallel.scatter_gather,
        overlap_p2p=parallel.overlap_p2p,
    )


def cluster_for(spec: JobSpec, layout: ParallelLayout) -> Cluster:
    """The job's cluster; without a number of nodes, as many as the layout fills.

    Raises:
        UnknownNameError: if there is no such preset.
    """
    assert spec.cluster is not None
    cluster = load_preset(spec.cluster.preset, spec.cluster.nodes)
    if spec.cluster.nodes is not None:
        return cluster
    per_node = min(cluster.gpus_per_node, layout.num_gpus)
    return replace(cluster, num_nodes=-(-layout.num_gpus // per_node), gpus_per_node=per_node)


def _check_memory(memories: Sequence[StageMemory], cluster: Cluster) -> None:
    limit = cluster.gpu.memory_bytes
    rank = max(range(len(memories)), key=lambda index: memories[index].total_bytes)
    worst = memories[rank]
    if worst.total_bytes > limit:
        raise JobError(
            f"parallel: stage {rank} needs {worst.total_bytes / 1e9:.1f} GB per GPU, {cluster.gpu.name} has "
            f"{limit / 1e9:.1f} (parameters {worst.parameter_bytes / 1e9:.1f}, gradients "
            f"{worst.gradient_bytes / 1e9:.1f}, optimizer {worst.optimizer_bytes / 1e9:.1f}, activations "
            f"{worst.activation_bytes / 1e9:.1f}); cut the model further, recompute, or raise zero_stage"
        )


def _unused(spec: JobSpec) -> list[str]:
    """What the job file says that this verb does not read, one note each."""
    notes = []
    if spec.tune != type(spec.tune)():
        but = ", but for space.sm_carveout" if carve_outs_to_try(spec) else ""
        notes.append(f"[tune] is not read by simulate{but}: collectives run as the links' constants say.")
    if spec.cost.noise:
        notes.append(f"cost.noise = {spec.cost.noise} is not read by simulate: it has no noise.")
    table = type(spec.job)(name=spec.job.name)
    notes += [
        f"job.{name} is not read by simulate."
        for name in table.__struct_fields__
        if name != "backend" and getattr(spec.job, name) != getattr(table, name)
    ]
    return notes


def run_simulate(request: SimulateRequest) -> SimulateResult:
    """Simulates one iteration, and writes the run folder if one was asked for.

    Raises:
        LagomError: if the job cannot be read as a layout, does not fit the model, the cluster or the memory.
    """
    spec = request.spec
    if spec.model is None or spec.parallel is None or spec.cluster is None:
        raise JobError(
            "the job has no [model]: simulate needs [model], [parallel], [cluster]; groups given by shapes are for tune"
        )
    if spec.job.backend != "simulated":
        raise JobError(f"job.backend is {spec.job.backend!r}; lagom simulate runs the simulated one only")
    assert spec.model.name is not None and spec.model.seq_len is not None  # noqa: PT018  checked when the file was read
    model, layout = load_model(spec.model.name), layout_of(spec.parallel)
    cluster = cluster_for(spec, layout)
    check_layout(model, layout, cluster, spec.model.seq_len)
    framework = load_framework(spec.parallel.framework)
    profile = load_profile(spec.cost.profile)
    operators = operators_of_preset(spec.cluster.preset) or load_operators(cluster.gpu)
    stages = plan_stages(model, layout)
    memories = [stage_memory(model, layout, stage, spec.model.seq_len) for stage in stages]
    _check_memory(memories, cluster)
    simulator = partial(
        TrainingSimulator,
        model,
        layout,
        seq_len=spec.model.seq_len,
        cluster=cluster,
        operators=operators,
        framework=framework,
        profile=profile,
    )
    times = simulator(sm_carveout=spec.cost.sm_carveout).times()
    if not isfinite(times.iteration_s):
        raise JobError(f"the iteration takes {times.iteration_s} s: a rate of cluster {cluster.name!r} is too small")
    notes = [_NOTE, f"GPU operators, fitted on: {operators.fitted_on}"]
    notes.append(f"Framework {framework.name}, fitted on: {framework.fitted_on}")
    notes += [f"Profile {profile.label}", *_unused(spec)]
    carve_outs = [
        CarveOutJson(sm_carveout=carved, iteration_s=simulator(sm_carveout=carved).times().iteration_s)
        for carved in carve_outs_to_try(spec)
    ]
    notes += _carve_out_notes(spec, times.iteration_s, carve_outs)
    ran = _Ran(model, layout, cluster, times, memories, operators.peak_flops, carve_outs)
    result = _json(request, ran, notes)
    if request.out is not None:
        _write(request, request.out, result, times)
    return SimulateResult(json=result, folder=request.out)


@dataclass(frozen=True, slots=True)
class _Ran:
    """What was simulated and what came of it."""

    model: TransformerModel
    layout: ParallelLayout
    cluster: Cluster
    times: TrainingTimes
    memories: Sequence[StageMemory]
    peak_flops: float
    carve_outs: list[CarveOutJson]


def carve_outs_to_try(spec: JobSpec) -> tuple[int, ...]:
    """What `tune.space.sm_carveout` names, where products are persistent kernels and so heed it; increasing."""
    if spec.cost.sm_carveout is None:
        return ()
    return tuple(sorted(set(spec.tune.space.sm_carveout or ())))


def _carve_out_notes(spec: JobSpec, iteration_s: float, carve_outs: Sequence[CarveOutJson]) -> list[str]:
    if spec.tune.space.sm_carveout and spec.cost.sm_carveout is None:
        return ["tune.space.sm_carveout has no effect without cost.sm_carveout = 0: products are plain kernels."]
    if not carve_outs:
        return []
    tried = ", ".join(
        f"{other.sm_carveout} SMs {format_seconds(other.iteration_s)} ({other.iteration_s / iteration_s - 1:+.1%})"
        for other in carve_outs
    )
    return [f"The same with another carve-out and the same channels: {tried}."]


def _json(request: SimulateRequest, ran: _Ran, notes: list[str]) -> SimulateJson:
    assert request.spec.model is not None and request.spec.model.seq_len is not None  # noqa: PT018
    layout, times, memories = ran.layout, ran.times, ran.memories
    critical = max(times.stages, key=lambda s: s.end_s + s.gradients_s + s.optimizer_s)
    tokens = layout.global_batch * request.spec.model.seq_len
    return SimulateJson(
        tool="lagom simulate",
        version=__version__,
        job=request.spec.job.name,
        model=ran.model.name,
        cluster=ran.cluster.name,
        num_gpus=layout.num_gpus,
        num_micro_batches=layout.num_micro_batches,
        iteration_s=times.iteration_s,
        tokens_per_s=tokens / times.iteration_s,
        model_flops=times.model_flops,
        mfu=times.mfu(layout.num_gpus, ran.peak_flops),
        peak_flops_per_gpu=ran.peak_flops,
        memory_bytes=max(memory.total_bytes for memory in memories),
        memory_limit_bytes=ran.cluster.gpu.memory_bytes,
        bubble_s=critical.bubble_s,
        communicators=communicators_json(critical.comms),
        stages=[
            StageJson(
                stage=stage.rank,
                busy_s=stage.busy_s,
                bubble_s=stage.bubble_s,
                compute_s=stage.compute_s,
                launch_s=stage.host_s,
                gradients_s=stage.gradients_s,
                optimizer_s=stage.optimizer_s,
                communicators=communicators_json(stage.comms),
                memory=memory_json(memory),
            )
            for stage, memory in zip(times.stages, memories, strict=True)
        ],
        notes=notes,
        files=[] if request.out is None else [str(request.out / name) for name in _FILES],
        carve_outs=ran.carve_outs or msgspec.UNSET,
    )


def _write(request: SimulateRequest, folder: Path, result: SimulateJson, times: TrainingTimes) -> None:
    create_folder(folder)
    record = {
        "job": request.spec,
        "result": result,
        "machine": describe_machine(),
        "versions": package_versions(),
        "date": utc_now(),
    }
    timeline = training_timeline(times)
    write_private(folder / "run.json", msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    write_private(folder / "report.html", render_simulation(result, timeline).encode())
    write_private(folder / "timeline.json", chrome_trace({result.job: timeline}))
