"""Interleaved stages whose sends and receives are in one queue, against PyTorch's own order and by hand."""

from types import SimpleNamespace

import pytest

from lagom_overlap.sim.pipeline import SlotTimes, run_pipeline, transfer_queues
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule, Slot, stage_slots


def orders_of(pipeline: int, chunks: int, num: int) -> list[tuple[Slot, ...]]:
    layout = ParallelLayout(
        pipeline=pipeline, chunks=chunks, global_batch=num, schedule=PipelineSchedule.INTERLEAVED, zero_stage=2
    )
    return [stage_slots(layout, rank) for rank in range(pipeline)]


@pytest.mark.torch
@pytest.mark.parametrize(("pipeline", "chunks", "num"), [(2, 2, 2), (4, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 8)])
def test_slots_and_queues_are_pytorchs(pipeline: int, chunks: int, num: int) -> None:
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules

    stub = SimpleNamespace(
        n_local_stages=chunks, pp_group_size=pipeline, microbatches_per_round=pipeline, _n_microbatches=num
    )
    lowered = {}
    for rank in range(pipeline):
        actions = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(stub, rank)
        kept = [each for each in actions if each is not None and each.microbatch_index is not None]
        lowered[rank] = kept
    slots = orders_of(pipeline, chunks, num)
    for rank, own in enumerate(slots):
        theirs = [
            (each.computation_type is schedules.F, each.microbatch_index, each.stage_index) for each in lowered[rank]
        ]
        assert [(slot.forward, slot.micro_batch, slot.chunk * pipeline + rank) for slot in own] == theirs

    full = schedules._add_send_recv(lowered, lambda stage: stage % pipeline, pipeline * chunks)
    for rank, queue in enumerate(transfer_queues(slots, chunks)):
        words = {
            schedules._ComputationType.SEND_F: (True, True),
            schedules._ComputationType.SEND_B: (True, False),
            schedules._ComputationType.RECV_F: (False, True),
            schedules._ComputationType.RECV_B: (False, False),
        }
        theirs = [
            (*words[each.computation_type], each.microbatch_index, each.stage_index)
            for each in full[rank]
            if each.computation_type in words
        ]
        ours = []
        for sent in queue:
            sends = sent.chunk % pipeline == rank
            ours.append((sends, *(sent if sends else sent.after())))
        assert ours == theirs


def times(pipeline: int, chunks: int, transfer_s: float = 0.0) -> list[SlotTimes]:
    return [SlotTimes((1.0,) * chunks, (3.0,) * chunks, transfer_s) for _ in range(pipeline)]


def test_even_stages_take_turns_while_the_queue_fills() -> None:
    """By hand, two stages of two chunks and two micro-batches, forwards of 1 s and backwards of 3 s.

    Stage 0 sends its first result (at 1), receives that of stage 1's (at 2), then sends its second one: stage 1
    begins the second micro-batch at 2, as it would have without a queue. With four stages it begins at 4, not at 2.
    """
    slots = orders_of(4, 2, 4)
    queued = run_pipeline(slots, times(4, 2), is_queued=True)
    free = run_pipeline(slots, times(4, 2))
    second = [next(run.start_s for run in runs[1] if run.slot == Slot(True, 1)) for runs in (queued, free)]
    assert second == [4.0, 2.0]
    assert max(run[-1].end_s for run in queued) > max(run[-1].end_s for run in free)


def test_a_queue_changes_nothing_where_every_transfer_is_the_next_one() -> None:
    """1F1B sends and receives in turn: the same to the digit."""
    layout = ParallelLayout(pipeline=3, global_batch=6, zero_stage=2)
    slots = [stage_slots(layout, rank) for rank in range(3)]
    assert run_pipeline(slots, times(3, 1), is_queued=True) == run_pipeline(slots, times(3, 1))


def test_orders_that_wait_in_a_circle_are_refused() -> None:
    slots = [(Slot(False, 0), Slot(True, 0)), (Slot(True, 0), Slot(False, 0))]
    with pytest.raises(ValueError, match="wait for each other in a circle"):
        run_pipeline(slots, times(2, 1), is_queued=True)
