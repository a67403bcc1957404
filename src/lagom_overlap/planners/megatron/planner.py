"""Megatron-LM's overlap as a planner: fixed rules on any data-flow iteration, no search.

Every rule is an arc, a fusion, a split or a place in launch order (spec, planners section 3). Launch order is program
order (CUDA_DEVICE_MAX_CONNECTIONS=1: one in-order queue), so the order of issue is what counts; a collective that the
code waits for at once is on the computations' stream.

1. Gradients travel by bucket as soon as the bucket's last product has ended, or all after backward.
2. The gather of parameter bucket k + 1, with the copies into it, is launched when bucket k is first needed: a prefetch
   of one.
3. Tensor parallelism: see `mechanisms` for bulk, `pipelined` for pieces.
4. Experts: see `combined_ranks`.
5. Delayed weight gradients are launched last before their bucket travels.

Pieces of tensor-parallel collectives overlap pieces of their product (userbuffers, `--tp-comm-overlap`). Forward: a
gather with the column-parallel product after it, a scatter with the row-parallel product before it; backward: the
gather of the output's gradient with the product for the input's, and with `rs_dgrad` the scatter of the input's
gradient with the product that makes it. A chain of s pieces takes about T / s and the longer of the two chains.

Combined 1F1B runs the forward of one micro-batch during the backward of the one before, layer by layer, so that an
exchange of experts' tokens of one runs under the other's computation (Megatron-LM, `model_chunk_schedule_plan.py`;
spec, planners section 3, point 5). Launch order of a pair: combine backward, attention forward, experts backward,
dispatch forward, experts' weight gradients, dispatch backward, experts forward, combine forward, attention backward,
attention's weight gradients. Without a pipeline: F0, then (B_i, F_i+1), then B_last.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.context import divisible
from lagom_overlap.planners.finish import Issue, finished, order_by
from lagom_overlap.planners.framework_waits import framework_arcs
from lagom_overlap.planners.megatron.mechanisms import (
    USERBUFFER_SPLITS,
    MegatronFlags,
    TensorOverlap,
    default_bucket_elements,
)
from lagom_overlap.planners.resources import compute_stream
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Gather, Gemm, Iteration, Op, Phase
from lagom_overlap.workload.gathers import copies_into, parameter_gathers
from lagom_overlap.workload.rewrite.apply import rewritten, same_kind
from lagom_overlap.workload.rewrite.steps import ChainLink, Fuse, Rewrite, Split


class MegatronRole(StrEnum):
    """Which of Megatron's mechanisms issues a collective."""

    GRADIENT = "gradient"
    PARAMETER = "parameter"
    SAVED_INPUT = "saved_input"
    INPUT_GRADIENT = "input_gradient"
    EXPERT = "expert"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of all collectives of an iteration."""

    of: dict[str, MegatronRole]

    @classmethod
    def find(cls, index: StepIndex) -> "Roles":
        """Tells the collectives of an iteration apart."""
        gradients = {op.name for op in index.gradient_comms}
        parameters = {buffer.maker for buffer in parameter_gathers(index.iteration)}
        roles = {}
        for op in index.iteration.comms:
            if op.name in gradients:
                roles[op.name] = MegatronRole.GRADIENT
            elif op.name in parameters:
                roles[op.name] = MegatronRole.PARAMETER
            else:
                roles[op.name] = _role(index, op)
        return cls(roles)

    def names(self, role: MegatronRole) -> list[str]:
        """Collectives of a role, in program order."""
        return [name for name, own_role in self.of.items() if own_role is role]


def _role(index: StepIndex, op: CommOp) -> MegatronRole:
    if op.collective.kind is CollectiveKind.ALL_TO_ALL:
        return MegatronRole.EXPERT
    readers = [index.ops[name].origin.phase for name in index.followers[op.name]]
    if op.collective.kind is CollectiveKind.ALL_GATHER and readers and set(readers) == {Phase.WEIGHT_GRAD}:
        return MegatronRole.SAVED_INPUT
    reduces = op.collective.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
    phases = [index.ops[dep].origin.phase for dep in op.deps]
    if reduces and op.origin.phase is Phase.BACKWARD and phases == [Phase.BACKWARD]:
        return MegatronRole.INPUT_GRADIENT
    return MegatronRole.ACTIVATION


_FORWARD_SLOTS = {(0, False): 1, (0, True): 3, (1, False): 6, (1, True): 7, (2, False): 7}
"""(exchanges of the layer's forward issued before, is an exchange) -> launch slot."""
_BACKWARD_SLOTS = {(0, False): 0, (0, True): 0, (1, False): 2, (1, True): 5, (2, False): 8}
_EXPERT_WEIGHTS, _OTHER_WEIGHTS = 4, 9
"""Launch slots of weight gradients: the experts', and the others', behind all else of the pair."""
_SLOTS = 10
"""Places between two steps, so that an operator can be put before or behind one."""


def combined_ranks(index: StepIndex, delay_weight_grad: bool) -> dict[str, float]:
    """Ranks for `order_by`: the launch order of the pairs.

    Raises:
        JobError: if there are fewer than two micro-batches, or no exchanges.
    """
    batches = sorted({op.origin.microbatch for op in index.iteration.ops})
    if len(batches) < 2:
        raise JobError("megatron: overlap_experts needs at least 2 micro-batches")
    exchanges = [op for op in index.iteration.comms if op.collective.kind is CollectiveKind.ALL_TO_ALL]
    if not exchanges:
        raise JobError("megatron: overlap_experts needs a mixture of experts with expert parallelism")
    layers = 1 + max(op.origin.layer or 0 for op in index.iteration.ops)
    seen: dict[tuple[int, int, bool], int] = defaultdict(int)
    after_experts: dict[tuple[int, int], bool] = {}
    ranks: dict[str, float] = {}
    num = len(index.iteration.ops)
    for op in index.iteration.ops:
        step, slot = _step_and_slot(op, layers, seen, after_experts, delay_weight_grad)
        ranks[op.name] = (step * _SLOTS + slot) + index.place[op.name] / (num + 1)
    return ranks


def _step_and_slot(
    op: Op,
    layers: int,
    seen: dict[tuple[int, int, bool], int],
    after_experts: dict[tuple[int, int], bool],
    delay_weight_grad: bool,
) -> tuple[int, int]:
    """The pair's number and the launch slot in it; each micro-batch has `layers` pairs and two edges."""
    phase, batch, layer = op.origin.phase, op.origin.microbatch, op.origin.layer
    period = layers + 2
    if phase is Phase.OPTIMIZER:
        return 1_000_000, 0
    forward = phase is Phase.FORWARD
    if layer is None:
        if forward:
            return batch * period + (0 if "embed" in op.name else period - 1), 0
        return (batch + 1) * period + (period - 1 if "embed" in op.name else 0), 0
    pair = batch * period + 1 + layer if forward else (batch + 1) * period + layers - layer
    place = (batch, layer, forward)
    exchange = isinstance(op, CommOp) and op.collective.kind is CollectiveKind.ALL_TO_ALL
    before = min(seen[place], 2)
    if exchange:
        seen[place] += 1
    if phase is Phase.WEIGHT_GRAD and (delay_weight_grad or seen[place] == 1):
        return pair, _EXPERT_WEIGHTS if before == 1 else _OTHER_WEIGHTS
    slots = _FORWARD_SLOTS if forward else _BACKWARD_SLOTS
    return pair, slots.get((before, exchange), _OTHER_WEIGHTS)


def pipelined(index: StepIndex, roles: Roles, num_splits: int, rs_dgrad: bool) -> list[Split]:
    """A split for every gather and scatter that has a product next to it whose rows divide."""
    rewrites = []
    for name in roles.names(MegatronRole.ACTIVATION) + (roles.names(MegatronRole.INPUT_GRADIENT) if rs_dgrad else []):
        comm = index.ops[name]
        assert not isinstance(comm, CompOp), name
        kind = comm.collective.kind
        if comm.shards is None or comm.shards.sizes[0] % num_splits or comm.shards.combine[0] != Gather(0):
            continue
        gathers = kind is CollectiveKind.ALL_GATHER
        if not gathers and kind is not CollectiveKind.REDUCE_SCATTER:
            continue
        neighbours = index.followers[name] if gathers else list(comm.deps)
        products = [link for link in (_rows_of(index, n) for n in neighbours) if link is not None]
        links = divisible(index, tuple(products[:1]), num_splits, from_end=not gathers)
        if links:
            rewrites.append(Split(name, 0, num_splits, () if gathers else links, links if gathers else ()))
    return rewrites


def _rows_of(index: StepIndex, name: str) -> ChainLink | None:
    """A product cut by rows; weights' gradients sum over them and are left out."""
    op = index.ops[name]
    if not isinstance(op, CompOp) or not isinstance(op.work, Gemm) or op.origin.phase is Phase.WEIGHT_GRAD:
        return None
    return ChainLink(name, 0) if op.shards is not None and op.shards.combine[0] == Gather(0) else None


def bucket_sizes(elements: Sequence[int], bucket_elements: int) -> list[list[int]]:
    """Which parameters (by place in backward order) share a bucket."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for place, size in enumerate(elements):
        buckets[-1].append(place)
        filled += size
        if filled >= bucket_elements:
            buckets.append([])
            filled = 0
    return [bucket for bucket in buckets if bucket]


def _runs(index: StepIndex) -> Iterator[list[CommOp]]:
    """Gradient collectives by kind and group, each in program order; a chain's later members stay where they are."""
    runs: list[list[CommOp]] = []
    taken = {op.name for op in index.gradient_comms}
    for op in index.gradient_comms:
        if any(dep in taken for dep in op.deps):
            continue
        for run in runs:
            if same_kind(run[0], op):
                run.append(op)
                break
        else:
            runs.append([op])
    yield from runs


def bucket_rewrites(index: StepIndex, bucket_elements: int, element_bytes: int) -> list[Fuse]:
    """The fusions that make buckets; gradients have `element_bytes` each."""
    rewrites = []
    for run in _runs(index):
        elements = [op.collective.num_bytes // element_bytes for op in run]
        for bucket in bucket_sizes(elements, bucket_elements):
            rewrites += [
                Fuse(part) for part in _unordered(index, [run[place].name for place in bucket]) if len(part) > 1
            ]
    return rewrites


def _unordered(index: StepIndex, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A bucket in parts, in none of which one waits for another: the host may wait for one between micro-batches."""
    members, part = set(names), list[str]()
    behind: set[str] = set()
    for op in index.iteration.ops[min(map(index.place.__getitem__, names)) :]:
        waits = any(dep in behind for dep in op.deps)
        if op.name in members:
            if waits:
                yield tuple(part)
                part, behind = [], set()
            part.append(op.name)
        if op.name in members or waits:
            behind.add(op.name)
    yield tuple(part)


GRADIENT_BYTES = 4
"""Megatron accumulates and reduces gradients in FP32."""
_STREAMS = {
    MegatronRole.GRADIENT: "gradients",
    MegatronRole.PARAMETER: "parameters",
    MegatronRole.SAVED_INPUT: "tensor",
    MegatronRole.INPUT_GRADIENT: "tensor",
    MegatronRole.EXPERT: "experts",
    MegatronRole.ACTIVATION: "tensor",
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
        rewrites, _, issue = self._issue(problem)
        return finished(problem, self.name, rewrites, issue)

    def step(self, problem: PlanProblem) -> Iteration:
        """The step of that plan, and no bounds, memory or times of it.

        Raises:
            JobError: if a switch does not suit the iteration.
        """
        _, iteration, issue = self._issue(problem)
        return rewritten(iteration, (issue.rewrite,))

    def _issue(self, problem: PlanProblem) -> tuple[list[Rewrite], Iteration, Issue]:
        """The rewrites but the last, what they make, and the order in which Megatron issues it."""
        rewrites = self._rewrites(problem)
        iteration = rewritten(problem.iteration, rewrites)
        index = StepIndex(iteration)
        roles = Roles.find(index)
        waits = self._gather_waits(index) if self.flags.overlap_param_gather else ()
        if problem.framework is not None:
            waits = (*waits, *((later, earlier) for earlier, later in framework_arcs(iteration)))
        order = order_by(iteration, self._ranks(index, roles), waits)
        streams = self._streams(index, roles)
        return rewrites, iteration, Issue(order=order, streams=streams, waits=waits)

    def _rewrites(self, problem: PlanProblem) -> list[Rewrite]:
        index = StepIndex(problem.iteration)
        roles = Roles.find(index)
        rewrites: list[Rewrite] = []
        if problem.exact:
            return rewrites
        gradients = index.gradient_comms
        if gradients and self.flags.is_first_stage:
            size = self.flags.bucket_elements
            size = size or default_bucket_elements(max(op.collective.num_ranks for op in gradients))
            rewrites += bucket_rewrites(index, size, self.gradient_bytes)
        elif gradients:
            rewrites += bucket_rewrites(index, 1 << 62, self.gradient_bytes)
        if self.flags.tensor_overlap is TensorOverlap.PIPELINED:
            rewrites += pipelined(index, roles, self.flags.tensor_splits, self.flags.rs_dgrad)
        return rewrites

    def _gather_waits(self, index: StepIndex) -> tuple[tuple[str, str], ...]:
        """Gather k + 1 is launched when gather k was waited for: it has ended, and its first user is next."""
        copies = copies_into(index.iteration)
        compute = compute_stream(index.iteration)
        computing = [op.name for op in index.computations if op.stream == compute]
        before = dict(pairwise(reversed(computing)))
        gathers = sorted(copies, key=lambda name: min(index.place[user] for user in index.followers[name]))
        waits = []
        for one, following in pairwise(gathers):
            first_user = min(index.followers[one], key=index.place.__getitem__)
            ahead = [dep for dep in index.ops[first_user].deps if dep != one]
            if not ahead and first_user in before:  # a copy out of the gather: it is next when the one before it ends
                ahead = [before[first_user]]
            head = (*copies[following], following)[0]
            waits += [(head, earlier) for earlier in (one, *ahead) if earlier not in (following, *copies[following])]
        return tuple(dict.fromkeys(waits))

    def _ranks(self, index: StepIndex, roles: Roles) -> dict[str, float]:
        num = len(index.iteration.ops)
        if self.flags.overlap_experts:
            ranks = combined_ranks(index, self.flags.delay_weight_grad)
        else:
            ranks = {name: float(place) for name, place in index.place.items()}
        ranks |= self._gather_ranks(index, ranks)
        if self.flags.tensor_overlap is not TensorOverlap.NONE:
            for name in roles.names(MegatronRole.SAVED_INPUT):
                ranks[name] = _before_data_gradient(index, name, ranks)
        late = max(ranks.values(), default=0.0) + num
        for op in index.iteration.ops:
            if roles.of.get(op.name) is MegatronRole.GRADIENT and not self.flags.overlap_grad_reduce:
                ranks[op.name] = late + index.place[op.name]
            elif op.origin.phase is Phase.OPTIMIZER:
                ranks[op.name] = late + num + index.place[op.name]
        return ranks

    def _gather_ranks(self, index: StepIndex, ranks: dict[str, float]) -> dict[str, float]:
        """Gathers, with their copies, just before the first user of the bucket before (overlapped), or of their own."""
        copies = copies_into(index.iteration)
        firsts = {name: min(ranks[user] for user in index.followers[name]) for name in copies}
        gathers = sorted(copies, key=firsts.__getitem__)
        rank_of: dict[str, float] = {}
        for number, name in enumerate(gathers):
            ahead = gathers[max(0, number - 1)] if self.flags.overlap_param_gather else name
            rank_of |= dict.fromkeys((*copies[name], name), firsts[ahead] - 0.25)
        return rank_of

    def _streams(self, index: StepIndex, roles: Roles) -> dict[str, str]:
        compute = compute_stream(index.iteration)
        streams = {op.name: op.stream for op in index.iteration.ops}
        for op in index.iteration.comms:
            role = roles.of[op.name]
            streams[op.name] = _STREAMS[role] if self._is_asynchronous(op.name, role) else compute
        if not self.flags.overlap_param_gather:
            copied = [name for copies in copies_into(index.iteration).values() for name in copies]
            streams |= dict.fromkeys(copied, compute)
        return {op.name: streams[op.name] for op in index.iteration.ops if streams[op.name] != op.stream}

    def _is_asynchronous(self, name: str, role: MegatronRole) -> bool:
        match role:
            case MegatronRole.GRADIENT:
                return self.flags.overlap_grad_reduce
            case MegatronRole.PARAMETER:
                return self.flags.overlap_param_gather
            case MegatronRole.EXPERT:
                return self.flags.overlap_experts
            case MegatronRole.SAVED_INPUT | MegatronRole.INPUT_GRADIENT:
                return self.flags.tensor_overlap is not TensorOverlap.NONE
            case MegatronRole.ACTIVATION:
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
    """Chooses Megatron-LM's overlap switches; `bucket_elements` 0 is Megatron's own rule.

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
    """The rank of the first operator that reads what the weight's product reads besides the gathered input."""
    siblings = [
        ranks[name]
        for user in index.followers[gather]
        for dep in index.ops[user].deps
        if dep != gather
        for name in index.followers[dep]
        if isinstance(index.ops[name], CompOp) and index.ops[name].origin.phase is Phase.BACKWARD
    ]
    return min(siblings, default=ranks[gather]) - 0.25
