"""Point-to-point communication of a pipeline: its bubble, and what is hidden.

Sources: Megatron-LM at d98e8a6 (`pipeline_parallel/schedules.py`), arXiv 2104.04473. Without interleaving every
transfer is waited for (`overlap_p2p_comm` is refused there); with interleaving a stage goes on while its transfers run.
Guideline of the notes: at least four micro-batches per pipeline stage, then transfers cost less than 5 %.
"""

from dataclasses import dataclass

from lagom_overlap.errors import JobError
from lagom_overlap.sim.pipeline import SlotTimes, run_pipeline
from lagom_overlap.workload.parallel import ParallelLayout, stage_slots

MICRO_BATCHES_PER_STAGE = 4
"""The notes' rule."""


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
    return max(run[-1].end_s for run in run_pipeline(orders, _slot_times(layout, seconds, overlap_p2p)))


def _slot_times(layout: ParallelLayout, seconds: SlotSeconds, overlap_p2p: bool) -> list[SlotTimes]:
    """Per stage; a blocking transfer is part of every slot whose result goes to a neighbour."""
    blocking_s = 0.0 if overlap_p2p else seconds.transfer_s
    last, chunks = layout.num_chunks - 1, range(layout.chunks)
    return [
        SlotTimes(
            tuple(seconds.forward_s + blocking_s * (chunk * layout.pipeline + rank < last) for chunk in chunks),
            tuple(seconds.backward_s + blocking_s * (chunk * layout.pipeline + rank > 0) for chunk in chunks),
            seconds.transfer_s if overlap_p2p else 0.0,
        )
        for rank in range(layout.pipeline)
    ]
