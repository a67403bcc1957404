"""Pipelines against their closed forms."""

from itertools import pairwise

import pytest

from lagom_overlap.sim.pipeline import SlotTimes, run_pipeline
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule, Slot, stage_slots

F, B = 1.0, 2.0


def end_s(layout: ParallelLayout, times: list[SlotTimes] | None = None) -> float:
    orders = [stage_slots(layout, rank) for rank in range(layout.pipeline)]
    chunks = layout.chunks
    even = [SlotTimes((F / chunks,) * chunks, (B / chunks,) * chunks)] * layout.pipeline
    return max(run[-1].end_s for run in run_pipeline(orders, times or even))


@pytest.mark.parametrize("schedule", [PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B])
@pytest.mark.parametrize(("pipeline", "num"), [(1, 5), (4, 1), (4, 4), (4, 16), (7, 3)])
def test_equal_stages_have_a_bubble_of_one_micro_batch_per_further_stage(
    schedule: PipelineSchedule, pipeline: int, num: int
) -> None:
    # Narayanan et al. (arXiv 2104.04473), section 2.2.1: (m + p - 1) (f + b).
    layout = ParallelLayout(pipeline=pipeline, global_batch=num, schedule=schedule)
    assert end_s(layout) == pytest.approx((num + pipeline - 1) * (F + B))


@pytest.mark.parametrize(("pipeline", "num", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (8, 8, 3), (8, 32, 2)])
def test_interleaving_divides_the_bubble_by_the_chunks(pipeline: int, num: int, chunks: int) -> None:
    # The same, section 2.2.2: m (f + b) + (p - 1) (f + b) / v.
    layout = ParallelLayout(pipeline=pipeline, global_batch=num, schedule=PipelineSchedule.INTERLEAVED, chunks=chunks)
    assert end_s(layout) == pytest.approx((num + (pipeline - 1) / chunks) * (F + B))


def test_the_slowest_stage_sets_the_pace() -> None:
    times = [SlotTimes((F,), (B,)), SlotTimes((2 * F,), (2 * B,)), SlotTimes((F,), (B,))]
    ends = [end_s(ParallelLayout(pipeline=3, global_batch=num), times) for num in (10, 11, 12)]
    assert [later - earlier for earlier, later in pairwise(ends)] == [2 * (F + B)] * 2
    assert ends[0] > 10 * 2 * (F + B)


def test_every_slot_waits_for_its_neighbour() -> None:
    layout = ParallelLayout(pipeline=4, global_batch=8, schedule=PipelineSchedule.INTERLEAVED, chunks=2)
    orders = [stage_slots(layout, rank) for rank in range(4)]
    runs = run_pipeline(orders, [SlotTimes((F, F), (B, B))] * 4)
    ends = {(r.slot.forward, r.slot.micro_batch, r.slot.chunk * 4 + r.rank): r for run in runs for r in run}
    for (forward, micro_batch, chunk), run in ends.items():
        before = (forward, micro_batch, chunk - 1 if forward else chunk + 1)
        if before in ends:
            assert ends[before].end_s <= run.start_s
    for run in runs:
        assert all(a.end_s <= b.start_s for a, b in pairwise(run))


def test_orders_that_wait_in_a_circle_are_refused() -> None:
    orders = [[Slot(True, 0), Slot(False, 0)], [Slot(False, 0), Slot(True, 0)]]
    with pytest.raises(ValueError, match="in a circle"):
        run_pipeline(orders, [SlotTimes((F,), (B,))] * 2)


def test_a_transfer_beside_the_next_slot_delays_only_who_waits_for_it() -> None:
    """One micro-batch: p forwards, p backwards and 2 (p - 1) transfers in a row, whoever sends."""
    stages, transfer_s = 4, 0.25
    layout = ParallelLayout(pipeline=stages, global_batch=1)
    orders = [stage_slots(layout, rank) for rank in range(stages)]
    runs = run_pipeline(orders, [SlotTimes((F,), (B,), transfer_s)] * stages)
    assert runs[0][-1].end_s == pytest.approx(stages * (F + B) + 2 * (stages - 1) * transfer_s)
    assert runs[0][0].end_s == pytest.approx(F)
