"""What Centauri was compared with, as planners: how each framework issues the collectives that the iteration has.

How parameters and optimizer are sharded belongs to the iteration; these planners only issue. All leave tensor-parallel
collectives to Megatron's default (bulk).

- `ddp`: gradients by buckets of 25 MB during backward (PyTorch DDP, arXiv 2006.15704), parameters as they come.
- `zero1`: gradients after backward, parameters waited for (ZeRO, arXiv 1910.02054, as DeepSpeed's stage 1 runs it).
- `zero2`: gradients during backward by buckets of 500 million elements (DeepSpeed's default), parameters waited for.
- `zero3`: gradients during backward as they come, one gather ahead.
- `out_of_order`: gradients of weights of the first k layers are computed after the chain of input gradients, the first
  layer's first, so that what is needed first travels first (OOO backprop, EuroSys 2022); the k with the shortest
  predicted step of 0, L/4, L/2, 3L/4 and L is taken.
"""

from dataclasses import dataclass

from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.finish import Issue, finished, order_by
from lagom_overlap.planners.megatron.mechanisms import MegatronFlags
from lagom_overlap.planners.megatron.planner import Megatron
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import Phase
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Reorder

DDP_BUCKET_BYTES = 25 << 20
"""DDP's bucket (torch, `bucket_cap_mb`)."""
ZERO2_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's `reduce_bucket_size` by default."""
_BYTE = 1
"""Per element, so that a bucket of elements is one of bytes."""


@dataclass(frozen=True, slots=True)
class _Preset:
    name: str
    flags: MegatronFlags
    element_bytes: int

    def plan(self, problem: PlanProblem) -> Plan:
        """The one plan of the framework.

        Raises:
            JobError: if the plan needs more memory than the limit.
        """
        return Megatron(self.flags, self.element_bytes, self.name).plan(problem)


def ddp() -> _Preset:
    """PyTorch DDP."""
    return _Preset("ddp", MegatronFlags(bucket_elements=DDP_BUCKET_BYTES), _BYTE)


def zero1() -> _Preset:
    """DeepSpeed, ZeRO stage 1."""
    flags = MegatronFlags(overlap_grad_reduce=False, overlap_param_gather=False, bucket_elements=ZERO2_BUCKET_ELEMENTS)
    return _Preset("zero1", flags, 2)


def zero2() -> _Preset:
    """DeepSpeed, ZeRO stage 2."""
    return _Preset("zero2", MegatronFlags(overlap_param_gather=False, bucket_elements=ZERO2_BUCKET_ELEMENTS), 2)


def zero3() -> _Preset:
    """DeepSpeed, ZeRO stage 3."""
    return _Preset("zero3", MegatronFlags(bucket_elements=1), _BYTE)


@dataclass(frozen=True, slots=True)
class OutOfOrder:
    """Out-of-order backward over buckets like DDP's."""

    def plan(self, problem: PlanProblem) -> Plan:
        """The best of the delays.

        Raises:
            JobError: if no delay fits the memory limit.
        """
        base = ddp().plan(problem)
        *rewrites, last = base.rewrites
        assert isinstance(last, Reorder)
        iteration = rewritten(problem.iteration, rewrites)
        index = StepIndex(iteration)
        layers = 1 + max((op.origin.layer or 0 for op in iteration.ops), default=0)
        best, shortest = base, predict(problem, base.iteration).schedule.makespan
        place = {name: number for number, name in enumerate(last.order)}
        for delayed in sorted({layers // 4, layers // 2, 3 * layers // 4, layers} - {0}):
            order = order_by(iteration, _delayed(index, place, delayed), last.waits)
            issue = Issue(order=order, streams=dict(last.streams), waits=last.waits)
            notes = (f"weight gradients of the first {delayed} layers come last",)
            plan = finished(problem, "out_of_order", rewrites, issue, notes)
            makespan = predict(problem, plan.iteration).schedule.makespan
            if makespan < shortest:
                best, shortest = plan, makespan
        return Plan(
            planner="out_of_order",
            rewrites=best.rewrites,
            iteration=best.iteration,
            lower_bound_s=best.lower_bound_s,
            is_optimal=best.is_optimal,
            notes=best.notes,
        )


def _delayed(index: StepIndex, place: dict[str, int], num_layers: int) -> dict[str, float]:
    """Ranks with the weight gradients of the first layers, and what only they feed, behind all of backward."""
    end = float(len(place))
    ranks = {name: float(number) for name, number in place.items()}
    gradients = {op.name for op in index.gradient_comms}
    for op in index.iteration.ops:
        layer = op.origin.layer
        delayed = op.origin.phase is Phase.WEIGHT_GRAD and layer is not None and layer < num_layers
        if delayed and layer is not None:
            ranks[op.name] = end + layer + place[op.name] / end
        elif op.name in gradients and layer is not None and layer < num_layers:
            ranks[op.name] = end + layer + 0.999
        elif op.origin.phase is Phase.OPTIMIZER:
            ranks[op.name] = 3 * end + place[op.name]
    return ranks
