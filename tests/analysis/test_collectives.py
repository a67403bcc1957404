import pytest
from gpu_traces import gpu_trace
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.analysis.collectives import (
    collective_rows,
    exposed_of_calls,
    unreachable_ns,
    waiting_of_calls,
)
from lagom_overlap.analysis.measures import occupation_of
from lagom_overlap.analysis.peers import peers_of
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import EventRole, KnobReach

COMM, COMP = EventRole.COMM, EventRole.COMPUTE


def rows_of(*traces):
    exposed = [exposed_of_calls(trace, occupation_of(trace.events)) for trace in traces]
    return collective_rows(traces, exposed, waiting_of_calls(traces, peers_of(traces)))


@given(
    st.lists(
        st.tuples(st.sampled_from([COMP, COMM]), st.integers(0, 60), st.integers(0, 20)).map(
            lambda r: (r[0], r[1], r[1] + r[2])
        ),
        max_size=14,
    )
)
def test_a_call_s_exposure_is_its_nanoseconds_without_computation(rows):
    trace = gpu_trace(rows)
    computes = {ns for role, a, b in rows if role is COMP for ns in range(a, b)}
    expected = [
        len(set(range(a, b)) - computes) for role, a, b in sorted(rows, key=lambda r: (r[1], r[2])) if role is COMM
    ]
    assert exposed_of_calls(trace, occupation_of(trace.events)).tolist() == expected


def test_bus_bandwidth_is_that_of_nccl_tests():
    # nccl-tests PERFORMANCE.md: an all-reduce of S over n ranks in t has busbw S/t * 2(n-1)/n.
    # 1 GB over 8 ranks in 10 ms: algbw 100 GB/s, busbw 175 GB/s.
    trace = gpu_trace([(COMM, 0, 10_000_000)], calls=[{"num_bytes": 10**9}])
    (row,) = rows_of(trace)
    assert row.busbw_bytes_per_s == pytest.approx(175e9)
    gather = {"num_bytes": 10**9, "kind": CollectiveKind.ALL_GATHER, "op": "all_gather"}
    (row,) = rows_of(gpu_trace([(COMM, 0, 10_000_000)], calls=[gather]))
    assert row.busbw_bytes_per_s == pytest.approx(87.5e9)


@pytest.mark.parametrize("unknown", [{"num_bytes": 0}, {"num_ranks": 0}, {"num_ranks": 1}, {"kind": None}])
def test_no_bandwidth_is_made_up(unknown):
    (row,) = rows_of(gpu_trace([(COMM, 0, 10)], calls=[unknown]))
    assert row.busbw_bytes_per_s is None


def test_the_shortest_of_the_ranks_moves_bytes_and_the_rest_waits():
    early = gpu_trace([(COMM, 0, 100), (COMM, 200, 260)], rank=0)
    late = gpu_trace([(COMM, 70, 100), (COMM, 180, 260)], rank=1)
    assert waiting_of_calls([early, late], peers_of([early, late])) == ((70, 0), (0, 20))
    (row,) = rows_of(early, late)
    assert (row.total_ns, row.waiting_ns) == (270, 90)


def test_sequence_numbers_match_calls_that_one_rank_does_not_have():
    first = gpu_trace([(COMM, 0, 100), (COMM, 200, 260)], calls=[{"sequence": 4}, {"sequence": 5}])
    second = gpu_trace([(COMM, 0, 40)], calls=[{"sequence": 5}], rank=1)
    assert waiting_of_calls([first, second], peers_of([first, second])) == ((None, 20), (0,))


def test_ranks_that_disagree_on_the_order_are_not_matched():
    first = gpu_trace([(COMM, 0, 100)])
    second = gpu_trace([(COMM, 0, 40)], calls=[{"op": "all_gather"}], rank=1)
    assert waiting_of_calls([first, second], peers_of([first, second])) == ((None,), (None,))


def test_send_and_receive_are_not_matched_over_ranks():
    fields = {"kind": CollectiveKind.SEND_RECV, "op": "send_recv", "sequence": 1}
    traces = [gpu_trace([(COMM, 0, 10 * (rank + 1))], calls=[fields], rank=rank) for rank in range(2)]
    assert waiting_of_calls(traces, peers_of(traces)) == ((None,), (None,))


def test_rows_differ_by_size_and_channels_and_add_up():
    trace = gpu_trace(
        [(COMM, 0, 10), (COMM, 20, 35), (COMM, 40, 45), (COMP, 0, 50)],
        calls=[{"num_channels": 8}, {"num_channels": 16}, {"num_channels": 8, "communicator": "tp"}],
    )
    rows = rows_of(trace)
    assert [(row.key.num_channels, row.total_ns) for row in rows] == [(16, 15), (8, 10), (8, 5)]


def test_communication_that_no_knob_reaches_is_added_up():
    calls = [{"reach": KnobReach.NONE}, {"reach": KnobReach.TUNER}]
    assert unreachable_ns(rows_of(gpu_trace([(COMM, 0, 7), (COMM, 10, 30)], calls=calls))) == 7


def test_more_calls_than_ranks_are_several_communicators_and_not_matched():
    traces = [gpu_trace([(COMM, 0, 10 * (rank + 1))], calls=[{"num_ranks": 2}], rank=rank) for rank in range(4)]
    assert waiting_of_calls(traces, peers_of(traces)) == ((None,),) * 4
