"""The order in which a pipeline stage runs forwards and backwards: GPipe, 1F1B, interleaved 1F1B.

Sources: GPipe (arXiv 1811.06965); 1F1B with a flush (PipeDream-Flush, arXiv 2006.09503); interleaved: Megatron-LM
(arXiv 2104.04473, section 2.2), whose warm-up holds 2 (p - rank - 1) + (chunks - 1) p forwards, as PyTorch's does
(`torch/distributed/pipelining/schedules.py`). Older Megatron-LM ran all forwards first where there are as many
micro-batches as stages; the time is the same, and the first stage's memory.
"""

from dataclasses import dataclass
from functools import lru_cache

from lagom_overlap.workload.parallel.layout import ParallelLayout, PipelineSchedule


@dataclass(frozen=True, slots=True)
class Slot:
    """One forward or backward of one micro-batch through one model chunk of a stage."""

    forward: bool
    micro_batch: int
    chunk: int = 0


@lru_cache(maxsize=64)  # asked for by the simulation and by the memory of every layout
def stage_slots(layout: ParallelLayout, rank: int) -> tuple[Slot, ...]:
    """What stage `rank` runs, in order: every micro-batch once forward and once backward through every chunk.

    With interleaving the layout's `micro_batch_group` go through a chunk before the next chunk's turn.
    """
    num = layout.num_micro_batches
    if layout.schedule is PipelineSchedule.INTERLEAVED:
        return _interleaved(layout, rank, layout.micro_batch_group or layout.pipeline)
    warm_up = num_warm_up(layout, rank)
    slots = [Slot(True, index) for index in range(warm_up)]
    for index in range(warm_up, num):
        slots += [Slot(True, index), Slot(False, index - warm_up)]
    slots += [Slot(False, index) for index in range(num - warm_up, num)]
    return tuple(slots)


def _interleaved(layout: ParallelLayout, rank: int, group: int) -> tuple[Slot, ...]:
    """Chunks take turns every `group` micro-batches; backwards go through them from the last."""
    chunks, num = layout.chunks, layout.num_micro_batches
    total = num * chunks
    turns = [
        (batch, chunk)
        for first in range(0, num, group)
        for chunk in range(chunks)
        for batch in range(first, min(first + group, num))
    ]

    def slot(index: int, forward: bool) -> Slot:
        batch, chunk = turns[index]
        return Slot(forward, batch, chunk if forward else chunks - 1 - chunk)

    warm_up = num_warm_up(layout, rank)
    slots = [slot(index, True) for index in range(warm_up)]
    for index in range(warm_up, total):
        slots += [slot(index, True), slot(index - warm_up, False)]
    slots += [slot(index, False) for index in range(total - warm_up, total)]
    return tuple(slots)


def most_in_flight(layout: ParallelLayout, rank: int) -> int:
    """The most chunk forwards of a stage whose backward is still to come, at any time: their activations are held.

    Those of the warm-up, and the one after it, which runs before the first backward.
    """
    return min(layout.num_micro_batches * layout.chunks, num_warm_up(layout, rank) + 1)


def num_warm_up(layout: ParallelLayout, rank: int) -> int:
    """Forwards that a stage runs before its first backward has its forward right before it."""
    num, stages_behind = layout.num_micro_batches, layout.pipeline - rank - 1
    match layout.schedule:
        case PipelineSchedule.GPIPE:
            return num
        case PipelineSchedule.ONE_F_ONE_B:
            return min(num, stages_behind)
        case PipelineSchedule.INTERLEAVED:
            group = layout.micro_batch_group or layout.pipeline
            return min(num * layout.chunks, 2 * stages_behind + (layout.chunks - 1) * group)
