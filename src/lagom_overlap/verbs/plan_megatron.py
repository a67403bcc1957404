"""`lagom plan --for megatron`: Megatron-LM's switches as a plan, and what each is predicted to bring on this job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.collective import CollectiveKind, CommConfig
from lagom_overlap.errors import JobError
from lagom_overlap.export.tp_overlap import TP_OVERLAP_FILE, tp_overlap_yaml
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.carriers import SETTINGS_PLANNERS, Carrier
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.effects import MIN_GAIN, SwitchAdvice
from lagom_overlap.planners.megatron.advice import (
    Scale,
    Trials,
    advise,
    best_bucket,
    recommended,
    scale_of,
    without_overlap_s,
    worthwhile,
)
from lagom_overlap.planners.megatron.flags import MegatronFlags, TensorOverlap
from lagom_overlap.planners.megatron.pipeline import SlotSeconds
from lagom_overlap.planners.megatron.pipeline_advice import PipelineAdvice, check_micro_batches, pipeline_advice
from lagom_overlap.planners.megatron.pipeline_group import ChunkComms
from lagom_overlap.planners.megatron.planner import Megatron
from lagom_overlap.planners.megatron.userbuffers import contended
from lagom_overlap.planners.schedule import lower_bound, task_graph
from lagom_overlap.planners.simulated import NO_CONFIGS, SimulatedPlan, simulated
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.results.plan import MegatronEffects, PipelineEffects
from lagom_overlap.sim.framework import FrameworkModel
from lagom_overlap.sim.what_if import percent_text
from lagom_overlap.units import format_seconds
from lagom_overlap.workload import CommOp, Iteration, Phase
from lagom_overlap.workload.gathers import parameter_gathers
from lagom_overlap.workload.step.framework_file import framework_file, framework_names
from lagom_overlap.workload.step.groups import DATA, PIPELINE
from lagom_overlap.workload.step.switches import can_overlap_experts, has_switch

ARGUMENTS_FILE: Final = "megatron_args.sh"
EXPERTS_SWITCH: Final = "--overlap-moe-expert-parallel-comm"
UNTRIED: Final = (
    "The planning budget ended before every switch was tried: one without a figure is Megatron's usual recommendation, "
    "not a prediction. [plan] budget_s allows more."
)
_BLACKWELL: Final = ("b200", "gb200", "b300", "gb300")


def _lacks_combined_schedule(title: str | None) -> bool:
    """Whether a framework, by what people call it, cannot run experts' exchanges behind another micro-batch."""
    named = (name for name in framework_names() if title is not None and framework_file(name).title == title)
    return any(not has_switch(name, "overlap_experts") for name in named)


def pipeline_effects(job: JobStep, times: ModelTimes) -> PipelineEffects | None:
    """What interleaving and overlapped transfers bring, and whether micro-batches are enough; None: no pipeline."""
    layout = job.layout
    if layout.pipeline == 1:
        return None
    seconds = _slot_seconds(job, times)
    switches: tuple[PipelineAdvice, ...] = ()
    if not layout.pipeline_layout:  # its switches say how many layers each chunk has
        each = job.model.num_layers // layout.pipeline
        switches = pipeline_advice(layout, seconds, each, _stage_comms(job, times))
    switches += _expert_advice(job)
    return PipelineEffects(slot=seconds, check=check_micro_batches(layout, seconds), switches=switches)


def _expert_advice(job: JobStep) -> tuple[PipelineAdvice, ...]:
    """What it brings all stages together that all-to-alls run behind another micro-batch; nothing where they cannot."""
    if not (has_switch(job.rules.name, "overlap_experts") and can_overlap_experts(job.layout)):
        return ()
    without, overlapped = (replace(job, layout=replace(job.layout, overlap_experts=each)) for each in (False, True))
    if not overlapped.fits:
        return ()
    without_s, with_s = (each.times.iteration_s for each in (without, overlapped))
    return (PipelineAdvice(switch=EXPERTS_SWITCH, without_s=without_s, with_s=with_s),)


def _slot_seconds(job: JobStep, times: ModelTimes) -> SlotSeconds:
    """One micro-batch through the first stage, operators one after the other; sending to the next one."""
    spent = dict.fromkeys(Phase, 0.0)
    transfer_s = 0.0
    for op in job.issued.iteration.ops:
        if isinstance(op, CommOp) and op.communicator == PIPELINE:
            transfer_s = times.seconds(op)
        elif op.origin.phase is not None and not (isinstance(op, CommOp) and op.communicator in DATA):
            spent[op.origin.phase] += times.seconds(op)
    forward_s = spent[Phase.FORWARD] + spent[Phase.LOSS]
    backward_s = spent[Phase.BACKWARD] + spent[Phase.WEIGHT_GRAD] + spent[Phase.RECOMPUTE]
    return SlotSeconds(forward_s=forward_s, backward_s=backward_s, transfer_s=transfer_s)


def _stage_comms(job: JobStep, times: ModelTimes) -> ChunkComms:
    """A stage's parameters gathered and its gradients reduced over the data-parallel ranks, one after the other."""
    held = [op for op in job.issued.iteration.comms if op.communicator in DATA]
    gathers = [op for op in held if op.collective.kind is CollectiveKind.ALL_GATHER]
    gather_s = sum(times.seconds(op) for op in gathers)
    return ChunkComms(gather_s=gather_s, reduce_s=sum(times.seconds(op) for op in held) - gather_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPlan:
    """A plan of switches, the step simulated with them, and what each brings."""

    plan: Plan
    step: SimulatedPlan
    effects: MegatronEffects


def megatron_plan(
    problem: PlanProblem,
    num_gpus: int,
    *,
    pipeline: PipelineEffects | None = None,
    sequence: PlanProblem | None = None,
    wanted: MegatronFlags | None = None,
) -> MegatronPlan:
    """Of the switches recommended for the scale those that pay on this step, each predicted with the others applied.

    `sequence` is the same job's step with sequence parallelism, where it has none. `wanted` are switches to take as
    they are. What the problem's budget leaves untried is said in the plan's notes.

    Raises:
        JobError: if the switches exclude each other on this step.
    """
    price = problem.times.price if isinstance(problem.times, ModelTimes) else None
    deadline, scale = problem.deadline(), scale_of(num_gpus)
    if wanted is None:
        found = _searched(problem, sequence, scale, price, deadline)
        flags = _of_all_stages(found.flags, pipeline)
    else:
        found, flags = _taken(problem, sequence, _of_one_stage(problem, wanted), price, deadline), wanted
    trials, of_step = found.trials, _of_one_stage(problem, flags)
    problem = trials.problem
    switches = (*found.more, *advise(trials, of_step))
    step, iteration, configs = _simulated(problem, of_step, price)
    effects = MegatronEffects(
        scale=str(scale),
        num_gpus=num_gpus,
        is_contended=price is not None,
        arguments=flags.arguments(),
        environment=flags.environment(
            has_tensor=any(op.communicator.startswith(("tp", "tensor")) for op in problem.iteration.comms),
            is_blackwell=problem.cluster.gpu.name.lower().startswith(_BLACKWELL),
        ),
        step_s=step.makespan_s,
        without_overlap_s=without_overlap_s(trials, of_step),
        switches=switches,
        not_advised=found.dropped,
        pipeline=pipeline,
    )
    graph = task_graph(problem)
    plan = Plan(
        planner=SETTINGS_PLANNERS[Carrier.MEGATRON],
        rewrites=(),
        iteration=iteration,
        lower_bound_s=graph.seconds(lower_bound(graph)),
        configs=configs,
        settings=flags,
        notes=(*((UNTRIED,) if found.was_cut else ()), *_not_carried(flags), *deadline.remarks()),
    )
    return MegatronPlan(plan=plan, step=step, effects=effects)


def _not_carried(flags: MegatronFlags) -> tuple[str, ...]:
    if flags.tensor_overlap is not TensorOverlap.NONE:
        return ()
    return (
        "tensor_overlap none is a baseline: Megatron-LM 0.17 and later have no switch for it, "
        "up to 0.16 it was --no-async-tensor-model-parallel-allreduce",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Switches for the step of `trials`, what sequence parallelism brings to them, and what was dropped."""

    trials: Trials
    flags: MegatronFlags
    more: tuple[SwitchAdvice, ...] = ()
    dropped: tuple[SwitchAdvice, ...] = ()
    was_cut: bool = False


def _searched(
    problem: PlanProblem, sequence: PlanProblem | None, scale: Scale, price: FrameworkModel | None, deadline: Deadline
) -> _Found:
    """The switches that pay, on the step with sequence parallelism if that pays; half of the budget for each."""
    first = deadline if sequence is None else deadline.within(0.5 * deadline.left_s)
    plain = _chosen(Trials(problem, price, first), scale)
    if sequence is None or deadline.left_s <= 0:
        return replace(plain, was_cut=plain.trials.was_cut or sequence is not None)
    other = _chosen(Trials(sequence, price, deadline), scale)
    gained = _sequence_advice(plain.trials.step_s(plain.flags), other.trials.step_s(other.flags))
    was_cut = plain.trials.was_cut or other.trials.was_cut
    if gained.gain > MIN_GAIN:
        return replace(other, flags=replace(other.flags, sequence_parallel=True), more=(gained,), was_cut=was_cut)
    return replace(plain, dropped=(*plain.dropped, gained), was_cut=was_cut)


def _taken(
    problem: PlanProblem,
    sequence: PlanProblem | None,
    wanted: MegatronFlags,
    price: FrameworkModel | None,
    deadline: Deadline,
) -> _Found:
    """These switches, on the step that they mean."""
    if sequence is None or not wanted.sequence_parallel:
        return _Found(trials=Trials(problem, price, deadline), flags=wanted)
    trials = Trials(sequence, price, deadline)
    if wanted.tensor_overlap is TensorOverlap.PIPELINED:  # there is no such step without
        return _Found(trials=trials, flags=wanted)
    without_s = Trials(problem, price, deadline).step_s(wanted)
    return _Found(trials=trials, flags=wanted, more=(_sequence_advice(without_s, trials.step_s(wanted)),))


def _sequence_advice(without_s: float, with_s: float) -> SwitchAdvice:
    return SwitchAdvice(switch="--sequence-parallel", without_s=without_s, with_s=with_s)


def _chosen(trials: Trials, scale: Scale) -> _Found:
    """The switches that pay, and those that do not."""
    problem = trials.problem
    phases = {op.name: op.origin.phase for op in problem.iteration.comms}
    sharded = any(phases[buffer.maker] is Phase.BACKWARD for buffer in parameter_gathers(problem.iteration))
    exchanges = any(op.collective.kind is CollectiveKind.ALL_TO_ALL for op in problem.iteration.comms)
    wanted = recommended(scale, fully_sharded=sharded)
    if exchanges and not _lacks_combined_schedule(problem.framework):
        wanted = _with_experts(problem, recommended(scale, has_experts=True, fully_sharded=sharded), wanted)
    flags, dropped = worthwhile(trials, wanted)
    flags, sizes = best_bucket(trials, flags)
    return _Found(trials=trials, flags=flags, dropped=(*dropped, *sizes))


def _of_one_stage(problem: PlanProblem, flags: MegatronFlags) -> MegatronFlags:
    """Without what the one micro-batch that stands for a pipeline's stage cannot show."""
    return flags if problem.pipeline == 1 else replace(flags, overlap_experts=False, delay_weight_grad=False)


def _of_all_stages(flags: MegatronFlags, pipeline: PipelineEffects | None) -> MegatronFlags:
    """With the interleaved schedule where that shortens the pipeline most, and enough; with overlapped experts, too."""
    found = () if pipeline is None else pipeline.switches
    if any(one.switch == EXPERTS_SWITCH and one.gain > MIN_GAIN for one in found):
        flags = replace(flags, overlap_experts=True)
    interleaving = [one for one in found if one.virtual_layers is not None and one.group is None]
    best = max(interleaving, key=lambda one: one.gain, default=None)
    if best is None or best.gain <= MIN_GAIN:
        return flags
    groups = (one for one in found if one.group is not None and one.virtual_layers == best.virtual_layers)
    group = next((one.group for one in groups if one.gain > MIN_GAIN), None)
    return replace(
        flags, interleaved=True, overlap_p2p=True, virtual_layers=best.virtual_layers, micro_batch_group=group
    )


def _simulated(
    problem: PlanProblem, flags: MegatronFlags, price: FrameworkModel | None
) -> tuple[SimulatedPlan, Iteration, Mapping[str, CommConfig]]:
    """The step with the switches, its operators and the settings of its collectives."""
    planned = Megatron(flags).plan(problem).iteration
    plain = simulated(problem, planned)
    if price is None:
        return plain, planned, NO_CONFIGS
    found = contended(problem, flags, price)
    step = SimulatedPlan(timeline=found.timeline, peak_bytes=plain.peak_bytes, simulation=plain.simulation)
    return step, found.iteration, found.configs


def _with_experts(problem: PlanProblem, wanted: MegatronFlags, otherwise: MegatronFlags) -> MegatronFlags:
    """The combined schedule of experts where the step has what it needs: two micro-batches."""
    try:
        Megatron(wanted).plan(problem)
    except JobError:
        return otherwise
    return wanted


def megatron_files(problem: PlanProblem, settings: object, effects: MegatronEffects | None) -> Mapping[str, bytes]:
    """What a job of Megatron-LM reads, by file name; nothing for another plan."""
    if effects is None or not isinstance(settings, MegatronFlags):
        return {}
    files = {}
    arguments = list(effects.arguments)
    if settings.tensor_overlap is TensorOverlap.PIPELINED:
        files[TP_OVERLAP_FILE] = tp_overlap_yaml(problem, settings)
        arguments.append(f"--tp-comm-overlap-cfg {TP_OVERLAP_FILE}")
    exports = [f"export {name}={value}\n" for name, value in effects.environment.items()]
    text = "".join((*exports, f'MEGATRON_OVERLAP_ARGS="{" ".join(arguments)}"\n'))
    return {ARGUMENTS_FILE: f"# Written by lagom plan --for megatron; source it.\n{text}".encode(), **files}


def megatron_lines(advice: MegatronEffects) -> tuple[str, ...]:
    """The advice for a terminal and the report."""
    how = "with contention" if advice.is_contended else "without contention"
    found = [
        f"advised on {advice.num_gpus} GPUs ({advice.scale}): {' '.join(advice.arguments) or 'no switch'}",
        *(f"environment: {name}={value}" for name, value in advice.environment.items()),
        f"step {format_seconds(advice.step_s)}, everything off {format_seconds(advice.without_overlap_s)} ({how})",
    ]
    found += (_line(one, advice.arguments) for one in (*advice.switches, *advice.not_advised))
    return (*found, *pipeline_lines(advice))


def pipeline_lines(advice: MegatronEffects) -> tuple[str, ...]:
    """What is advised for all stages together; nothing without a pipeline."""
    if advice.pipeline is None:
        return ()
    check = advice.pipeline.check
    rule = "enough" if check.is_enough else "too few"
    said = (
        f"pipeline: bubble {check.bubble:.1%} of the busy time, transfers {check.transfer_share:.1%} of the "
        f"pipeline; {check.num_micro_batches} micro-batches are {rule} (rule: {check.wanted_micro_batches})"
    )
    return (said, *(_line(one, ()) for one in advice.pipeline.switches))


def _line(one: SwitchAdvice | PipelineAdvice, arguments: Sequence[str]) -> str:
    """How much longer the step is without the switch (below zero it is shorter), and why it is or is not advised."""
    verdict = ""
    if one.gain <= MIN_GAIN:
        is_needed = one.switch == "--overlap-grad-reduce" and "--overlap-param-gather" in arguments
        reason = "--overlap-param-gather needs it" if is_needed else "gains little"
        verdict = f": {reason if one.switch in arguments else 'not advised'}"
    return f"{percent_text(one.without_s / one.with_s - 1):>8} {one.switch}{verdict}"
