"""Combined 1F1B: the forward of one micro-batch beside the backward of the one before, layer by layer.

So that an exchange of experts' tokens of one runs under the other's computation (Megatron-LM,
`model_chunk_schedule_plan.py`; spec, planners section 3, point 5). Launch order of a pair: combine backward, attention
forward, experts backward, dispatch forward, experts' weight gradients, dispatch backward, experts forward, combine
forward, attention backward, attention's weight gradients. Without a pipeline: F0, then (B_i, F_i+1), then B_last.
"""

from collections import defaultdict

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.plan.step_index import StepIndex
from lagom_overlap.workload import CommOp, Op, Phase

_FORWARD_SLOTS = {(0, False): 1, (0, True): 3, (1, False): 6, (1, True): 7, (2, False): 7}
"""(exchanges of the layer's forward issued before, is an exchange) -> launch slot."""
_BACKWARD_SLOTS = {(0, False): 0, (0, True): 0, (1, False): 2, (1, True): 5, (2, False): 8}
_EXPERT_WEIGHTS, _OTHER_WEIGHTS = 4, 9
_SLOTS = 10


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
