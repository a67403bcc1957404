"""`lagom plan --planner megatron`: what each of Megatron-LM's switches is predicted to bring on this job."""

from dataclasses import replace

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import JobError
from lagom_overlap.plan.base import OpTimes, PlanProblem
from lagom_overlap.plan.megatron.advice import advise, recommended, scale_of, step_s, without_overlap_s
from lagom_overlap.plan.megatron.flags import MegatronFlags
from lagom_overlap.plan.megatron.pipeline import SlotSeconds
from lagom_overlap.plan.megatron.pipeline_advice import check_micro_batches, pipeline_advice
from lagom_overlap.plan.megatron.planner import Megatron
from lagom_overlap.plan.memory import parameter_gathers
from lagom_overlap.plan.times import ModelTimes
from lagom_overlap.report.plan_model import MegatronJson, PipelineJson, SwitchJson
from lagom_overlap.units import format_seconds
from lagom_overlap.workload import Phase, TransformerModel
from lagom_overlap.workload.dataflow import dataflow_iteration
from lagom_overlap.workload.parallel import ParallelLayout, Schedule
from lagom_overlap.workload.parallel.layer import ELEMENT_BYTES


def one_stage(model: TransformerModel, layout: ParallelLayout) -> tuple[TransformerModel, ParallelLayout]:
    """The layers and the layout of one stage; without a pipeline what was given.

    Raises:
        JobError: if the stages do not hold equally many layers.
    """
    if layout.pipeline == 1:
        return model, layout
    if model.num_layers % layout.pipeline:
        raise JobError(
            f"parallel.pipeline is {layout.pipeline}, must divide the {model.num_layers} layers of {model.name}"
        )
    stage = replace(model, num_layers=model.num_layers // layout.pipeline)
    alone = replace(layout, pipeline=1, chunks=1, schedule=Schedule.ONE_F_ONE_B, overlap_p2p=False)
    return stage, alone


def pipeline_json(
    model: TransformerModel, layout: ParallelLayout, seq_len: int, times: ModelTimes
) -> PipelineJson | None:
    """What interleaving and overlapped transfers bring, and whether micro-batches are enough; None: no pipeline."""
    if layout.pipeline == 1:
        return None
    stage, alone = one_stage(model, layout)
    seconds = _slot_seconds(stage, layout, alone, seq_len, times)
    check = check_micro_batches(layout, seconds)
    return PipelineJson(
        forward_s=seconds.forward_s,
        backward_s=seconds.backward_s,
        transfer_s=seconds.transfer_s,
        transfer_share=check.transfer_share,
        bubble=check.bubble,
        num_micro_batches=check.num_micro_batches,
        wanted_micro_batches=check.wanted_micro_batches,
        switches=[
            SwitchJson(switch=one.switch, without_s=one.without_s, with_s=one.with_s)
            for one in pipeline_advice(layout, seconds, stage.num_layers)
        ],
    )


def _slot_seconds(
    stage: TransformerModel, layout: ParallelLayout, alone: ParallelLayout, seq_len: int, times: ModelTimes
) -> SlotSeconds:
    """One micro-batch through one stage, operators one after the other; sending between neighbours."""
    cluster = times.model.cluster
    single = replace(alone, data=1, expert=1, zero_stage=0, global_batch=layout.micro_batch)
    step = dataflow_iteration(stage, single, seq_len=seq_len, gpus_per_node=cluster.gpus_per_node)
    spent = dict.fromkeys(Phase, 0.0)
    for op in step.ops:
        if op.origin.phase is not None:
            spent[op.origin.phase] += times.seconds(op)
    forward_s = spent[Phase.FORWARD] + spent[Phase.LOSS]
    backward_s = spent[Phase.BACKWARD] + spent[Phase.WEIGHT_GRAD] + spent[Phase.RECOMPUTE]
    num_bytes = layout.micro_batch * seq_len * stage.hidden * ELEMENT_BYTES
    if layout.sequence_parallel or layout.scatter_gather:
        num_bytes //= layout.tensor
    apart = layout.tensor * layout.data  # ranks between neighbours: Megatron places stages farthest apart
    num_nodes = 1 if 2 * apart <= cluster.gpus_per_node else 2
    sent = Collective(CollectiveKind.SEND_RECV, num_bytes, 2, num_nodes=num_nodes)
    transfer_s = times.model.collective(sent, CommConfig()).seconds()
    return SlotSeconds(forward_s=forward_s, backward_s=backward_s, transfer_s=transfer_s)


def megatron_json(problem: PlanProblem, num_gpus: int, pipeline: PipelineJson | None) -> MegatronJson:
    """The switches recommended for the scale, and the effect of each on this step; under contention where it is known.

    Raises:
        JobError: if the recommended switches exclude each other on this step.
    """
    phases = {op.name: op.origin.phase for op in problem.iteration.comms}
    sharded = any(phases[buffer.maker] is Phase.BACKWARD for buffer in parameter_gathers(problem.iteration))
    exchanges = any(op.collective.kind is CollectiveKind.ALL_TO_ALL for op in problem.iteration.comms)
    scale = scale_of(num_gpus)
    flags = recommended(scale, fully_sharded=sharded)
    if exchanges:
        flags = _with_experts(problem, recommended(scale, has_experts=True, fully_sharded=sharded), flags)
    model = _model_of(problem.times)
    return MegatronJson(
        scale=str(scale),
        num_gpus=num_gpus,
        is_contended=model is not None,
        arguments=list(flags.arguments()),
        step_s=step_s(problem, flags, model),
        without_overlap_s=without_overlap_s(problem, flags, model),
        switches=[
            SwitchJson(switch=one.switch, without_s=one.without_s, with_s=one.with_s)
            for one in advise(problem, flags, model)
        ],
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


def megatron_lines(advice: MegatronJson) -> tuple[str, ...]:
    """The advice for a terminal and the report."""
    how = "with contention" if advice.is_contended else "without contention"
    found = [
        f"recommended for {advice.num_gpus} GPUs ({advice.scale}): {' '.join(advice.arguments)}",
        f"step {format_seconds(advice.step_s)}, everything off {format_seconds(advice.without_overlap_s)} ({how})",
    ]
    found += [f"{_gain(one):>8} {one.switch}" for one in advice.switches]
    pipeline = advice.pipeline
    if pipeline is not None:
        rule = "enough" if pipeline.num_micro_batches >= pipeline.wanted_micro_batches else "too few"
        found.append(
            f"pipeline: bubble {pipeline.bubble:.1%} of the busy time, transfers {pipeline.transfer_share:.1%} of the "
            f"pipeline; {pipeline.num_micro_batches} micro-batches are {rule} (rule: {pipeline.wanted_micro_batches})"
        )
        found += [f"{_gain(one):>8} {one.switch}" for one in pipeline.switches]
    return tuple(found)


def _gain(one: SwitchJson) -> str:
    """How much longer it is without."""
    return f"{one.without_s / one.with_s - 1:+.1%}"
