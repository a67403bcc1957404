"""From a job file or a capture to a planning problem: the step, the machine, how long operators take on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from lagom_overlap.backends.gloo.programs import ProgramRanks
from lagom_overlap.capturing.file import read_capture
from lagom_overlap.errors import JobError, MissingDependencyError
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.jobfile.auto_sharding import searched_step
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.spec import (
    JobSpec,
    PlanTable,
    ProgramTable,
    TimesSource,
    link_bytes_per_s,
)
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.jobfile.variants import JobVariants
from lagom_overlap.planners.base import OpTimes, PlanProblem, StepTotals
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.framework_waits import FSDP2, framework_of
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.results.plan import TimesOrigin
from lagom_overlap.sim.training import MAX_BUILT
from lagom_overlap.toml_tables import size_bytes
from lagom_overlap.verbs.capture import captured_step
from lagom_overlap.verbs.plan_times import FoundTimes, TimesWish, from_model, from_ranks, from_trace, from_training
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.fsdp2.visits import units_of, visits_of
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.parallel import ParallelLayout, StageMemory
from lagom_overlap.workload.parallel.layout import MAX_ZERO_STAGE
from lagom_overlap.workload.rewrite.steps import Reorder
from lagom_overlap.workload.step.framework_file import framework_file

_ANY_GPU: Final = "a40_nvlink"
"""Ranks on CPU cores are planned as if each were a GPU of this preset; its speed is not used, times are measured."""
OURS: Final = "ours"
DEFAULT_BUDGET_S: Final = 10.0
"""Of a plan that nobody limited. Chosen: what people wait for without being told."""
WHOLE: Final = (
    "Operators are not cut: on CPU ranks many small pieces and their copies took longer than predicted (0.56 times the "
    "program's speed where 82 were cut in 8). [plan] options = { split = true } allows it; measure with --execute."
)
ONE_STAGE: Final = (
    "This is one micro-batch through the first of {stages} stages; how stages wait for each other is not in the plan "
    "(see `lagom simulate`, and --for megatron, which judges switches by all of them)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """A problem with what surrounds it.

    `issued` is the step as the framework runs it before any plan. `planner` and `carrier` are the job's, if it names
    any. `times` says which of the problem's times were measured (None: none). `is_on_cores`: its ranks are CPU
    processes. `step` is the training step of a job with a named model, all its stages and micro-batches. `ranks` run
    the program, if the job has one and names a backend that runs it; close it. `torchs_order` is the order that
    PyTorch's own overlap scheduler would issue, of a program's graph. `spec` is the job; a capture alone has none.
    """

    name: str
    problem: PlanProblem
    issued: Iteration
    num_ranks: int
    seed: int = 0
    rounds: int = 11
    planner: str | None = None
    carrier: Carrier | None = None
    options: Mapping[str, bool | int | float | str] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()
    times: TimesOrigin | None = None
    is_program: bool = False
    is_on_cores: bool = False
    step: JobStep | None = field(default=None, repr=False)
    ranks: ProgramRanks | None = None
    torchs_order: Callable[[], Reorder] | None = field(default=None, repr=False)
    spec: JobSpec | None = None

    def close(self) -> None:
        """Ends the ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.close()


Check = Callable[[Iteration, int], object]
"""Given a step and its number of ranks, raises if what is asked does not fit it, before anything is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """What comes from the command line besides the file: a machine for a capture, times, a check of the step.

    Without `execute`, ranks are started only if their times are wanted.
    """

    cluster: str | None = None
    times: str | None = None
    execute: bool = False
    check: Check = field(default=lambda step, num_ranks: None)


def job_or_capture(path: Path, sets: Sequence[str]) -> Path | JobSpec:
    """A job file with what `--set` says; a path where it says nothing.

    Raises:
        LagomError: if the file is no job, or a key has several values.
    """
    return JobVariants.read(path, sets).one() if sets else path


def read_input(source: Path | JobSpec | IssuedStep, asked: PlanFlags | None = None) -> PlanInput:
    """The problem of a job, a job file (`.toml`), a capture or its file; a capture needs the name of a cluster.

    Raises:
        LagomError: if the file cannot be read or holds nothing that can be planned, or the step fails the check.
    """
    asked = asked or PlanFlags()
    wish = TimesWish.of(asked.times)
    if isinstance(source, IssuedStep) or (isinstance(source, Path) and source.suffix != ".toml"):
        if asked.cluster is None:
            name = source.iteration.name if isinstance(source, IssuedStep) else str(source)
            raise JobError(f"{name!r} is taken for a capture, which says nothing of a machine: give --cluster NAME")
        capture = source if isinstance(source, IssuedStep) else read_capture(source)
        return replace(_of_captured(Job.of_capture(capture, asked.cluster), wish, asked.check), spec=None)
    job = Job.read(source) if isinstance(source, Path) else Job(source)
    if asked.cluster is not None:
        raise JobError("--cluster is for captures; a job file names its own: [cluster] preset = ...")
    if asked.times is None:
        wish = TimesWish.of(job.spec.plan.times)
    if job.spec.program is not None:
        return _of_program(job, job.spec.program, wish, asked)
    return _of_job(job, wish, asked.check)


def _modelled(wish: TimesWish, iteration: Iteration, model: ModelTimes, profile: str) -> FoundTimes:
    """Times of a step that nothing here can run."""
    if wish.trace is not None:
        return from_trace(wish.trace, iteration, model)
    if wish.source is TimesSource.MEASURE:
        raise JobError(
            'times = "measure" needs a program on real ranks: [program] and backend = "gloo" in the job file; '
            "the times of a captured or named step come from a trace of it, or from the cost model"
        )
    return from_model(model, profile)


def _of_job(job: Job, wish: TimesWish, check: Check) -> PlanInput:
    """The problem of a job with a model, named or captured."""
    spec = job.spec
    if spec.model is not None and spec.model.capture is not None:
        return _of_captured(job, wish, check)
    if spec.model is None or spec.parallel is None:
        raise JobError("the job has no [model] and no [program]: groups given by shapes are for tune")
    if spec.job.backend != "simulated":
        raise JobError(
            f'job.backend is {spec.job.backend!r}: a named model is planned with backend = "simulated"; '
            "give a [program] to run a plan on gloo"
        )
    if spec.model.name is None or spec.model.seq_len is None:
        raise JobError("missing key 'model.name' or 'model.seq_len': plan needs both, or model.capture")
    if spec.parallel.auto is not None:
        searched, cluster = searched_step(job)
        return _placed(job, searched, cluster, wish, check)
    trained = _trained(job)
    check_memory(trained)
    step, layout = trained.issued, trained.layout
    check(step.iteration, layout.num_gpus)
    times = ModelTimes(trained.simulator.price.model, framework=trained.framework)
    op_times = _modelled(wish, step.iteration, times, spec.cost.profile)
    problem = _problem(
        spec.plan,
        step.iteration,
        trained.cluster,
        op_times.times,
        step=step,
        framework=framework_file(trained.rules.name).title,
    )
    problem = replace(problem, pipeline=layout.pipeline, num_micro_batches=layout.num_micro_batches)
    problem = _as_estimated(problem, trained.memories[0])
    if problem.framework == FSDP2 and isinstance(problem.times, ModelTimes):
        units = units_of(visits_of(step.iteration))
        problem = replace(problem, settings=_settings_of(layout, units), told=partial(_told, problem, trained))
        if not (trained.is_whole and layout.num_micro_batches <= MAX_BUILT):  # else the step is what is simulated
            problem = replace(problem, whole=partial(_whole, trained))
    return replace(_input(job, problem, problem.unplanned, layout.num_gpus, op_times), step=trained)


def _as_estimated(problem: PlanProblem, memory: StageMemory) -> PlanProblem:
    """The problem whose step, before any plan, holds what every verb says that its GPU holds (`stage_memory`).

    Buffers tell what an order changes. What they leave out (other micro-batches in flight, what operators keep inside)
    is the same in every order, and counts as resident.
    """
    issued = _holding(problem, problem.unplanned, memory)
    return replace(problem, iteration=replace(problem.iteration, resident_bytes=issued.resident_bytes), issued=issued)


def _holding(problem: PlanProblem, iteration: Iteration, memory: StageMemory) -> Iteration:
    """A step as it is issued, with so many bytes at its peak."""
    more = memory.total_bytes - simulated(problem, iteration).peak_bytes
    return replace(iteration, resident_bytes=iteration.resident_bytes + more)


def _settings_of(layout: ParallelLayout, units: tuple[str, ...]) -> Fsdp2Settings:
    """FSDP2's settings that a job has; `units` are those that it gathers in forward, in their order."""
    num_kept = len(units) if layout.zero_stage < MAX_ZERO_STAGE else min(layout.kept_units, len(units))
    return Fsdp2Settings(
        units=units,
        forward_prefetch=layout.forward_prefetch,
        backward_prefetch=layout.backward_prefetch,
        kept=units[len(units) - num_kept :],
        reduce_buffers=layout.reduce_buffers,
        separate_reduce_group=layout.separate_reduce_group,
    )


def _told(problem: PlanProblem, trained: JobStep, settings: Fsdp2Settings) -> Iteration:
    """The step of the job whose keys say those settings, with the memory that every verb tells of it.

    Raises:
        JobError: if no keys say so.
    """
    other = with_settings(trained, settings)
    return _holding(problem, replace(other.issued.issued, is_dataflow=True), other.memories[0])


def _whole(trained: JobStep, settings: Fsdp2Settings) -> StepTotals:
    """What the iteration of the job with those settings takes, as `lagom simulate` tells it."""
    other = with_settings(trained, settings)
    return StepTotals(other.times.iteration_s, other.most_bytes)


def with_settings(trained: JobStep, settings: Fsdp2Settings) -> JobStep:
    """The job with keys that say FSDP2's settings.

    Raises:
        JobError: if no keys say so.
    """
    keys: dict[str, Any] = settings.keys()
    layout = replace(trained.layout, **keys)
    return trained if layout == trained.layout else replace(trained, layout=layout)


def _trained(job: Job) -> JobStep:
    assert job.step is not None, job.name  # asked of jobs with a named model
    return job.step


def _of_captured(job: Job, wish: TimesWish, check: Check) -> PlanInput:
    """The problem of a job whose model is a capture, on the job's cluster."""
    if job.cluster is None:
        raise JobError("a capture says nothing of a machine: give [cluster] preset = ... in the job file")
    assert job.captured is not None, job.name
    return _placed(job, _checked(job.captured), job.cluster, wish, check)


def _placed(job: Job, placed: IssuedStep, cluster: Cluster, wish: TimesWish, check: Check) -> PlanInput:
    """The problem of a captured step that is placed on the job's cluster, under the cost model or a trace."""
    check(placed.iteration, placed.num_ranks)
    model = ModelTimes(job.price_on(cluster))
    op_times = _modelled(wish, placed.iteration, model, job.spec.cost.profile)
    problem = _problem(job.spec.plan, placed.iteration, cluster, op_times.times, step=placed)
    return _input(job, problem, placed.issued, placed.num_ranks, op_times, more=placed.notes)


def _checked(capture: IssuedStep) -> IssuedStep:
    if not capture.iteration.is_dataflow:
        raise JobError(f"capture {capture.iteration.name!r} does not hold its data flow: it cannot be reordered")
    return capture


def _of_program(job: Job, program: ProgramTable, wish: TimesWish, asked: PlanFlags) -> PlanInput:
    """A program, captured in a fake world; with `backend = "gloo"` its operators are timed on real ranks."""
    spec, script = job.spec, Path(program.script)
    num_ranks = spec.job.ranks
    if spec.job.backend not in ("simulated", "gloo"):
        raise JobError(f"job.backend is {spec.job.backend!r}: programs are planned with simulated or gloo")
    if num_ranks % program.nodes:
        raise JobError(f"program.nodes is {program.nodes}, must divide job.ranks = {num_ranks}")
    capture, graph = _captured(script, program.function, num_ranks)
    is_graph = graph is not None
    if spec.job.backend == "simulated":
        if job.cluster is None:
            raise JobError("the simulated backend needs a cluster: give [cluster] preset = ... in the job file")
        cluster = job.cluster
        given = _placed(job, capture.placed_on(cluster), cluster, wish, asked.check)
        return replace(given, is_program=is_graph, torchs_order=_torchs_order(graph, given.problem))
    if not is_graph and framework_of(capture.iteration) != FSDP2:
        raise JobError(
            f"program {str(script)!r}: {program.function}() makes a TrainingStep that FSDP2 does not issue; on gloo "
            'ranks only FSDP2 can be told a plan. With backend = "simulated" it is planned for its framework'
        )
    cluster = replace(
        load_preset(_ANY_GPU),
        name="cpu_ranks",
        gpus_per_node=num_ranks // program.nodes,
        num_nodes=program.nodes,
        max_gpus_per_node=None,
    )
    if wish.source is TimesSource.MODEL:
        raise JobError(
            'times = "model" has no meaning with backend = "gloo": no cost model describes these ranks; '
            'allowed: "measure", or a trace of one rank'
        )
    placed = capture.placed_on(cluster)
    asked.check(placed.iteration, num_ranks)
    traced = None
    if wish.trace is not None:
        model = ModelTimes(job.price_on(cluster))
        traced = from_trace(wish.trace, placed.iteration, model, on_ranks=True)
        if not asked.execute:
            problem = _problem(spec.plan, placed.iteration, cluster, traced.times, step=placed)
            problem = replace(problem, is_blocking=not is_graph)
            given = _input(job, problem, placed.issued, num_ranks, traced, more=capture.notes)
            return replace(given, is_program=is_graph)
    ranks = ProgramRanks(
        script,
        program.function,
        num_ranks=num_ranks,
        link_bytes_per_s=link_bytes_per_s(spec.job.link),
        timeout_s=spec.job.timeout_s,
    )
    measured = from_ranks if is_graph else from_training
    try:
        op_times = traced or measured(ranks, placed.iteration)
        problem = _problem(spec.plan, placed.iteration, cluster, op_times.times, step=placed)
        problem = replace(problem, together=op_times.together, is_blocking=not is_graph)
    except BaseException:
        ranks.close()
        raise
    given = _input(job, problem, placed.issued, num_ranks, op_times, more=capture.notes, ranks=ranks)
    return replace(given, is_program=is_graph, torchs_order=_torchs_order(graph, problem))


def _captured(script: Path, function: str, num_ranks: int) -> tuple[IssuedStep, Any]:
    """The step, and its graph (`FxCapture`); a framework's step has none, and takes settings."""
    try:
        from lagom_overlap.capturing.fake_world import fake_world  # noqa: PLC0415  # torch, which other jobs do without
        from lagom_overlap.engines.fx.program import TrainingStepError, load_program  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"a [program] needs the package {error.name!r}: pip install torch") from None

    try:
        with fake_world(num_ranks):
            captured = load_program(script, function).captured(function)
            return captured.capture, captured
    except TrainingStepError as error:
        build = error.build
    return captured_step(build, num_ranks=num_ranks, name=function, where=str(script)), None


def _torchs_order(graph: Any, problem: PlanProblem) -> Callable[[], Reorder] | None:
    """What makes the order of PyTorch's own scheduler from the problem's times; None without a graph."""
    if graph is None:
        return None

    def made() -> Reorder:
        from lagom_overlap.capturing.fake_world import fake_world  # noqa: PLC0415  # needs torch
        from lagom_overlap.engines.fx.apply import name_operators  # noqa: PLC0415
        from lagom_overlap.engines.fx.torch_overlap import own_order  # noqa: PLC0415

        name_operators(graph.graph_module.graph, graph.iteration)
        seconds = {op.name: problem.times.seconds(op) for op in problem.iteration.ops}
        with fake_world(graph.capture.num_ranks):
            return own_order(graph.graph_module, graph.iteration, seconds)

    return made


def _input(
    job: Job,
    problem: PlanProblem,
    issued: Iteration,
    num_ranks: int,
    found: FoundTimes,
    *,
    more: tuple[str, ...] = (),
    ranks: ProgramRanks | None = None,
) -> PlanInput:
    spec = job.spec
    return PlanInput(
        name=spec.job.name,
        problem=problem,
        issued=replace(issued, is_dataflow=True),
        num_ranks=num_ranks,
        seed=spec.plan.seed,
        rounds=spec.plan.rounds,
        planner=spec.plan.planner,
        carrier=spec.plan.carrier,
        options=spec.plan.options,
        notes=(*found.notes, *more, *_unused(spec)),
        times=found.json,
        is_program=spec.program is not None,
        is_on_cores=spec.program is not None and spec.job.backend == "gloo",
        ranks=ranks,
        spec=spec,
    )


def _problem(
    table: PlanTable,
    iteration: Iteration,
    cluster: Cluster,
    times: OpTimes,
    *,
    step: IssuedStep | None = None,
    framework: str | None = None,
) -> PlanProblem:
    """The problem of an iteration, or of a step that a framework issues; of a capture, its streams say which."""
    if not iteration.ops:
        raise JobError(f"step {iteration.name!r} has no operators: there is nothing to plan")
    limit = None if table.memory_limit is None else size_bytes(table.memory_limit, "plan.memory_limit")
    return PlanProblem(
        iteration=iteration,
        cluster=cluster,
        times=times,
        groups=MappingProxyType({}) if step is None else step.groups,
        memory_limit_bytes=limit,
        prefetch=table.prefetch or None,
        exact=table.exact,
        budget_s=table.budget_s or DEFAULT_BUDGET_S,
        work=None if table.work is None else SearchBudget(table.work, table.budget_s),
        seed=table.seed,
        issued=None if step is None else replace(step.issued, is_dataflow=True),
        framework=framework or framework_of(iteration),
    )


def _unused(spec: JobSpec) -> list[str]:
    """What the job file says that planning does not read."""
    notes = []
    if spec.tune != type(spec.tune)():
        notes.append("[tune] is not read by plan: collectives run as the engine runs them.")
    if spec.cost.noise:
        notes.append("cost.noise is not read by plan: it has no noise.")
    if spec.program is not None and spec.job.backend == "gloo" and spec.cluster is not None:
        notes.append("[cluster] is not read with the gloo backend: its ranks are on this machine.")
    return notes
