"""A plan as settings of frameworks that do not run plans: FSDP2's calls, Megatron-LM's switches.

What a framework cannot be told is left out: FSDP2 knows units of modules and how far ahead they are gathered, Megatron
switches and a bucket size. So advice is less than the plan, and its effect is not the plan's prediction.
"""

from collections.abc import Mapping
from statistics import median_high

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.fsdp2_advice import Fsdp2Advice
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.megatron.flags import MegatronFlags, TensorOverlap
from lagom_overlap.planners.memory import parameter_gathers
from lagom_overlap.planners.times import origin_name
from lagom_overlap.workload import CommOp, CompOp, Iteration, MemoryBound, Op, Phase
from lagom_overlap.workload.rewrite.steps import Fuse, Split

_FORWARD = (Phase.FORWARD, Phase.LOSS)
_REDUCES = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


def fsdp2_advice(problem: PlanProblem, plan: Plan) -> Fsdp2Advice | None:
    """The plan as FSDP2's settings; None where the step gathers no parameters.

    Parameters are kept after forward where the step does so (its backward pass gathers none): no plan changes that.
    """
    before = problem.iteration
    gathers = [buffer.maker for buffer in parameter_gathers(before)]
    if not gathers:
        return None
    ops = {op.name: op for op in before.ops}
    depths = _depths(plan.iteration, dict.fromkeys(gathers))
    forward = [depths[name] for name in gathers if name in depths and ops[name].origin.phase in _FORWARD]
    backward = [depths[name] for name in gathers if name in depths and ops[name].origin.phase is Phase.BACKWARD]
    goes_back = any(op.origin.phase is Phase.BACKWARD for op in before.computations)
    fused = [step.comms for step in plan.rewrites if isinstance(step, Fuse)]
    together = [len(names) for names in fused if set(names) <= set(gathers)]
    streams = {op.stream for op in plan.iteration.comms if op.collective.kind is CollectiveKind.ALL_GATHER}
    scatters = {op.stream for op in plan.iteration.comms if op.collective.kind is CollectiveKind.REDUCE_SCATTER}
    return Fsdp2Advice(
        forward_prefetch=_typical(forward),
        backward_prefetch=_typical(backward),
        reshard_after_forward=bool(backward) or not goes_back,
        modules_per_unit=max(1, _typical(together)),
        separate_reduce_scatter_group=bool(streams and scatters and not streams & scatters),
    )


def _typical(numbers: list[int]) -> int:
    return median_high(numbers) if numbers else 0


def _depths(iteration: Iteration, gathers: Mapping[str, object]) -> dict[str, int]:
    """For each gather, how many units ahead of the one in use it is issued: those gathered and not used yet, and it.

    Copies that read nothing but the gather (FSDP2's copy-out) are part of it.
    """
    first_use: dict[str, int] = {}
    base_of: dict[str, str] = {}
    issued: dict[str, int] = {}
    for place, op in enumerate(iteration.ops):
        read = {base_of[dep] for dep in op.deps if dep in base_of}
        base = origin_name(op.name, gathers)
        if base in gathers:
            issued.setdefault(base, place)
            base_of[op.name] = base
        elif isinstance(op, CompOp) and isinstance(op.work, MemoryBound) and len(read) == len(op.deps) == 1:
            base_of[op.name] = read.pop()
        elif isinstance(op, CompOp):
            for used in read:
                first_use.setdefault(used, place)
    order = sorted(issued, key=issued.__getitem__)
    end = len(iteration.ops)
    return {
        name: sum(first_use.get(other, end) > issued[name] for other in order[:number])
        for number, name in enumerate(order)
    }


def megatron_arguments(problem: PlanProblem, plan: Plan) -> tuple[str, ...]:
    """The plan as Megatron-LM's switches; empty where the step has none of the communication that they move."""
    iteration = plan.iteration
    ops = {op.name: op for op in problem.iteration.ops}
    gathers = {buffer.maker for buffer in parameter_gathers(problem.iteration)}
    reduced = [op for op in problem.iteration.comms if op.collective.kind in _REDUCES and _is_gradient(op, ops)]
    tensor = {op.name for op in problem.iteration.comms if op.communicator.startswith(("tp", "tensor"))}
    if not (gathers or reduced or tensor):
        return ()
    split = any(isinstance(step, Split) and origin_name(step.comm, ops) in tensor for step in plan.rewrites)
    flags = MegatronFlags(
        overlap_grad_reduce=bool(reduced) and _leads_computation(iteration, {op.name for op in reduced}),
        overlap_param_gather=bool(gathers)
        and any(depth > 0 for depth in _depths(iteration, dict.fromkeys(gathers)).values()),
        tensor_overlap=TensorOverlap.PIPELINED if split else TensorOverlap.BULK,
    )
    return flags.arguments()


def _is_gradient(op: CommOp, ops: Mapping[str, Op]) -> bool:
    """Whether a reduction sums gradients of parameters: nothing but the optimizer, or nobody, waits for it."""
    waiting = [other for other in ops.values() if op.name in other.deps]
    return all(other.origin.phase is Phase.OPTIMIZER for other in waiting)


def _leads_computation(iteration: Iteration, names: set[str]) -> bool:
    """Whether a computation that does not wait for it is issued behind one of the collectives."""
    seen = False
    for op in iteration.ops:
        if origin_name(op.name, dict.fromkeys(names)) in names:
            seen = True
        elif seen and isinstance(op, CompOp) and op.origin.phase is not Phase.OPTIMIZER:
            return True
    return False
