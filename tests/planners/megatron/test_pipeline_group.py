"""Micro-batches of a chunk launched together: Centauri's Fig. 7, and what is known of the extremes."""

import pytest

from lagom_overlap.planners.megatron.pipeline import SlotSeconds, pipeline_s
from lagom_overlap.planners.megatron.pipeline_group import ChunkComms, launched_together, least_launched
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule

LAYOUT = ParallelLayout(pipeline=4, chunks=2, schedule=PipelineSchedule.INTERLEAVED, global_batch=16, overlap_p2p=True)
SECONDS = SlotSeconds(forward_s=1.0, backward_s=2.0, transfer_s=0.1)


def tried(reduce_s: float, gather_s: float = 0.0):
    return {
        one.group: one for one in launched_together(LAYOUT, SECONDS, ChunkComms(gather_s=gather_s, reduce_s=reduce_s))
    }


def test_without_communication_depth_first_is_megatrons_schedule_and_enough() -> None:
    found = tried(0.0)
    assert sorted(found) == [4, 8, 16]
    assert found[4].iteration_s == pytest.approx(pipeline_s(LAYOUT, SECONDS, overlap_p2p=True))
    least = least_launched(tuple(found.values()))
    assert least.group == 4


def test_more_micro_batches_together_hold_more_and_hide_more_of_the_gradients() -> None:
    found = tried(14.0)
    assert found[4].held < found[8].held < found[16].held
    hidden = [28.0 - (found[group].iteration_s - tried(0.0)[group].iteration_s) for group in (4, 8, 16)]
    assert hidden == sorted(hidden)
    assert hidden[0] < hidden[1]


def test_figure_7_eight_micro_batches_hide_the_reduction_that_four_do_not() -> None:
    """Depth 4, two chunks, 16 micro-batches: 8 overlap as well as 16 with less memory."""
    found = tried(10.0)
    least = least_launched(tuple(found.values()))
    assert least.group == 8
    assert least.held < found[16].held
