"""Megatron-LM's overlap as a planner: fixed rules on any data-flow iteration, no search.

Every rule is an arc, a fusion, a split or a place in launch order (spec, planners section 3). Launch order is program
order (CUDA_DEVICE_MAX_CONNECTIONS=1: one in-order queue), so the order of issue is what counts; a collective that the
code waits for at once is on the computations' stream.

1. Gradients travel by bucket as soon as the bucket's last product has ended, or all after backward.
2. The gather of parameter bucket k + 1 is launched when bucket k is first needed: a prefetch of one.
3. Tensor parallelism: see `flags` for bulk, `tensor` for pieces.
4. Experts: see `combined`.
5. Delayed weight gradients are launched last before their bucket travels.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from lagom_overlap.plan.base import Plan, PlanProblem
from lagom_overlap.plan.finish import Issue, finished, order_by
from lagom_overlap.plan.megatron.buckets import bucket_rewrites
from lagom_overlap.plan.megatron.combined import combined_ranks
from lagom_overlap.plan.megatron.flags import USERBUFFER_SPLITS, MegatronFlags, TensorOverlap, default_bucket_elements
from lagom_overlap.plan.megatron.roles import Role, Roles
from lagom_overlap.plan.megatron.tensor import pipelined
from lagom_overlap.plan.memory import parameter_gathers
from lagom_overlap.plan.step_index import StepIndex
from lagom_overlap.workload import CompOp, Iteration, Phase
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Rewrite

GRADIENT_BYTES = 4
"""Megatron accumulates and reduces gradients in FP32."""
_STREAMS = {
    Role.GRADIENT: "gradients",
    Role.PARAMETER: "parameters",
    Role.SAVED_INPUT: "tensor",
    Role.INPUT_GRADIENT: "tensor",
    Role.EXPERT: "experts",
    Role.ACTIVATION: "tensor",
}


@dataclass(frozen=True, slots=True)
class Megatron:
    """Plans as Megatron-LM runs with these switches; `gradient_bytes` per element of a gradient."""

    flags: MegatronFlags = field(default_factory=MegatronFlags)
    gradient_bytes: int = GRADIENT_BYTES
    name: str = "megatron"

    def plan(self, problem: PlanProblem) -> Plan:
        """The one plan that the switches mean.

        Raises:
            JobError: if a switch does not suit the iteration, or the plan needs more memory than the limit.
        """
        rewrites = self._rewrites(problem)
        iteration = rewritten(problem.iteration, rewrites)
        index = StepIndex(iteration)
        roles = Roles.find(index)
        waits = self._gather_waits(index) if self.flags.overlap_param_gather else ()
        order = order_by(iteration, self._ranks(index, roles), waits)
        streams = self._streams(index, roles)
        return finished(problem, self.name, rewrites, Issue(order=order, streams=streams, waits=waits))

    def _rewrites(self, problem: PlanProblem) -> list[Rewrite]:
        index = StepIndex(problem.iteration)
        roles = Roles.find(index)
        found: list[Rewrite] = []
        if problem.exact:
            return found
        gradients = index.gradient_comms
        if gradients and self.flags.is_first_stage:
            size = self.flags.bucket_elements
            size = size or default_bucket_elements(max(op.collective.num_ranks for op in gradients))
            found += bucket_rewrites(index, size, self.gradient_bytes)
        elif gradients:
            found += bucket_rewrites(index, 1 << 62, self.gradient_bytes)
        if self.flags.tensor_overlap is TensorOverlap.PIPELINED:
            found += pipelined(index, roles, self.flags.tensor_splits, self.flags.rs_dgrad)
        return found

    def _gather_waits(self, index: StepIndex) -> tuple[tuple[str, str], ...]:
        """Gather k + 1 is launched when gather k was waited for: it has ended, and its first user is next."""
        gathers = [buffer.maker for buffer in parameter_gathers(index.iteration)]
        gathers.sort(key=lambda name: min(index.place[user] for user in index.followers[name]))
        waits = []
        for one, following in pairwise(gathers):
            first_user = min(index.followers[one], key=index.place.__getitem__)
            ahead = [dep for dep in index.ops[first_user].deps if dep != one]
            waits += [(following, earlier) for earlier in (one, *ahead) if earlier != following]
        return tuple(dict.fromkeys(waits))

    def _ranks(self, index: StepIndex, roles: Roles) -> dict[str, float]:
        num = len(index.iteration.ops)
        if self.flags.overlap_experts:
            ranks = combined_ranks(index, self.flags.delay_weight_grad)
        else:
            ranks = {name: float(place) for name, place in index.place.items()}
            if self.flags.delay_weight_grad:
                self._delay(index, ranks)
        ranks |= self._gather_ranks(index, ranks)
        if self.flags.tensor_overlap is not TensorOverlap.NONE:
            for name in roles.names(Role.SAVED_INPUT):
                ranks[name] = _before_data_gradient(index, name, ranks)
        late = max(ranks.values(), default=0.0) + num
        for op in index.iteration.ops:
            if roles.of.get(op.name) is Role.GRADIENT and not self.flags.overlap_grad_reduce:
                ranks[op.name] = late + index.place[op.name]
            elif op.origin.phase is Phase.OPTIMIZER:
                ranks[op.name] = late + num + index.place[op.name]
        return ranks

    @staticmethod
    def _delay(index: StepIndex, ranks: dict[str, float]) -> None:
        """Weight gradients just before the first collective that needs them."""
        for op in index.computations:
            readers = [ranks[name] for name in index.followers[op.name]]
            if op.origin.phase is Phase.WEIGHT_GRAD and readers:
                ranks[op.name] = max(ranks[op.name], min(readers) - 0.5)

    def _gather_ranks(self, index: StepIndex, ranks: dict[str, float]) -> dict[str, float]:
        """Gathers just before the first user of the bucket before (overlapped), or of their own."""
        gathers = [buffer.maker for buffer in parameter_gathers(index.iteration)]
        firsts = {name: min(ranks[user] for user in index.followers[name]) for name in gathers}
        gathers.sort(key=firsts.__getitem__)
        found = {}
        for number, name in enumerate(gathers):
            ahead = gathers[max(0, number - 1)] if self.flags.overlap_param_gather else name
            found[name] = firsts[ahead] - 0.25
        return found

    def _streams(self, index: StepIndex, roles: Roles) -> dict[str, str]:
        compute = _compute_stream(index.iteration)
        streams = {}
        for op in index.iteration.comms:
            role = roles.of[op.name]
            stream = _STREAMS[role] if self._is_asynchronous(op.name, role) else compute
            if stream != op.stream:
                streams[op.name] = stream
        return streams

    def _is_asynchronous(self, name: str, role: Role) -> bool:
        match role:
            case Role.GRADIENT:
                return self.flags.overlap_grad_reduce
            case Role.PARAMETER:
                return self.flags.overlap_param_gather
            case Role.EXPERT:
                return self.flags.overlap_experts
            case Role.SAVED_INPUT | Role.INPUT_GRADIENT:
                return self.flags.tensor_overlap is not TensorOverlap.NONE
            case Role.ACTIVATION:
                return "#" in name


def from_options(
    *,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    bucket_elements: int = 0,
    tensor_overlap: str = "bulk",
    rs_dgrad: bool = False,
    tensor_splits: int = USERBUFFER_SPLITS,
    overlap_experts: bool = False,
    delay_weight_grad: bool = False,
) -> Megatron:
    """The planner with a job file's options; `bucket_elements` 0 is Megatron's rule.

    Raises:
        ValueError: if a word is none of its switch's.
        JobError: if switches exclude each other.
    """
    flags = MegatronFlags(
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        bucket_elements=bucket_elements or None,
        tensor_overlap=TensorOverlap(tensor_overlap),
        rs_dgrad=rs_dgrad,
        tensor_splits=tensor_splits,
        overlap_experts=overlap_experts,
        delay_weight_grad=delay_weight_grad,
    )
    return Megatron(flags)


def _before_data_gradient(index: StepIndex, gather: str, ranks: dict[str, float]) -> float:
    """The rank of the first operator that reads what the weight's product reads beside the gathered input."""
    beside = [
        ranks[name]
        for user in index.followers[gather]
        for dep in index.ops[user].deps
        if dep != gather
        for name in index.followers[dep]
        if isinstance(index.ops[name], CompOp) and index.ops[name].origin.phase is Phase.BACKWARD
    ]
    return min(beside, default=ranks[gather]) - 0.25


def _compute_stream(iteration: Iteration) -> str:
    return next((op.stream for op in iteration.computations), "compute")
