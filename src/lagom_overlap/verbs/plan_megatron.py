"""`lagom plan --planner megatron`: what each of Megatron-LM's switches is predicted to bring on this job."""

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.planners.base import OpTimes, PlanProblem
from lagom_overlap.planners.effects import SwitchAdvice
from lagom_overlap.planners.megatron.advice import (
    advise,
    recommended,
    scale_of,
    step_s,
    without_overlap_s,
    worthwhile,
)
from lagom_overlap.planners.megatron.flags import MegatronFlags
from lagom_overlap.planners.megatron.pipeline import SlotSeconds
from lagom_overlap.planners.megatron.pipeline_advice import PipelineAdvice, check_micro_batches, pipeline_advice
from lagom_overlap.planners.megatron.planner import Megatron
from lagom_overlap.planners.memory import parameter_gathers
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.results.plan import MegatronEffects, PipelineEffects
from lagom_overlap.units import format_seconds
from lagom_overlap.workload import CommOp, Phase
from lagom_overlap.workload.step.groups import DATA, PIPELINE


def pipeline_effects(job: JobStep, times: ModelTimes) -> PipelineEffects | None:
    """What interleaving and overlapped transfers bring, and whether micro-batches are enough; None: no pipeline."""
    layout = job.layout
    if layout.pipeline == 1:
        return None
    seconds = _slot_seconds(job, times)
    return PipelineEffects(
        slot=seconds,
        check=check_micro_batches(layout, seconds),
        switches=pipeline_advice(layout, seconds, job.model.num_layers // layout.pipeline),
    )


def _slot_seconds(job: JobStep, times: ModelTimes) -> SlotSeconds:
    """One micro-batch through the first stage, operators one after the other; sending to the next one."""
    spent = dict.fromkeys(Phase, 0.0)
    transfer_s = 0.0
    for op in job.step().iteration.ops:
        if isinstance(op, CommOp) and op.communicator == PIPELINE:
            transfer_s = times.seconds(op)
        elif op.origin.phase is not None and not (isinstance(op, CommOp) and op.communicator in DATA):
            spent[op.origin.phase] += times.seconds(op)
    forward_s = spent[Phase.FORWARD] + spent[Phase.LOSS]
    backward_s = spent[Phase.BACKWARD] + spent[Phase.WEIGHT_GRAD] + spent[Phase.RECOMPUTE]
    return SlotSeconds(forward_s=forward_s, backward_s=backward_s, transfer_s=transfer_s)


def megatron_effects(problem: PlanProblem, num_gpus: int, pipeline: PipelineEffects | None) -> MegatronEffects:
    """Of the switches recommended for the scale those that pay on this step, and the effect of each, with contention.

    Raises:
        JobError: if the recommended switches exclude each other on this step.
    """
    phases = {op.name: op.origin.phase for op in problem.iteration.comms}
    sharded = any(phases[buffer.maker] is Phase.BACKWARD for buffer in parameter_gathers(problem.iteration))
    exchanges = any(op.collective.kind is CollectiveKind.ALL_TO_ALL for op in problem.iteration.comms)
    scale = scale_of(num_gpus)
    wanted = recommended(scale, fully_sharded=sharded)
    if exchanges:
        wanted = _with_experts(problem, recommended(scale, has_experts=True, fully_sharded=sharded), wanted)
    model = _model_of(problem.times)
    flags, not_advised = worthwhile(problem, wanted, model)
    return MegatronEffects(
        scale=str(scale),
        num_gpus=num_gpus,
        is_contended=model is not None,
        arguments=flags.arguments(),
        step_s=step_s(problem, flags, model),
        without_overlap_s=without_overlap_s(problem, flags, model),
        switches=advise(problem, flags, model),
        not_advised=not_advised,
        pipeline=pipeline,
    )


def _with_experts(problem: PlanProblem, wanted: MegatronFlags, otherwise: MegatronFlags) -> MegatronFlags:
    """The combined schedule of experts where the step has what it needs: two micro-batches."""
    try:
        Megatron(wanted).plan(problem)
    except JobError:
        return otherwise
    return wanted


def _model_of(times: OpTimes) -> ContentionModel | None:
    return times.model if isinstance(times, ModelTimes) else None


def megatron_lines(advice: MegatronEffects) -> tuple[str, ...]:
    """The advice for a terminal and the report."""
    how = "with contention" if advice.is_contended else "without contention"
    found = [
        f"advised on {advice.num_gpus} GPUs ({advice.scale}): {' '.join(advice.arguments) or 'no switch'}",
        f"step {format_seconds(advice.step_s)}, everything off {format_seconds(advice.without_overlap_s)} ({how})",
    ]
    found += map(_line, advice.switches)
    found += map(_line, advice.not_advised)
    pipeline = advice.pipeline
    if pipeline is not None:
        check = pipeline.check
        rule = "enough" if check.is_enough else "too few"
        found.append(
            f"pipeline: bubble {check.bubble:.1%} of the busy time, transfers {check.transfer_share:.1%} of the "
            f"pipeline; {check.num_micro_batches} micro-batches are {rule} (rule: {check.wanted_micro_batches})"
        )
        found += map(_line, pipeline.switches)
    return tuple(found)


def _line(one: SwitchAdvice | PipelineAdvice) -> str:
    """How much longer the step is without the switch; below zero it is shorter."""
    verdict = "" if one.with_s < one.without_s else ": not advised"
    return f"{one.without_s / one.with_s - 1:>+8.1%} {one.switch}{verdict}"
