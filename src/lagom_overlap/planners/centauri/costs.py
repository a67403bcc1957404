"""What Centauri's tiers know of a step: Eq. 1's inputs by layer, Eq. 2's for the whole (spec, planners 2.5, 2.6)."""

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.centauri.layer_tier import LayerCosts
from lagom_overlap.planners.centauri.model_tier import ModelCosts
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CompOp, Op, Phase
from lagom_overlap.workload.gathers import parameter_gathers

LAYER_PHASES = (Phase.BACKWARD, Phase.WEIGHT_GRAD)
"""Of a layer's backward."""


def layer_costs(problem: PlanProblem, index: StepIndex) -> dict[int, LayerCosts]:
    """Eq. 1's inputs of every backward layer, summed over its micro-batches."""
    gathers = {buffer.maker for buffer in parameter_gathers(index.iteration)}
    gradients = {op.name for op in index.gradient_comms}
    sums: dict[int, dict[str, float]] = {}
    for op in index.iteration.ops:
        if op.origin.phase in LAYER_PHASES and op.origin.layer is not None:
            layer_sums = sums.setdefault(op.origin.layer, dict.fromkeys(LayerCosts.__dataclass_fields__, 0.0))
            layer_sums[_field(op, gathers, gradients)] += problem.times.seconds(op)
    return {layer: LayerCosts(**layer_sums) for layer, layer_sums in sums.items()}


def _field(op: Op, gathers: set[str], gradients: set[str]) -> str:
    if isinstance(op, CompOp):
        return "weight_gradient_s" if op.origin.phase is Phase.WEIGHT_GRAD else "data_gradient_s"
    if op.name in gathers:
        return "weight_gather_s"
    if op.name in gradients:
        return "weight_scatter_s"
    return "activation_gather_s" if op.collective.kind is CollectiveKind.ALL_GATHER else "activation_scatter_s"


def num_batches(index: StepIndex) -> int:
    """Micro-batches of a step."""
    return 1 + max((op.origin.microbatch for op in index.iteration.ops), default=0)


def model_costs(problem: PlanProblem, index: StepIndex) -> ModelCosts:
    """Eq. 2's inputs: costs per micro-batch, memory left over by what stays."""
    batches = num_batches(index)
    all_batches = problem.num_micro_batches or batches
    seconds = problem.times.seconds
    ops, gathers = index.iteration.ops, {buffer.maker for buffer in parameter_gathers(index.iteration)}
    gradients = {op.name for op in index.gradient_comms}
    comps = [op for op in ops if isinstance(op, CompOp)]
    kept = sum(b.num_bytes for b in index.iteration.buffers if b.maker not in gathers)
    limit = problem.memory_limit_bytes or problem.cluster.gpu.memory_bytes
    activation = max(1, kept // batches)
    return ModelCosts(
        gather_s=sum(seconds(op) for op in ops if op.name in gathers),
        scatter_s=sum(seconds(op) for op in ops if op.name in gradients),
        forward_s=sum(seconds(op) for op in comps if op.origin.phase is Phase.FORWARD) / batches,
        backward_s=sum(seconds(op) for op in comps if op.origin.phase in LAYER_PHASES) / batches,
        activation_bytes=activation,
        memory_bytes=max(activation, limit - index.iteration.resident_bytes),
        num_micro_batches=all_batches,
        pipeline=min(problem.pipeline, all_batches),
    )
