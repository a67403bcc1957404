"""Ends of the same call on several ranks, worked by hand: times in ns, calls of 10 ms."""

import pytest
from gpu_traces import gpu_trace

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.peers import peers_of
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import EventRole

MS = 1_000_000
COMM = EventRole.COMM


def rank(number, *ends_ms, ahead_ms=0.0, kind=CollectiveKind.ALL_REDUCE, length_ms=10):
    rows = [(COMM, int((end - length_ms + ahead_ms) * MS), int((end + ahead_ms) * MS)) for end in ends_ms]
    calls = [{"sequence": at, "num_ranks": 4, "kind": kind, "op": kind.value} for at in range(len(ends_ms))]
    return gpu_trace(rows, calls=calls, rank=number, steps=[(1, 0, 10**9)])


def told(*traces):
    return [text for text in analyse(traces).warnings if "clock" in text or "different times" in text]


def test_a_clock_that_is_ahead_is_told_once_and_changes_no_figure():
    together = [rank(0, 20, 40, 60), rank(1, 20, 40, 60)]
    off = [rank(0, 20, 40, 60), rank(1, 20, 40, 60, ahead_ms=12)]
    assert told(*together) == []
    (text,) = told(*off)
    assert "rank 1's clock is 12.0 ms ahead of rank 0's, by the ends of 3 collectives" in text
    assert [r.waiting_ns for r in analyse(off).ranks] == [r.waiting_ns for r in analyse(together).ranks]


def test_several_clocks_are_one_line():
    (text,) = told(*(rank(number, 20, 40, 60, ahead_ms=-3.0 * number) for number in range(4)))
    assert "the clocks of 3 of 4 ranks differ from rank 0's, most rank 3's, which is 9.00 ms behind it" in text


def test_a_call_that_ends_apart_is_counted_and_has_no_waiting():
    # Number 2 lasts 10 ms on both ranks and ends 4 ms later on rank 1; its clock is 12 ms ahead as well.
    traces = [rank(0, 20, 40, 60, 80, 100), rank(1, 20, 40, 64, 80, 100, ahead_ms=12)]
    clock, ends = told(*traces)
    assert "12.0 ms ahead" in clock
    assert ends.startswith(
        "1 of 5 collectives that all their ranks leave at once ends at different times on them, "
        "all_reduce on dp 4.00 ms later on rank 1: "
    )
    names = peers_of(traces).names
    assert [name is None for name in names[0]] == [False, False, True, False, False]
    assert analyse(traces).rows[0].waiting_ns == 0  # of the other four, which all last 10 ms


def test_a_drifting_clock_is_no_disagreement():
    ends = [20.0 * (at + 1) for at in range(100)]  # 2 s; 300 ppm are 0.6 ms over them, more than ends may differ by
    drifted = [end * (1 + 300e-6) for end in ends]
    assert told(rank(0, *ends, length_ms=0.4), rank(1, *drifted, length_ms=0.4)) == []


@pytest.mark.parametrize("kind", [CollectiveKind.BROADCAST, CollectiveKind.SEND_RECV])
def test_kinds_that_a_rank_may_leave_early_are_not_compared(kind):
    assert told(rank(0, 20, 40, 60, kind=kind), rank(1, 20, 45, 60, kind=kind)) == []


def test_ranks_that_share_no_group_with_the_first_are_reached_through_others():
    def of(number, *groups, ahead_ms=0):
        rows, calls = [], []
        for at, group in enumerate(groups):
            end = (20 * (at + 1) + ahead_ms) * MS
            rows.append((COMM, end - 10 * MS, end))
            calls.append({"sequence": 0, "num_ranks": 2, "communicator": group})
        return gpu_trace(rows, calls=calls, rank=number)

    # 0 and 1 share "a", 1 and 2 share "b": by way of rank 1, rank 2 is 5 + 20 ms ahead.
    (text,) = told(of(0, "a"), of(1, "a", "b", ahead_ms=5), of(2, "b", ahead_ms=45))
    assert "most rank 2's, which is 25.0 ms ahead of it" in text
