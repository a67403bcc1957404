"""A training step of a named model on one rank, as its framework issues it.

The model's operators with every data dependence (`layer`), around which the framework's rules (`rules`) put gathers,
reductions and copies on the streams that it uses (`fsdp2`, `layerwise`, `buckets`); at the end gradients are clipped
where asked, and each unit's parameters are updated. One stage of a pipeline is built by the same function: micro-batch
after micro-batch through its chunks, each followed by the transfer to its neighbour (`stage_build`); stages are run
against each other in `sim.pipeline`. Layers that are alike share their operators (`tape`, `rolled`).

Departures: a tied table of a pipeline is summed between its stages after the reductions; norms' backward is one pass;
tokens are spread evenly over experts; there is no data loading.
"""

from dataclasses import replace

from lagom_overlap.errors import JobError
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import CommOp, Op
from lagom_overlap.workload.parallel.layout import Dispatcher, ParallelLayout
from lagom_overlap.workload.parallel.layout_check import check_model
from lagom_overlap.workload.precision import Precision, ProductFormat
from lagom_overlap.workload.step.operators import StepShape
from lagom_overlap.workload.step.parameter_units import Unit
from lagom_overlap.workload.step.rank_groups import StepGroups
from lagom_overlap.workload.step.rolled import RolledStep
from lagom_overlap.workload.step.rules import PROGRAM_ORDER, IssueRules, Sharding
from lagom_overlap.workload.step.stage_build import StageBuild
from lagom_overlap.workload.step.tape import LayerTapes


def _groups(layout: ParallelLayout) -> StepGroups:
    return StepGroups(
        tensor=layout.tensor,
        shard=layout.shard,
        replicas=layout.replicas // layout.shard,
        expert=layout.expert,
        pipeline=layout.pipeline,
        context=layout.context,
        expert_tensor=layout.expert_tensor,
        tied_stage=layout.mtp_chunk % layout.pipeline,
    )


def _check(model: TransformerModel, layout: ParallelLayout, seq_len: int, rules: IssueRules) -> None:
    check_model(model, layout, seq_len)
    if rules.sharding is Sharding.FSDP2 and layout.replicas > 1 and layout.zero_stage < 2:
        raise JobError(f"parallel.zero_stage is {layout.zero_stage}: {rules.name} shards parameters, must be 2 or 3")
    most = rules.most_zero_stage(layout.pipeline)
    if layout.zero_stage > most:
        raise JobError(
            f"parallel.zero_stage is {layout.zero_stage}, must be at most {most} with pipeline = {layout.pipeline} and "
            f"framework {rules.name}"
        )
    if rules.sharding is Sharding.BUCKETS and layout.replicate > 1:
        raise JobError(
            f"parallel.replicate is {layout.replicate}, must be 1 with framework {rules.name}: hybrid sharding is "
            "modelled for FSDP and DeepSpeed"
        )
    if model.mtp_layers and (not rules.trains_mtp or layout.zero_stage > 1):
        raise JobError(
            f"model {model.name!r} has multi-token prediction, which is modelled for Megatron-LM with zero_stage 0 or "
            f"1, not for {rules.name} with {layout.zero_stage}: set model.mtp_layers = 0"
        )
    is_megatrons = rules.mixture.fuses_moves
    if is_megatrons and model.num_experts and layout.tensor > 1 and not layout.sequence_parallel:
        raise JobError(
            "parallel.sequence_parallel is false, must be true: Megatron-LM trains no experts with tensor parallelism "
            "without it"
        )
    if not is_megatrons and (layout.fused_experts or layout.dispatcher is Dispatcher.CAPACITY):
        key = "fused_experts" if layout.fused_experts else "dispatcher = capacity"
        raise JobError(f"parallel.{key} is modelled for Megatron-LM; the framework is {rules.name}")


def _check_rowwise(rules: IssueRules) -> None:
    """Refuses row scales of frameworks that do not cast with torchao under torch.compile."""
    if not rules.casts.by_rows:
        raise JobError(
            "precision.products is fp8_rowwise, which is modelled for torchao under torch.compile: frameworks "
            f"torchtitan_blocks and torchtitan_compiled; the framework is {rules.name}"
        )


class StepBuilder:
    """Builds steps of `model` under `layout`, as `rules` issue them; what stages have in common is recorded once.

    Of a precision, and of whether gradients are clipped, None is the framework's default.

    Raises:
        JobError: if the layout does not fit the model, or the framework does not shard so.
    """

    def __init__(
        self,
        model: TransformerModel,
        layout: ParallelLayout,
        *,
        seq_len: int,
        rules: IssueRules,
        precision: Precision | None = None,
        unit: Unit = Unit.LAYER,
        clips: bool | None = None,
    ) -> None:
        _check(model, layout, seq_len, rules)
        if precision is not None and precision.products is ProductFormat.NVFP4 and rules.casts.by_columns:
            raise JobError(
                f"precision.products is nvfp4, which is modelled for Transformer Engine, not for {rules.name}"
            )
        self.rules, self._clips = rules, rules.clips if clips is None else clips
        self._shape = StepShape(
            model=model,
            layout=layout,
            groups=_groups(layout),
            seq_len=seq_len,
            precision=precision or rules.precision,
            unit=unit,
            accumulation=rules.accumulation,
            traffic=rules.traffic,
            casts=rules.casts,
            hides_tensor=rules.hides_tensor,
            sequence_first=rules.sequence_first,
            mixture=rules.mixture,
            joint_products=rules.joint_products,
            casts_before_gathers=rules.casts_before_gathers,
            stops_recompute=rules.stops_recompute,
            ring=rules.ring,
        )
        if self._shape.precision.products is ProductFormat.FP8_ROWWISE:
            _check_rowwise(rules)
        self._tapes = LayerTapes(self._shape)

    def rolled(self, rank: int = 0, num_micro_batches: int | None = None) -> RolledStep:
        """One step on one rank of pipeline stage `rank`; `num_micro_batches` runs fewer or more than the layout's."""
        shape, layout = self._shape, self._shape.layout
        num = layout.num_micro_batches if num_micro_batches is None else num_micro_batches
        build = StageBuild(shape, self.rules, self._tapes, rank=rank, num_batches=num)
        build.run(clips=self._clips)
        used = dict.fromkeys(op.communicator for op in build.graph.ops if isinstance(op, CommOp))
        return build.graph.finish(
            step_name(shape.model, layout),
            num_ranks=layout.num_gpus,
            resident_bytes=build.resident_bytes(),
            groups={name: shape.groups.ranks(name) for name in used},
        )


def build_step(
    model: TransformerModel,
    layout: ParallelLayout,
    *,
    seq_len: int,
    rules: IssueRules,
    precision: Precision | None = None,
    rank: int = 0,
    num_micro_batches: int | None = None,
    unit: Unit = Unit.LAYER,
    clips: bool | None = None,
) -> IssuedStep:
    """One whole step: arguments and errors are `StepBuilder`'s and its `rolled`'s."""
    builder = StepBuilder(model, layout, seq_len=seq_len, rules=rules, precision=precision, unit=unit, clips=clips)
    return builder.rolled(rank, num_micro_batches).unrolled()


def program_step(
    model: TransformerModel,
    layout: ParallelLayout,
    *,
    seq_len: int,
    gpus_per_node: int,
    unit: Unit = Unit.LAYER,
    precision: Precision | None = None,
) -> Iteration:
    """The step as a program says it, before any framework issues it: what the planners' papers begin with.

    Raises:
        JobError: as `build_step`, or if the layout has a pipeline.
    """
    if layout.pipeline > 1:
        raise JobError(f"step: parallel.pipeline is {layout.pipeline}, must be 1: a program is one rank's whole step")
    if layout.overlap_experts:
        raise JobError("step: parallel.overlap_experts is true, must be false: a program says what reads what")
    built = build_step(model, layout, seq_len=seq_len, rules=PROGRAM_ORDER, unit=unit, precision=precision)
    placed = built.on_nodes_of(gpus_per_node).iteration
    return replace(placed, ops=tuple(_on_stated_nodes(op, gpus_per_node) for op in placed.ops))


def _on_stated_nodes(op: Op, gpus_per_node: int) -> Op:
    """Planners that take a group apart by nodes need their number said, also of consecutive ranks."""
    if not isinstance(op, CommOp) or op.collective.num_nodes is not None:
        return op
    nodes = -(-op.collective.num_ranks // gpus_per_node)
    if op.collective.num_ranks % nodes:
        return op
    return replace(op, collective=replace(op.collective, num_nodes=nodes))


def step_name(model: TransformerModel, layout: ParallelLayout) -> str:
    """The model with the degrees that are not 1."""
    words = [model.name]
    words += [f"tp{layout.tensor}"] if layout.tensor > 1 else []
    words += [f"pp{layout.pipeline}"] if layout.pipeline > 1 else []
    words += [f"cp{layout.context}"] if layout.context > 1 else []
    if layout.data > 1:
        kind = {0: "dp", 3: "fsdp"}.get(layout.zero_stage, f"zero{layout.zero_stage}-")
        words += [f"dp{layout.replicate}"] if layout.replicate > 1 else []
        words.append(f"{kind}{layout.data // layout.replicate}")
    words += [f"ep{layout.expert}"] if layout.expert > 1 else []
    return "-".join(words)
