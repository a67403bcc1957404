"""Megatron-LM's exchanges by hand, against the pipeline without them, and against its own schedules (benchmarks)."""

from collections import Counter
from itertools import pairwise, product

import pytest

from lagom_overlap.sim.pipeline import Pass, SlotTimes, run_pipeline
from lagom_overlap.sim.transfers import StageExchange, run_programs, stage_program
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule, Slot, stage_slots


def layout(pipeline: int, chunks: int, num: int, *, goes_on: bool = False, group: int = 0) -> ParallelLayout:
    if chunks == 1:
        return ParallelLayout(pipeline=pipeline, global_batch=num)
    return ParallelLayout(
        pipeline=pipeline, chunks=chunks, global_batch=num, schedule=PipelineSchedule.INTERLEAVED,
        overlap_p2p=goes_on, micro_batch_group=group,
    )  # fmt: skip


LAYOUTS = [
    *(layout(pipeline, 1, num) for pipeline, num in product((2, 3, 4, 8), (1, 2, 4, 16))),
    *(
        layout(pipeline, chunks, pipeline * turns, goes_on=goes_on, group=group * pipeline)
        for pipeline, chunks, turns, goes_on, group in product((2, 4), (2, 3), (1, 2, 4), (False, True), (0, 1, 2))
        if group <= turns
    ),
]


def end_s(layout: ParallelLayout, transfer_s: float) -> float:
    programs = [stage_program(layout, rank) for rank in range(layout.pipeline)]
    times = [SlotTimes((1.0,) * layout.chunks, (2.0,) * layout.chunks, transfer_s)] * layout.pipeline
    return max(run[-1].end_s for run in run_programs(programs, times))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_result_is_sent_once_and_received_once(layout: ParallelLayout) -> None:
    ends: Counter[tuple[Pass, bool]] = Counter()
    for rank in range(layout.pipeline):
        program = stage_program(layout, rank)
        assert tuple(step for step in program if isinstance(step, Slot)) == stage_slots(layout, rank)
        for step in program:
            if isinstance(step, StageExchange):
                ends.update((each, each.chunk % layout.pipeline == rank) for each in step.passes)
    expected = {
        (Pass(forward, batch, chunk), sends)
        for forward, sends in product((True, False), repeat=2)
        for batch in range(layout.num_micro_batches)
        for chunk in range(1 - forward, layout.num_chunks - forward)
    }
    assert ends == Counter(dict.fromkeys(expected, 1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_transfers_that_take_nothing_leave_the_pipeline_as_it_is(layout: ParallelLayout) -> None:
    """Equal stages reach every exchange when what it brings is needed, and wait for nothing else there."""
    times = [SlotTimes((1.0,) * layout.chunks, (2.0,) * layout.chunks)] * layout.pipeline
    free = run_pipeline([stage_slots(layout, rank) for rank in range(layout.pipeline)], times)
    assert end_s(layout, 0.0) == pytest.approx(max(run[-1].end_s for run in free))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_longer_transfers_never_shorten_the_pipeline(layout: ParallelLayout) -> None:
    ends_s = [end_s(layout, transfer_s) for transfer_s in (0.0, 0.1, 0.5, 2.0)]
    assert all(earlier <= later for earlier, later in pairwise(ends_s))


@pytest.mark.parametrize("stages", [2, 5])
def test_one_micro_batch_passes_every_stage_twice(stages: int) -> None:
    assert end_s(layout(stages, 1, 1), 0.25) == pytest.approx(stages * 3.0 + 2 * (stages - 1) * 0.25)


def test_two_stages_of_two_chunks_by_hand() -> None:
    """The first stage, all of whose forwards are warm-up; it receives the other end's results one slot later."""
    program = stage_program(layout(2, 2, 2), 0)
    first, second = Slot(True, 0, 0), Slot(True, 1, 0)
    assert program[:4] == (
        first,
        StageExchange((Pass(True, 0, 0),)),
        second,
        StageExchange((Pass(True, 1, 0), Pass(True, 0, 1))),
    )
    assert program[4:8] == (
        Slot(True, 0, 1),
        StageExchange((Pass(True, 0, 2), Pass(True, 1, 1))),
        Slot(True, 1, 1),
        StageExchange((Pass(True, 1, 2),)),
    )
    assert stage_program(layout(2, 2, 2), 1)[0] == StageExchange((Pass(True, 0, 0),))


def test_a_stage_that_goes_on_waits_in_warm_up_and_flush_alone() -> None:
    """In between nothing is waited for: transfers of up to a slot cost what those at both ends cost."""
    waits = [step.waits for step in stage_program(layout(4, 2, 16, goes_on=True), 0) if isinstance(step, StageExchange)]
    first, last = waits.index(False), len(waits) - 1 - waits[::-1].index(False)
    assert not any(waits[first : last + 1])
    assert all(waits[:first] + waits[last + 1 :])
    short, long = (end_s(layout(4, 2, num, goes_on=True), 0.5) - end_s(layout(4, 2, num), 0.0) for num in (16, 32))
    assert short == pytest.approx(long)
    assert end_s(layout(4, 2, 32), 0.5) - end_s(layout(4, 2, 32), 0.0) > 2 * long


def test_programs_that_wait_in_a_circle_are_refused() -> None:
    slots = [(Slot(False, 0), Slot(True, 0)), (Slot(True, 0), Slot(False, 0))]
    with pytest.raises(ValueError, match="in a circle"):
        run_programs(slots, [SlotTimes((1.0,), (1.0,))] * 2)
