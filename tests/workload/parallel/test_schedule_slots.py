"""Pipeline schedules against their definitions."""

from collections import Counter
from itertools import accumulate

import pytest

from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule, Slot, stage_slots
from lagom_overlap.workload.parallel.schedule import most_in_flight


def layout(schedule: PipelineSchedule, pipeline: int, num: int, chunks: int = 1) -> ParallelLayout:
    return ParallelLayout(pipeline=pipeline, global_batch=num, schedule=schedule, chunks=chunks)


CASES = [
    (PipelineSchedule.GPIPE, 4, 8, 1),
    (PipelineSchedule.ONE_F_ONE_B, 4, 8, 1),
    (PipelineSchedule.ONE_F_ONE_B, 4, 2, 1),
    (PipelineSchedule.INTERLEAVED, 4, 8, 2),
    (PipelineSchedule.INTERLEAVED, 4, 4, 3),
    (PipelineSchedule.INTERLEAVED, 2, 6, 5),
]


@pytest.mark.parametrize(("schedule", "pipeline", "num", "chunks"), CASES)
def test_every_stage_runs_everything_once_and_forward_before_backward(
    schedule: PipelineSchedule, pipeline: int, num: int, chunks: int
) -> None:
    for rank in range(pipeline):
        slots = stage_slots(layout(schedule, pipeline, num, chunks), rank)
        assert Counter(slots) == Counter(
            Slot(forward, m, c) for forward in (True, False) for m in range(num) for c in range(chunks)
        )
        seen = {slot: place for place, slot in enumerate(slots)}
        assert all(seen[Slot(True, m, c)] < seen[Slot(False, m, c)] for m in range(num) for c in range(chunks))


def test_one_f_one_b_of_the_second_of_three_stages_by_hand() -> None:
    slots = stage_slots(layout(PipelineSchedule.ONE_F_ONE_B, 3, 4), 1)
    words = " ".join(f"{'F' if slot.forward else 'B'}{slot.micro_batch}" for slot in slots)
    assert words == "F0 F1 B0 F2 B1 F3 B2 B3"


def test_interleaving_takes_chunks_in_turn_every_pipeline_micro_batches() -> None:
    # Narayanan et al. (arXiv 2104.04473), Fig. 4, first device of two with two chunks: warm-up 2 (p - 1) + (v - 1) p.
    slots = stage_slots(layout(PipelineSchedule.INTERLEAVED, 2, 4, 2), 0)
    words = [f"{'F' if slot.forward else 'B'}{slot.micro_batch}.{slot.chunk}" for slot in slots]
    assert words[:6] == ["F0.0", "F1.0", "F0.1", "F1.1", "F2.0", "B0.1"]


@pytest.mark.parametrize(
    ("schedule", "chunks", "rank", "held"),
    [
        (PipelineSchedule.GPIPE, 1, 0, 16),
        (PipelineSchedule.ONE_F_ONE_B, 1, 0, 4),
        (PipelineSchedule.ONE_F_ONE_B, 1, 3, 1),
        # Korthikanti et al. (arXiv 2205.05198), section 4.2.3: L (1 + (p - 1) / (p v)) layers, here in chunks of L / 8.
        (PipelineSchedule.INTERLEAVED, 2, 0, 11),
    ],
)
def test_activations_held_are_those_of_the_papers(
    schedule: PipelineSchedule, chunks: int, rank: int, held: int
) -> None:
    assert most_in_flight(layout(schedule, 4, 16, chunks), rank) == held


def test_as_many_activations_are_held_as_counting_the_slots_says() -> None:
    counted, told = [], []
    for schedule, pipeline, num, chunks in [*CASES, (PipelineSchedule.INTERLEAVED, 3, 9, 2)]:
        for rank in range(pipeline):
            one = layout(schedule, pipeline, num, chunks)
            told.append(most_in_flight(one, rank))
            held = accumulate(1 if slot.forward else -1 for slot in stage_slots(one, rank))
            counted.append(max(held))
    assert told == counted
