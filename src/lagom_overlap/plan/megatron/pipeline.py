"""Point-to-point communication of a pipeline: warm-up, order of chunks, bubble, what is hidden.

Sources: Megatron-LM at d98e8a6 (`pipeline_parallel/schedules.py`), arXiv 2104.04473. Without interleaving every
transfer is waited for (`overlap_p2p_comm` is refused there); with interleaving a stage goes on while its transfers run.
Guideline of the notes: at least four micro-batches per pipeline stage, then transfers cost less than 5 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lagom_overlap.errors import JobError
from lagom_overlap.workload.parallel import ParallelLayout, Slot, stage_slots

MICRO_BATCHES_PER_STAGE = 4
"""The notes' rule."""


def num_warm_up(
    layout: ParallelLayout, rank: int, *, group_size: int | None = None, overlap_experts: bool = False
) -> int:
    """Forwards that a stage runs before its first backward.

    1F1B: p - r - 1; interleaved: 2 (p - r - 1) + (v - 1) g, one more with overlapped experts; g micro-batches of a
    group (p by default) go through a chunk in turn.
    """
    pipeline, total = layout.pipeline, layout.num_micro_batches * layout.chunks
    if layout.chunks == 1:
        return min(total, pipeline - rank - 1)
    group = pipeline if group_size is None else group_size
    if group < pipeline:
        raise JobError(f"megatron: micro-batch group is {group}, must be at least the pipeline's {pipeline} stages")
    return min(total, 2 * (pipeline - rank - 1) + (layout.chunks - 1) * group + overlap_experts)


def chunk_order(num_micro_batches: int, chunks: int, group_size: int) -> tuple[tuple[int, int], ...]:
    """(micro-batch, chunk) of every forward: groups of micro-batches go through all chunks in turn."""
    order = []
    for first in range(0, num_micro_batches, group_size):
        members = range(first, min(first + group_size, num_micro_batches))
        order += [(batch, chunk) for chunk in range(chunks) for batch in members]
    return tuple(order)


def bubble_share(pipeline: int, num_micro_batches: int, chunks: int = 1) -> float:
    """Idle over busy time: (p - 1) / (v m)."""
    return (pipeline - 1) / (chunks * num_micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSeconds:
    """One chunk's forward and backward, and one transfer between neighbours."""

    forward_s: float
    backward_s: float
    transfer_s: float


def pipeline_s(layout: ParallelLayout, seconds: SlotSeconds, *, overlap_p2p: bool) -> float:
    """The pipeline's iteration; a transfer takes the sender's time too unless it is overlapped.

    Raises:
        JobError: if transfers are to be overlapped without interleaving.
    """
    if overlap_p2p and layout.chunks == 1:
        raise JobError("megatron: overlap_p2p needs the interleaved schedule; 1F1B without interleaving forbids it")
    orders = [stage_slots(layout, rank) for rank in range(layout.pipeline)]
    return _run(orders, seconds, blocks=not overlap_p2p)


def _run(orders: Sequence[Sequence[Slot]], seconds: SlotSeconds, *, blocks: bool) -> float:
    """Arrivals by (direction, micro-batch, chunk of the model); a stage runs its slots in order."""
    num, last = len(orders), len(orders) * (1 + max(slot.chunk for slot in orders[0])) - 1
    arrived: dict[tuple[bool, int, int], float] = {}
    clock, place = [0.0] * num, [0] * num
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                slot = order[place[rank]]
                chunk = slot.chunk * num + rank
                if slot.forward:
                    need = (True, slot.micro_batch, chunk - 1) if chunk else None
                else:
                    need = (False, slot.micro_batch, chunk + 1) if chunk < last else (True, slot.micro_batch, chunk)
                if need is not None and need not in arrived:
                    break
                start = max(clock[rank], arrived[need] if need is not None else 0.0)
                end = start + (seconds.forward_s if slot.forward else seconds.backward_s)
                sends = chunk < last if slot.forward else chunk > 0
                arrived[slot.forward, slot.micro_batch, chunk] = end + seconds.transfer_s * sends
                clock[rank] = end + seconds.transfer_s * (sends and blocks)
                place[rank] += 1
                moved = True
    return max(clock)
