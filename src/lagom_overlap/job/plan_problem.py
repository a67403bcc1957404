"""From a job file or a capture to a planning problem: the step, the machine, how long operators take on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lagom_overlap.backends.gloo.programs import ProgramRanks
from lagom_overlap.capture.base import Capture
from lagom_overlap.capture.file import read_capture
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.job.build import contention_model_of
from lagom_overlap.job.capture import capture_of
from lagom_overlap.job.simulate import cluster_for, layout_of
from lagom_overlap.job.spec import JobSpec, PlanTable, ProgramTable, link_bytes_per_s, read_job, size_bytes
from lagom_overlap.plan.base import OpTimes, PlanProblem
from lagom_overlap.plan.times import ModelTimes, NamedTimes
from lagom_overlap.workload import CommOp, Gemm, Iteration, Op
from lagom_overlap.workload.dataflow import dataflow_iteration
from lagom_overlap.workload.models import load_model

PROFILE_REPEATS: Final = 7
_ANY_GPU: Final = "a40_nvlink"
"""Ranks on CPU cores are planned as if each were a GPU of this preset; its speed is not used, times are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """A problem with what surrounds it.

    `issued` is the step as the framework runs it before any plan. `ranks` run the program, if the job has one and names
    a backend that runs it; close it.
    """

    name: str
    problem: PlanProblem
    issued: Iteration
    num_ranks: int
    seed: int = 0
    rounds: int = 11
    planner: str = "ours"
    options: Mapping[str, bool | int | float | str] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()
    ranks: ProgramRanks | None = None

    def close(self) -> None:
        """Ends the ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.close()


def read_input(path: Path, *, cluster: str | None = None) -> PlanInput:
    """The problem of a job file (`.toml`) or of a capture, which needs the name of a cluster.

    Raises:
        LagomError: if the file cannot be read or holds nothing that can be planned.
    """
    if path.suffix != ".toml":
        if cluster is None:
            raise JobError(
                f"{str(path)!r} is taken for a capture, which says nothing of a machine: give --cluster NAME"
            )
        return of_capture(read_capture(path), cluster)
    spec = read_job(path)
    if cluster is not None:
        raise JobError("--cluster is for captures; a job file names its own: [cluster] preset = ...")
    return of_job(spec, path)


def of_capture(capture: Capture, cluster_name: str) -> PlanInput:
    """The problem of a captured step on a preset, on as many nodes as its ranks fill."""
    preset = load_preset(cluster_name)
    nodes = -(-capture.num_ranks // preset.gpus_per_node)
    cluster = replace(preset, num_nodes=nodes)
    placed = _checked(capture.placed_on(cluster))
    times = ModelTimes(ContentionModel(cluster, load_profile("plausible")))
    problem = _problem(PlanTable(), placed.iteration, cluster, times, groups=placed.groups)
    return PlanInput(
        name=capture.iteration.name,
        problem=problem,
        issued=replace(placed.issued, is_dataflow=True),
        num_ranks=capture.num_ranks,
        notes=(*_MODEL_NOTE, *capture.notes),
    )


_MODEL_NOTE: Final = ("Times come from the cost model (profile plausible): nothing was measured.",)


def of_job(spec: JobSpec, path: Path) -> PlanInput:
    """The problem of a job."""
    if spec.program is not None:
        return _of_program(spec, spec.program, path)
    if spec.model is not None and spec.model.capture is not None:
        return _of_captured_job(spec)
    if spec.model is None or spec.parallel is None:
        raise JobError("the job has no [model] and no [program]: groups given by shapes are for tune")
    if spec.job.backend != "simulated":
        raise JobError(
            f'job.backend is {spec.job.backend!r}: a named model is planned with backend = "simulated"; '
            "give a [program] to run a plan on gloo"
        )
    if spec.model.name is None or spec.model.seq_len is None:
        raise JobError("missing key 'model.name' or 'model.seq_len': plan needs both, or model.capture")
    layout = layout_of(spec.parallel)
    cluster = cluster_for(spec, layout)
    iteration = dataflow_iteration(
        load_model(spec.model.name), layout, seq_len=spec.model.seq_len, gpus_per_node=cluster.gpus_per_node
    )
    times = ModelTimes(contention_model_of(spec, cluster))
    problem = _problem(spec.plan, iteration, cluster, times)
    note = f"Times come from the cost model (profile {spec.cost.profile}): nothing was measured."
    return _input(spec, problem, iteration, layout.num_gpus, notes=(note,))


def _of_captured_job(spec: JobSpec) -> PlanInput:
    """The problem of a job whose model is a capture file, on the job's cluster."""
    assert spec.model is not None and spec.model.capture is not None  # noqa: PT018  asked by the only caller
    if spec.cluster is None:
        raise JobError("a capture says nothing of a machine: give [cluster] preset = ... in the job file")
    cluster = load_preset(spec.cluster.preset, spec.cluster.nodes)
    found = capture_of(spec, cluster)
    assert found is not None
    times = ModelTimes(contention_model_of(spec, cluster))
    problem = _problem(spec.plan, _checked(found).iteration, cluster, times, groups=found.groups)
    note = f"Times come from the cost model (profile {spec.cost.profile}): nothing was measured."
    return _input(spec, problem, found.issued, found.num_ranks, notes=(note, *found.notes))


def _checked(capture: Capture) -> Capture:
    if not capture.iteration.is_dataflow:
        raise JobError(f"capture {capture.iteration.name!r} does not hold its data flow: it cannot be reordered")
    return capture


def _of_program(spec: JobSpec, program: ProgramTable, path: Path) -> PlanInput:
    """A program, captured in a fake world; with `backend = "gloo"` its operators are timed on real ranks."""
    script = path.parent / program.script
    num_ranks = spec.job.ranks
    capture = _captured(script, program.function, num_ranks)
    if spec.job.backend == "simulated":
        if spec.cluster is None:
            raise JobError("the simulated backend needs a cluster: give [cluster] preset = ... in the job file")
        cluster = load_preset(spec.cluster.preset, spec.cluster.nodes)
        placed = capture.placed_on(cluster)
        times: OpTimes = ModelTimes(contention_model_of(spec, cluster))
        problem = _problem(spec.plan, placed.iteration, cluster, times, groups=placed.groups)
        note = f"Times come from the cost model (profile {spec.cost.profile}): nothing was measured."
        return _input(spec, problem, placed.issued, num_ranks, notes=(note, *capture.notes))
    if spec.job.backend != "gloo":
        raise JobError(f"job.backend is {spec.job.backend!r}: programs are planned with simulated or gloo")
    if num_ranks % program.nodes:
        raise JobError(f"program.nodes is {program.nodes}, must divide job.ranks = {num_ranks}")
    cluster = replace(
        load_preset(_ANY_GPU), name="cpu_ranks", gpus_per_node=num_ranks // program.nodes, num_nodes=program.nodes
    )
    ranks = ProgramRanks(
        script,
        program.function,
        num_ranks=num_ranks,
        link_bytes_per_s=link_bytes_per_s(spec.job.link),
        timeout_s=spec.job.timeout_s,
    )
    try:
        measured = ranks.profile(PROFILE_REPEATS)
        placed = capture.placed_on(cluster)
        times = NamedTimes(measured, placed.iteration, ProportionalTimes.of(placed.iteration, measured))
        problem = _problem(spec.plan, placed.iteration, cluster, times, groups=placed.groups)
    except BaseException:
        ranks.close()
        raise
    note = f"Operators were timed alone on {ranks.description}; pieces of them are estimated."
    return _input(spec, problem, placed.issued, num_ranks, notes=(note, *capture.notes), ranks=ranks)


def _captured(script: Path, function: str, num_ranks: int) -> Capture:
    from lagom_overlap.capture.fake_world import fake_world  # noqa: PLC0415  # needs torch, which other jobs do without
    from lagom_overlap.engines.planned.program import load_program  # noqa: PLC0415

    with fake_world(num_ranks):
        return load_program(script, function).captured(function).capture


def _input(
    spec: JobSpec,
    problem: PlanProblem,
    issued: Iteration,
    num_ranks: int,
    *,
    notes: tuple[str, ...],
    ranks: ProgramRanks | None = None,
) -> PlanInput:
    return PlanInput(
        name=spec.job.name,
        problem=problem,
        issued=replace(issued, is_dataflow=True),
        num_ranks=num_ranks,
        seed=spec.plan.seed,
        rounds=spec.plan.rounds,
        planner=spec.plan.planner,
        options=spec.plan.options,
        notes=(*notes, *_unused(spec)),
        ranks=ranks,
    )


def _problem(
    table: PlanTable,
    iteration: Iteration,
    cluster: Cluster,
    times: OpTimes,
    *,
    groups: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> PlanProblem:
    if not iteration.ops:
        raise JobError(f"step {iteration.name!r} has no operators: there is nothing to plan")
    limit = None if table.memory_limit is None else size_bytes(table.memory_limit, "plan.memory_limit")
    return PlanProblem(
        iteration=iteration,
        cluster=cluster,
        times=times,
        groups=groups,
        memory_limit_bytes=limit,
        prefetch=table.prefetch or None,
        exact=table.exact,
        budget_s=table.budget_s,
        seed=table.seed,
    )


def _unused(spec: JobSpec) -> list[str]:
    """What the job file says that planning does not read."""
    notes = []
    if spec.tune != type(spec.tune)():
        notes.append("[tune] is not read by plan: collectives run as the engine runs them.")
    if spec.cost.noise:
        notes.append("cost.noise is not read by plan: it has no noise.")
    if spec.program is not None and spec.job.backend == "gloo" and spec.cluster is not None:
        notes.append("[cluster] is not read with the gloo backend: times are measured.")
    return notes


@dataclass(frozen=True, slots=True)
class ProportionalTimes:
    """A fixed part and a part that grows with the work: how the time of a piece follows from that of the whole.

    `NamedTimes` scales it to what was measured. The fixed part is the shortest operator's time, of computations and of
    collectives apart; that of a piece is a guess, not a measurement.
    """

    comp_overhead_s: float
    comm_overhead_s: float
    comp_s_per_unit: float
    comm_s_per_byte: float

    @classmethod
    def of(cls, iteration: Iteration, measured_s: Mapping[str, float]) -> "ProportionalTimes":
        """From the times of an iteration's operators."""
        comps = [(measured_s[op.name], _units(op)) for op in iteration.computations]
        comms = [(measured_s[op.name], _units(op)) for op in iteration.comms]
        return cls(*(_fixed_s(times) for times in (comps, comms)), *(_slope(times) for times in (comps, comms)))

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        if isinstance(op, CommOp):
            return self.comm_overhead_s + self.comm_s_per_byte * _units(op)
        return self.comp_overhead_s + self.comp_s_per_unit * _units(op)


def _units(op: Op) -> float:
    """Bytes of a collective; of a computation floating-point operations, or bytes where that is all that is known."""
    if isinstance(op, CommOp):
        return float(op.collective.num_bytes)
    work = op.work
    if isinstance(work, Gemm):
        return work.flops
    return float(getattr(work, "flops", 0) or getattr(work, "num_bytes", 0) or 1)


def _fixed_s(times: list[tuple[float, float]]) -> float:
    return min((seconds for seconds, _ in times), default=1e-6)


def _slope(times: list[tuple[float, float]]) -> float:
    """Seconds per unit beyond the fixed part, of all together."""
    fixed = _fixed_s(times)
    units = sum(count for _, count in times)
    return max(sum(seconds - fixed for seconds, _ in times) / units, 1e-18) if units else 1e-18
