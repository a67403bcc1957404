"""Hangs worked by hand: what a person reads from the dumps of four ranks."""

import pytest

from lagom_overlap.analysis.hang import hangs_of
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import UNKNOWN, CommCall, GpuTrace, KnobReach, empty_events
from lagom_overlap.units import MIB

WORLD = (0, 1, 2, 3)


def call(number: int, op: str = "all_reduce", size: int = 2 * MIB, state: str = "completed", group: str = "dp"):
    return CommCall(
        event=UNKNOWN,
        op=op,
        kind=CollectiveKind(op),
        communicator=group,
        reach=KnobReach.TUNER,
        duration_ns=0,
        ranks=WORLD,
        num_bytes=size,
        sequence=number,
        is_started=state != "scheduled",
        is_finished=state == "completed",
    )


def job(*ranks: list[CommCall]) -> list[GpuTrace]:
    return [
        GpuTrace(file=f"{n}", format="flight recorder", rank=n, events=empty_events(), calls=tuple(calls))
        for n, calls in enumerate(ranks)
    ]


def test_a_rank_that_never_came_is_named_with_what_it_did_last():
    waits = [call(4), call(5, state="started")]
    (hang,) = hangs_of(job(waits, waits, waits, [call(4)]))
    assert str(hang) == (
        "all_reduce of 2 MiB: ranks 0-2 wait, rank 3 never called it (its last was all_reduce, number 4) "
        "(number 5 on dp)"
    )
    assert hang.rank_is_at_fault


def test_ranks_that_call_different_operations_or_sizes_are_named():
    waits = [call(4), call(5, state="started")]
    (hang,) = hangs_of(job(waits, waits, [call(4), call(5, "all_gather", state="started")], waits))
    assert str(hang).startswith("ranks call different operations: all_reduce on ranks 0-1, 3, all_gather on rank 2")
    (hang,) = hangs_of(job(waits, [call(4), call(5, size=MIB, state="started")], waits, waits))
    assert str(hang).startswith("ranks give all_reduce different sizes: 2 MiB on ranks 0, 2-3, 1 MiB on rank 1")


def test_a_call_that_all_ranks_are_in_says_where_it_started():
    started, queued = [call(5, state="started")], [call(5, state="scheduled")]
    (hang,) = hangs_of(job(started, queued, started, started))
    assert "started and not ended on ranks 0, 2-3, queued and not started on rank 1" in str(hang)
    assert not hang.rank_is_at_fault


def test_ranks_without_a_dump_are_said_to_be_unknown():
    (hang,) = hangs_of(job([call(5, state="started")], [call(5, state="started")]))
    assert "no dump of ranks 2-3" in str(hang)


def test_the_group_in_which_ranks_disagree_comes_before_those_that_wait():
    waits = [call(5, state="started"), call(7, group="tp", state="started")]
    found = hangs_of(job(waits, waits, waits, waits[:1]))
    assert [hang.communicator for hang in found] == ["tp", "dp"]


@pytest.mark.parametrize("oldest", [0, 3])
def test_calls_that_all_ended_hang_nowhere_however_far_back_each_dump_goes(oldest):
    assert hangs_of(job([call(n) for n in range(6)], [call(n) for n in range(oldest, 6)])) == ()
